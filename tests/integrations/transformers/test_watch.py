"""The hooks on a model: put on once, silent for everything that is not a `KvCache`."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache

from kvcache_core.integrations.transformers import KvCache
from kvcache_core.integrations.transformers.watch import watch
from tests.integrations.tiny import greedy, random_ids, tiny_model


@pytest.fixture
def own_model():
    """A model that no other test has run: transformers leaves hooks of its own on one that has recorded outputs."""
    return tiny_model.__wrapped__()


def test_watching_twice_is_the_same_as_once(own_model, manager):
    for _ in range(3):
        KvCache(manager, own_model)
        watch(own_model)
    decoder = own_model.get_decoder()
    assert len(decoder._forward_pre_hooks) == len(decoder._forward_hooks) == 1


def test_the_decoder_itself_may_be_watched(own_model, manager):
    decoder = own_model.get_decoder()
    cache = KvCache(manager, decoder)
    with torch.no_grad():
        decoder(random_ids(5), cache=cache)
        decoder(random_ids(4), None, torch.arange(5, 9)[None], cache)  # positional arguments
    assert cache.get_seq_length() == 9
    assert cache.handle.token_ids == (*random_ids(5)[0].tolist(), *random_ids(4)[0].tolist())


def test_calls_without_a_kvcache_are_as_before(own_model):
    before = greedy(own_model, random_ids(9))
    watch(own_model)
    assert torch.equal(greedy(own_model, random_ids(9)), before)
    assert torch.equal(greedy(own_model, random_ids(9), DynamicCache(config=own_model.config)), before)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        own_model()


def test_a_call_without_input_is_refused_by_the_model_in_its_own_words(own_model, manager):
    cache = KvCache(manager, own_model)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        own_model(cache=cache)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_is_watched_too(duplicate, own_model, manager):
    watch(own_model)
    twin = duplicate(own_model)
    cache = KvCache(manager, twin)
    greedy(twin, random_ids(9), cache)
    assert len(cache.handle.token_ids) == 20
    assert len(twin.get_decoder()._forward_pre_hooks) == 1

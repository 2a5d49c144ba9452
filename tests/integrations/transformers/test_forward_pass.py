"""Forward passes are stored whole or not at all, and what cannot be stored is refused before anything changes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_core.errors import ShapeError, StepError, UnsupportedError
from kvcache_core.integrations.transformers import KvCache
from tests.integrations.tiny import greedy, random_ids, tiny_model


@contextmanager
def failing_at(module: torch.nn.Module, error: type[BaseException]) -> Iterator[None]:
    """Let the module raise when it is called."""

    def fail(*_: object) -> None:
        raise error("broken off")

    hook = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    return model.get_decoder().layers


def forward(model: PreTrainedModel, ids: torch.Tensor, cache: KvCache, **kwargs: object) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, cache=cache, **kwargs).logits


def random_kv(tokens: int, *, heads: int = 2, dim: int = 8, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, heads, tokens, dim), torch.randn(rows, heads, tokens, dim)


# -- whole or not at all -----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["first layer", "middle", "last layer's attention", "after the last layer"])
def test_a_pass_that_breaks_off_leaves_no_trace_and_can_be_repeated(where, error, model, manager):
    layers = layers_of(model)
    module = {
        "first layer": layers[0].self_attn.o_proj,
        "middle": layers[2].self_attn.q_proj,
        "last layer's attention": layers[-1].self_attn.o_proj,
        "after the last layer": layers[-1].mlp,
    }[where]
    ids = random_ids(9)
    cache = KvCache(manager, model)
    forward(model, ids[:, :5], cache)
    with failing_at(module, error), pytest.raises(error):
        forward(model, ids[:, 5:], cache)
    assert (cache.get_seq_length(), cache.get_mask_sizes(4)) == (5, (9, 0))
    repeated = forward(model, ids[:, 5:], cache)
    torch.testing.assert_close(repeated, forward(model, ids, KvCache(manager, model))[:, 5:])
    assert cache.handle.token_ids == tuple(ids[0].tolist())


def test_generation_goes_on_after_an_interruption(model, manager):
    ids = random_ids(9)
    cache = KvCache(manager, model)
    calls = 0

    def interrupt(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt

    hook = layers_of(model)[1].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        greedy(model, ids, cache)
    hook.remove()
    assert cache.get_seq_length() == 13
    assert cache.prepare(ids) == 8
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids))


@pytest.mark.parametrize(
    "recover", [lambda cache: cache.crop(0), lambda cache: cache.reset(), lambda cache: cache.fork()]
)
def test_what_an_interrupted_pass_reserved_is_given_back_by_the_next_use(recover, model, manager):
    cache = KvCache(manager, model)
    with failing_at(layers_of(model)[2], KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        forward(model, random_ids(9), cache)
    assert manager.stats().used_blocks == 3
    fork = recover(cache)
    assert manager.stats().used_blocks == 0
    del fork


def test_memory_is_given_back_when_a_cache_goes_with_an_interrupted_pass(model, manager):
    cache = KvCache(manager, model)
    with failing_at(layers_of(model)[2], KeyboardInterrupt), pytest.raises(KeyboardInterrupt) as caught:
        forward(model, random_ids(9), cache)
    gone = weakref.ref(cache)
    gc.disable()
    try:
        del caught  # its traceback holds the frames, and they the cache
        del cache
        assert gone() is None
        assert manager.stats().used_blocks == 0
    finally:
        gc.enable()


def test_length_queries_during_a_pass_see_the_tokens_before_it_and_do_not_disturb_it(model, manager):
    cache = KvCache(manager, model)
    ids = random_ids(9)
    seen: list[int] = []
    hook = layers_of(model)[2].register_forward_pre_hook(lambda *_: seen.append(cache.get_seq_length(2)))
    forward(model, ids[:, :5], cache)
    forward(model, ids[:, 5:], cache)
    hook.remove()
    assert seen == [0, 5]
    assert cache.get_seq_length() == 9


def test_a_model_that_runs_fewer_layers_than_the_cache_has_is_refused(model, manager):
    cache = KvCache(manager, model)
    layers = layers_of(model)
    shortened, model.get_decoder().layers = layers, layers[:3]
    try:
        with pytest.raises(StepError, match="wrote 3 of the 4 layers"):
            forward(model, random_ids(9), cache)
    finally:
        model.get_decoder().layers = shortened
    assert (cache.get_seq_length(), manager.stats().used_blocks) == (0, 0)


# -- without a model that tells when a pass begins -----------------------------------------------------------


def test_layers_may_be_written_in_any_order_and_the_last_one_commits(manager):
    cache = KvCache(manager)
    for layer in (2, 0, 3):
        cache.update(*random_kv(5), layer)
        assert cache.get_seq_length() == 0
    cache.update(*random_kv(5), 1)
    assert cache.get_seq_length() == 5


def test_a_layer_that_comes_again_begins_a_new_pass_after_one_that_broke_off(manager):
    cache = KvCache(manager)
    cache.update(*random_kv(5), 0)
    cache.update(*random_kv(5), 1)
    written = [random_kv(3) for _ in range(4)]
    for layer, (key, value) in enumerate(written):
        keys, values = cache.update(key, value, layer)
        assert torch.equal(keys, key)
        assert torch.equal(values, value)
    assert cache.get_seq_length() == 3


def test_layers_of_unequal_length_are_refused(manager):
    cache = KvCache(manager)
    cache.update(*random_kv(5), 0)
    with pytest.raises(ShapeError, match="layer 1"):
        cache.update(*random_kv(3), 1)
    assert cache.get_seq_length() == 0


# -- not stored ----------------------------------------------------------------------------------------------


def test_use_cache_false_attends_over_the_cache_and_stores_nothing(model, manager):
    cache = KvCache(manager, model)
    ids = random_ids(9)
    whole = forward(model, ids, KvCache(manager, model))
    forward(model, ids[:, :5], cache)
    for _ in range(2):
        logits = forward(model, ids[:, 5:], cache, use_cache=False)
        torch.testing.assert_close(logits, whole[:, 5:])
        assert cache.get_seq_length() == 5
    assert torch.equal(greedy(model, ids, KvCache(manager, model), use_cache=False), greedy(model, ids))


def test_a_cache_that_is_passed_is_filled_whatever_the_config_s_default(manager):
    model = copy.deepcopy(tiny_model())
    model.config.use_cache = False
    cache = KvCache(manager, model)
    forward(model, random_ids(5), cache)
    assert cache.get_seq_length() == 5
    forward(model, random_ids(5), cache, use_cache=False)
    assert cache.get_seq_length() == 5


def test_tensors_with_gradients_are_refused_with_advice(model, manager):
    cache = KvCache(manager, model)
    with pytest.raises(ShapeError, match=r"carries gradients.*no_grad"):
        model(random_ids(5), cache=cache)
    assert (cache.get_seq_length(), manager.stats().used_blocks) == (0, 0)
    with torch.inference_mode():
        model(random_ids(5), cache=cache)
    assert cache.get_seq_length() == 5


# -- refused before anything changes -------------------------------------------------------------------------


@pytest.fixture
def filled(model, manager) -> Iterator[KvCache]:
    cache = KvCache(manager, model)
    forward(model, random_ids(10), cache)
    before = [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]
    blocks = manager.stats().used_blocks
    yield cache
    after = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert cache.get_seq_length() == 10
    assert manager.stats().used_blocks == blocks
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_a_mask_that_does_not_cover_the_cache_is_refused(model, filled):
    with pytest.raises(ShapeError, match="covers 3 tokens, but 10 are cached and 3 new: extend it to 13"):
        forward(model, random_ids(3), filled, attention_mask=torch.ones(1, 3))


def test_positions_that_do_not_continue_the_cache_are_refused(model, filled):
    for first in (0, 9, 11):
        with pytest.raises(ShapeError, match=r"call cache\.prepare"):
            forward(model, random_ids(3), filled, position_ids=torch.arange(first, first + 3)[None])
    with pytest.raises(ShapeError, match="positions 10, 12, 13"):
        forward(model, random_ids(3), filled, position_ids=torch.tensor([[10, 12, 13]]))


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        ("reset", ()),
        ("crop", (-1,)),
        ("offload", ()),
        ("reorder_cache", (torch.tensor([0]),)),
        ("batch_repeat_interleave", (2,)),
        ("batch_select_indices", (torch.tensor([0]),)),
    ],
)
def test_operations_on_a_single_layer_are_refused(operation, arguments, filled):
    with pytest.raises(UnsupportedError):
        getattr(filled.layers[1], operation)(*arguments)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (torch.randn(1, 3, 2, 8), torch.randn(1, 2, 2, 8)),
        (torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 4)),
        (torch.randn(1, 2, 2, 8), torch.randn(1, 2, 3, 8)),
        (torch.randn(2, 2, 8), torch.randn(2, 2, 8)),
        (torch.randn(1, 2, 0, 8), torch.randn(1, 2, 0, 8)),
        (torch.ones(1, 2, 2, 8, dtype=torch.int), torch.randn(1, 2, 2, 8)),
        (torch.randn(1, 2, 2, 8, dtype=torch.float64), torch.randn(1, 2, 2, 8)),
    ],
)
def test_tensors_that_do_not_fit_are_refused(key, value, filled):
    with pytest.raises(ShapeError):
        filled.update(key, value, 0)


@pytest.mark.parametrize("layer", [4, -1, "0", None])
def test_layers_that_do_not_exist_are_refused(layer, filled):
    with pytest.raises(ShapeError, match="layer must be an int from 0 to 3"):
        filled.update(*random_kv(2), layer)


def test_an_own_mask_is_followed_and_makes_its_tokens_anonymous(model, manager):
    cache = KvCache(manager, model)
    ids = random_ids(4)
    mask = torch.ones(1, 1, 4, 4, dtype=torch.bool)  # every token sees every token
    logits = forward(model, ids, cache, attention_mask=mask)
    assert not torch.allclose(logits, forward(model, ids, KvCache(manager, model)))
    assert (cache.get_seq_length(), cache.handle.token_ids) == (4, ())


def test_embeddings_in_place_of_ids_are_anonymous(model, manager):
    cache = KvCache(manager, model)
    ids = random_ids(6)
    with torch.no_grad():
        out = model(inputs_embeds=model.get_input_embeddings()(ids), cache=cache)
    torch.testing.assert_close(out.logits, forward(model, ids, KvCache(manager, model)))
    assert (cache.get_seq_length(), cache.handle.token_ids) == (6, ())


def test_the_model_is_not_kept_alive_by_its_caches_nor_they_by_it(manager):
    model = copy.deepcopy(tiny_model())
    cache = KvCache(manager, model)
    greedy(model, random_ids(9), cache)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert cache.get_seq_length() == 20

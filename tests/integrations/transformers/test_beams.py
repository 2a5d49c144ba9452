"""Beams and other operations on rows: rows are moved and forked, and what nobody goes on with is given back."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_core.errors import CacheFullError, ShapeError
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache
from kvcache_core.manager import KvCacheManager
from tests.integrations.tiny import greedy, left_padded, random_ids, tiny_model

PROMPTS = [random_ids(5, seed=1), random_ids(9, seed=2)]
MODES = {
    "beams": {"num_beams": 4},
    "sampled beams": {"num_beams": 3, "do_sample": True, "temperature": 1.3},
    "several beams returned": {"num_beams": 4, "num_return_sequences": 3},
    "beams with a length penalty": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": True},
    "several samples": {"num_return_sequences": 3, "do_sample": True, "temperature": 1.3},
}
FAMILIES = ("llama", "gemma3", "gpt2", "bloom")  # docs/identity.md has the others


@pytest.fixture(params=["sdpa", ATTENTION_NAME])
def attention(request: pytest.FixtureRequest) -> str:
    return request.param


def attending(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    model = copy.deepcopy(model)
    model.set_attn_implementation(attention)
    return model


def generate(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: object, **mode: object):
    torch.manual_seed(11)
    return model.generate(ids, attention_mask=mask, cache=cache, **{"max_new_tokens": 10, "do_sample": False, **mode})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_padded_batches_say_the_same_as_on_dynamic_cache(mode, family, attention, open_for):
    model = tiny_model(family)
    ids, mask = left_padded(PROMPTS)
    cache = KvCache(open_for(model), model)
    expected = generate(model, ids, mask, DynamicCache(config=model.config), **mode)
    assert torch.equal(generate(attending(model, attention), ids, mask, cache, **mode), expected)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_one_prefilled_prompt_is_continued_in_several_ways(mode, attention, open_for):
    model = attending(tiny_model(), attention)
    ids = random_ids(12)
    cache = KvCache(open_for(model), model)
    with torch.no_grad():
        model(ids[:, :11], cache=cache)
    assert cache.prepare(ids) == 11
    mask = torch.ones_like(ids)
    expected = generate(model, ids, mask, DynamicCache(config=model.config), **mode)
    assert torch.equal(generate(model, ids, mask, cache, **mode), expected)


def test_equal_prompts_are_stored_once(model, manager):
    ids, mask = left_padded([*PROMPTS[:1] * 3, *PROMPTS[1:] * 3])
    cache = KvCache(manager, model)
    with torch.no_grad():
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits
        torch.testing.assert_close(logits[:, -1], model(ids, attention_mask=mask, position_ids=positions).logits[:, -1])
    assert manager.stats().used_blocks == 2 + 3
    assert [handle.num_tokens for handle in cache.handles] == [5] * 3 + [9] * 3
    assert len({handle.cache_id for handle in cache.handles}) == 6


def test_equal_prompts_without_room_for_their_rows_leave_the_cache_empty(model, manager, monkeypatch):
    cache = KvCache(manager, model)
    handle_type = type(cache.handle)

    def refuse(*_: object, **__: object) -> None:
        raise CacheFullError("no room", needed=1, free=0)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(handle_type, "fork", refuse)
        with pytest.raises(CacheFullError, match="no room"):
            model(PROMPTS[1].repeat(3, 1), cache=cache)
    assert (cache.get_seq_length(), cache.batch_size, manager.stats().used_blocks) == (0, 1, 0)
    assert len(manager.list_handles()) == 1
    with torch.no_grad():
        model(PROMPTS[1].repeat(3, 1), cache=cache)
    assert cache.batch_size == 3


def test_rows_that_are_equal_but_for_their_padding_are_not_taken_for_one(model, manager):
    prompt, pads = PROMPTS[0], torch.zeros(1, 2, dtype=torch.long)
    ids = torch.cat([torch.cat([pads, prompt], dim=1), torch.cat([prompt, pads], dim=1)])
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    cache = KvCache(manager, model)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits
    torch.testing.assert_close(logits[0, 2:], logits[1, :5])
    assert not cache.layers[1].keys[0, :, :2].any()
    assert not cache.layers[1].keys[1, :, 5:].any()


# -- what happens to the rows --------------------------------------------------------------------------------


@pytest.fixture
def three(model: PreTrainedModel, manager: KvCacheManager) -> KvCache:
    cache = KvCache(manager, model)
    with torch.no_grad():
        model(torch.cat([random_ids(6, seed=seed) for seed in (1, 2, 3)]), cache=cache)
    return cache


def test_a_row_that_survives_once_is_moved_and_others_are_forked(three, manager):
    first, second, third = three.handles
    three.reorder_cache(torch.tensor([2, 0, 2]))
    assert three.handles[0] is third
    assert three.handles[1] is first
    assert three.handles[2].cache_id not in {first.cache_id, second.cache_id, third.cache_id}
    assert three.handles[2].token_ids == third.token_ids
    assert not second.is_valid
    assert len(manager.list_handles()) == 3
    assert manager.stats().used_blocks == 2 * 2


def test_reordering_the_rows_as_they_are_changes_nothing(three):
    before = three.handles
    three.reorder_cache(torch.tensor([0, 1, 2]))
    assert three.handles == before


def test_rows_are_selected_and_repeated_as_transformers_does_it(three, model):
    plain = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.cat([random_ids(6, seed=seed) for seed in (1, 2, 3)]), cache=plain)
    for cache in (three, plain):
        cache.batch_select_indices(torch.tensor([1, 2]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([0, 3, 3, 1]))
        cache.crop(-2)
    assert three.batch_size == 4
    for ours, theirs in zip(three.layers, plain.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
        torch.testing.assert_close(ours.values, theirs.values)
    more = torch.cat([random_ids(3, seed=seed) for seed in (4, 5, 6, 7)])
    with torch.no_grad():
        torch.testing.assert_close(model(more, cache=three).logits, model(more, cache=plain).logits)


@pytest.mark.parametrize("indices", [[3], [-1], [0, 5], [], [True], [0.0], torch.tensor([[0]])])
def test_indices_that_are_not_those_of_rows_are_refused(indices, three):
    before = three.handles
    with pytest.raises(ShapeError, match="from 0 to 2"):
        three.batch_select_indices(indices)
    assert three.handles == before


@pytest.mark.parametrize("repeats", [0, -1, True, 1.0, None])
def test_a_number_of_repeats_below_one_is_refused(repeats, three):
    with pytest.raises(ShapeError, match="at least 1"):
        three.batch_repeat_interleave(repeats)
    assert three.batch_size == 3


def test_an_empty_cache_takes_on_any_number_of_rows(model, manager):
    cache = KvCache(manager, model)
    cache.reorder_cache(torch.tensor([0, 3, 1]))
    cache.batch_repeat_interleave(2)
    for rows in (3, 2):
        with torch.no_grad():
            model(torch.cat([random_ids(6, seed=seed) for seed in range(rows)]), cache=cache)
        assert cache.batch_size == rows
        cache.reset()
        assert manager.stats().used_blocks == 0


def test_a_reorder_without_room_changes_nothing(three, monkeypatch):
    handles = three.handles
    forks = 0
    fork = type(handles[0]).fork

    def limited(self: object, **kwargs: object) -> object:
        nonlocal forks
        forks += 1
        if forks == 2:
            raise CacheFullError("no room", needed=1, free=0)
        return fork(self, **kwargs)

    monkeypatch.setattr(type(handles[0]), "fork", limited)
    with pytest.raises(CacheFullError):
        three.reorder_cache(torch.tensor([1, 1, 1]))
    assert three.handles == handles
    assert all(handle.is_valid for handle in handles)
    assert len(three.manager.list_handles()) == 3


def test_a_fork_of_a_batch_goes_its_own_way(three, model):
    fork = copy.deepcopy(three)
    more = [torch.cat([random_ids(4, seed=10 * turn + row) for row in range(3)]) for turn in range(2)]
    with torch.no_grad():
        got = [model(ids, cache=cache).logits for ids, cache in zip(more, (three, fork), strict=True)]
        prompts = torch.cat([random_ids(6, seed=seed) for seed in (1, 2, 3)])
        for ids, logits in zip(more, got, strict=True):
            torch.testing.assert_close(logits, model(torch.cat([prompts, ids], dim=1)).logits[:, 6:])


def test_beams_that_were_given_up_are_not_kept_for_others(open_for, model):
    pool = open_for(model, prefix=True)
    cache = KvCache(pool, model)
    ids = random_ids(9)
    generate(model, ids, torch.ones_like(ids), cache, num_beams=4, max_new_tokens=16)
    assert pool.stats().cached_prefixes == 0
    assert pool.stats().cached_blocks == 0
    cache.free()
    assert 1 <= pool.stats().cached_prefixes <= 4


def test_greedy_goes_on_after_beams(model, manager):
    cache = KvCache(manager, model)
    ids = random_ids(9)
    best = generate(model, ids, torch.ones_like(ids), cache, num_beams=3)
    longer = torch.cat([best, random_ids(2)], dim=1)
    assert cache.prepare(longer) >= 9
    assert torch.equal(greedy(model, longer, cache), greedy(model, longer))
    assert len(manager.list_handles()) == 1

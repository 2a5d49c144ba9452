"""`prepare`: what a batch keeps of its own rows, and what requests find that others have stored."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import PreTrainedModel

from kvcache_core.errors import CacheFullError, ShapeError
from kvcache_core.integrations.transformers import KvCache
from kvcache_core.manager import KvCacheManager
from tests.integrations.tiny import greedy, left_padded, random_ids, tiny_model

SYSTEM = random_ids(18, seed=40)


def ask(seed: int, length: int = 5) -> torch.Tensor:
    """A prompt that begins with the system prompt."""
    return torch.cat([SYSTEM, random_ids(length, seed=seed)], dim=1)


@pytest.fixture
def pool(open_for, model: PreTrainedModel) -> KvCacheManager:
    """A cache, in blocks of 4 tokens, in which prompts find each other's."""
    return open_for(model, prefix=True)


def answer(pool: KvCacheManager, model: PreTrainedModel, ids: torch.Tensor, **kwargs: object) -> int:
    """Answer a request on a cache of its own, which is gone afterwards; returns the tokens that it found."""
    cache = KvCache(pool, model, **kwargs)
    reused = cache.prepare(ids)
    assert torch.equal(greedy(model, ids, cache), greedy(model, ids))
    cache.free()
    return reused


# -- separate requests ---------------------------------------------------------------------------------------


def test_a_second_request_finds_the_system_prompt_of_the_first(model, pool):
    assert answer(pool, model, ask(1)) == 0
    assert answer(pool, model, ask(2)) == 16
    assert answer(pool, model, ask(1)) == 20
    assert pool.stats().hit_rate == pytest.approx(36 / 69)


def test_a_request_finds_what_another_is_still_using(model, pool):
    first, second = KvCache(pool, model), KvCache(pool, model)
    greedy(model, ask(1), first)
    assert second.prepare(ask(2)) == 16
    assert torch.equal(greedy(model, ask(2), second), greedy(model, ask(2)))


def test_a_conversation_that_is_taken_up_again_finds_the_answers_too(model, pool):
    cache = KvCache(pool, model)
    first = greedy(model, ask(1), cache)
    cache.free()
    longer = torch.cat([first, random_ids(3)], dim=1)
    assert answer(pool, model, longer) == 32  # of 34 that were cached


def test_another_prompt_in_the_same_cache_leaves_the_former_conversation_to_others(model, pool):
    cache = KvCache(pool, model)
    first = greedy(model, ask(1), cache)
    assert cache.prepare(ask(2)) == 18
    assert torch.equal(greedy(model, ask(2), cache), greedy(model, ask(2)))
    assert cache.prepare(first) == 32


def test_what_a_cache_has_of_its_own_is_preferred_to_whole_blocks_of_others(model, pool):
    answer(pool, model, ask(1))
    cache = KvCache(pool, model)
    with torch.no_grad():
        model(SYSTEM, cache=cache)
    assert cache.prepare(ask(2)) == 18


@pytest.mark.parametrize("other", [{"salt": "b"}, {"adapter": "b"}, {}])
def test_tenants_and_adapters_do_not_find_each_others_prompts(other, model, pool):
    assert answer(pool, model, ask(1), salt="a", adapter="a") == 0
    assert answer(pool, model, ask(1), **other) == 0
    assert answer(pool, model, ask(1), salt="a", adapter="a") == 20


def test_copies_belong_to_the_same_tenant(model, pool):
    answer(pool, model, ask(1), salt="a")
    cache = KvCache(pool, model, salt="a").fork()
    assert cache.prepare(ask(1)) == 20


def test_two_models_of_one_shape_do_not_find_each_others_prompts(model, pool):
    twin = copy.deepcopy(model)
    answer(pool, model, ask(1))
    assert answer(pool, twin, ask(1)) == 0
    assert answer(pool, twin, ask(1)) == 20


def test_lmdeploy_4917_nothing_computed_by_former_weights_is_reused(pool):
    model = copy.deepcopy(tiny_model())
    cache = KvCache(pool, model)
    greedy(model, ask(1), cache)
    KvCache(pool, model).prepare(ask(1))
    with torch.no_grad():
        model.get_decoder().layers[1].mlp.up_proj.weight.mul_(1.5)
    assert cache.prepare(ask(1)) == 0
    assert torch.equal(greedy(model, ask(1), cache), greedy(model, ask(1)))
    cache.free()
    assert answer(pool, model, ask(1)) == 20
    model.get_decoder().layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(64, 32))
    assert answer(pool, model, ask(1)) == 0


def test_a_model_that_the_cache_was_not_told_about_stores_nothing_to_be_found(model, pool):
    twin = copy.deepcopy(model)
    for one in (model, twin):
        KvCache(pool, one)
        cache = KvCache(pool)
        assert cache.prepare(ask(1)) == 0
        assert torch.equal(greedy(one, ask(1), cache), greedy(one, ask(1)))
    assert answer(pool, model, ask(1)) == 0


def test_a_cache_that_is_used_with_another_model_than_it_was_told_stores_nothing_to_be_found(model, pool):
    twin = copy.deepcopy(model)
    cache = KvCache(pool, twin)
    KvCache(pool, model)
    with torch.no_grad():
        model(ask(1), cache=cache)
    assert cache.handle.token_ids == ()


@pytest.mark.parametrize("chunk", [None, 3])
def test_tenstorrent_vllm_415_a_hit_of_any_length_gives_the_logits_of_a_miss(chunk, model, pool):
    ids = random_ids(21, seed=5)
    answer(pool, model, ids)
    with torch.no_grad():
        cold = model(ids).logits
        for kept in (0, 4, 8, 16, 20):
            cache = KvCache(pool, model)
            prompt = torch.cat([ids[:, : kept + 1], random_ids(2, seed=6)], dim=1) if kept < 20 else ids
            assert cache.prepare(prompt) == kept
            rest = prompt[:, kept:]
            parts = rest.split(chunk or rest.shape[1], dim=1)
            got = torch.cat([model(part, cache=cache).logits for part in parts], dim=1)
            torch.testing.assert_close(got, model(prompt).logits[:, kept:])
    torch.testing.assert_close(got[:, -1:], cold[:, -1:])


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
@pytest.mark.parametrize("shared", [4, 8, 11, 15, 20])
def test_mlx_vlm_1715_a_hit_around_the_window_equals_a_cold_run(shared, family, open_for):
    model = tiny_model(family)  # windows of 8 tokens
    pool = open_for(model, prefix=True)
    first = random_ids(24, seed=1)
    answer(pool, model, first)
    prompt = torch.cat([first[:, :shared], random_ids(9, seed=2)], dim=1)
    assert answer(pool, model, prompt) == shared // 4 * 4


def test_lmstudio_mlx_engine_188_what_is_found_follows_crops_and_other_continuations(model, pool):
    cache = KvCache(pool, model)
    first, other = random_ids(12, seed=1), random_ids(8, seed=2)
    with torch.no_grad():
        model(first, cache=cache)
        cache.crop(-7)
        model(other, cache=cache)
    now = torch.cat([first[:, :5], other], dim=1)
    assert cache.handle.token_ids == tuple(now[0].tolist())
    cache.free()
    assert answer(pool, model, torch.cat([now, random_ids(1)], dim=1)) == 12
    assert answer(pool, model, torch.cat([first, random_ids(1)], dim=1)) == 4


def test_a_full_cache_does_without_what_others_have_stored(open_for, model):
    pool = open_for(model, prefix=True, num_blocks=12, max_sequence_length=40)
    cache = KvCache(pool, model)
    greedy(model, ask(1), cache, new_tokens=2)
    other = KvCache(pool, model)
    greedy(model, random_ids(20, seed=8), other, new_tokens=1)
    assert cache.prepare(random_ids(17, seed=9)) == 0
    assert torch.equal(
        greedy(model, random_ids(17, seed=9), cache, new_tokens=4), greedy(model, random_ids(17, seed=9), new_tokens=4)
    )


# -- batches -------------------------------------------------------------------------------------------------


def run(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: KvCache) -> torch.Tensor:
    return model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=8, do_sample=False)


def test_a_batch_keeps_what_its_rows_have_in_common_with_the_prompts(model, manager):
    cache = KvCache(manager, model)
    first = [random_ids(length, seed=length) for length in (4, 9, 11)]
    run(model, *left_padded(first), cache)
    second = [torch.cat([prompt, random_ids(2, seed=50 + row)], dim=1) for row, prompt in enumerate(first)]
    ids, mask = left_padded(second)
    # Pads of 7, 2 and 0 columns and the 4, 9 and 11 tokens of the first prompts: the least of 11, 11 and 11 columns.
    assert cache.prepare(ids, mask) == 4 + 9 + 11
    assert cache.get_seq_length() == 11
    assert torch.equal(run(model, ids, mask, cache), run(model, ids, mask, KvCache(manager, model)))


def test_the_row_with_least_in_common_limits_the_others(model, manager):
    cache = KvCache(manager, model)
    first = [random_ids(length, seed=length) for length in (4, 9, 11)]
    run(model, *left_padded(first), cache)
    edited = first[1].clone()
    edited[0, 3] = (edited[0, 3] + 1) % 90 + 3
    ids, mask = left_padded([first[0], edited, first[2]])
    assert cache.prepare(ids, mask) == 0 + 3 + 5
    assert torch.equal(run(model, ids, mask, cache), run(model, ids, mask, KvCache(manager, model)))


def test_rows_go_to_the_prompts_that_they_fit(model, manager):
    cache = KvCache(manager, model)
    first = [random_ids(9, seed=seed) for seed in (1, 2, 3)]
    run(model, *left_padded(first), cache)
    ids, mask = left_padded([first[2], first[0], first[2], first[1]])
    assert cache.prepare(ids, mask) == 4 * 8
    assert cache.batch_size == 4
    assert torch.equal(run(model, ids, mask, cache), run(model, ids, mask, KvCache(manager, model)))
    assert cache.prepare(first[1]) == 8
    assert cache.batch_size == 1
    assert len(manager.list_handles()) == 1


def test_a_prompt_that_was_run_once_begins_every_row_of_a_batch(model, manager):
    cache = KvCache(manager, model)
    with torch.no_grad():
        model(SYSTEM, cache=cache)
    blocks = manager.stats().used_blocks
    ids, mask = left_padded([ask(1), ask(2), ask(3)])
    assert cache.prepare(ids, mask) == 3 * 18
    assert manager.stats().used_blocks <= blocks + 2
    assert torch.equal(run(model, ids, mask, cache), run(model, ids, mask, KvCache(manager, model)))


def test_rows_of_a_batch_find_what_separate_requests_have_stored(model, pool):
    answer(pool, model, ask(1))
    cache = KvCache(pool, model)
    ids, mask = left_padded([ask(2, 7), ask(3, 5)])
    assert cache.prepare(ids, mask) == 16 + 14  # two pads before the second
    assert torch.equal(run(model, ids, mask, cache), run(model, ids, mask, KvCache(pool, model)))
    cache.free()
    assert answer(pool, model, ask(3, 5)) == 20


def test_lists_of_different_lengths_are_taken_as_padded_on_the_left(model, manager):
    cache = KvCache(manager, model)
    prompts = [random_ids(4, seed=1), random_ids(6, seed=2)]
    ids, mask = left_padded(prompts)
    run(model, ids, mask, cache)
    assert cache.prepare([prompt[0].tolist() for prompt in prompts]) == 3 + 5
    assert torch.equal(run(model, ids, mask, cache), run(model, ids, mask, KvCache(manager, model)))


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[5, 6], []], None, "empty"),
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [0, 0, 0]]), "empty"),
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [1, 1, 0]]), "pad on the left"),
        (torch.ones(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [1, 0, 1]]), "pad on the left"),
        (torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4), "the shape of input_ids"),
        (torch.ones(2, 3, dtype=torch.long), torch.ones(1, 3), "the shape of input_ids"),
    ],
)
def test_what_is_no_batch_of_prompts_is_refused(ids, mask, message, model, manager):
    cache = KvCache(manager, model)
    run(model, *left_padded([random_ids(4), random_ids(6)]), cache)
    with pytest.raises(ShapeError, match=message):
        cache.prepare(ids, mask)
    assert (cache.batch_size, cache.get_seq_length()) == (2, 13)


def test_a_batch_that_has_no_room_is_refused_before_anything_is_dropped(model, manager):
    cache = KvCache(manager, model, max_sequence_length=14)
    run(model, *left_padded([random_ids(4), random_ids(6)]), cache)
    with pytest.raises(CacheFullError, match="the prompt has 15 tokens"):
        cache.prepare(*left_padded([random_ids(4), random_ids(15)]))
    assert (cache.batch_size, cache.get_seq_length()) == (2, 13)


def test_pads_after_the_end_of_a_row_are_never_found(pool):
    model = copy.deepcopy(tiny_model())
    ids, mask = left_padded([random_ids(6, seed=1), random_ids(6, seed=2)])
    free = run(model, ids, mask, KvCache(pool, model))
    end = free[0, 7].item()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = end, 0
    cache = KvCache(pool, model)
    out = run(model, ids, mask, cache)
    assert out[0, 8:].tolist() == [0] * 6
    assert cache.handles[0].token_ids == tuple(out[0, :8].tolist())
    assert cache.handles[1].token_ids == tuple(out[1, :-1].tolist())


@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_whose_k_and_v_depend_on_more_than_their_ids_are_not_found_and_not_shared(rows, open_for):
    model = tiny_model("gpt2")
    pool = open_for(model, prefix=True)
    ids = random_ids(9).repeat(rows, 1)
    types = torch.arange(3, 3 + rows)[:, None].expand(rows, 9)
    cache = KvCache(pool, model)
    with torch.no_grad():
        model(ids[:, :8], token_type_ids=types[:, :8], cache=cache)
        got = model(ids[:, 8:], token_type_ids=types[:, 8:], cache=cache).logits
        torch.testing.assert_close(got, model(ids, token_type_ids=types).logits[:, 8:])
    cache.free()
    assert KvCache(pool, model).prepare(ids) == 0

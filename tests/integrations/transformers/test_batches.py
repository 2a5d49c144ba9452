"""Batches: every row is a sequence of its own, says what it says alone, and pads cost no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvcache_core.errors import ShapeError
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache
from kvcache_core.manager import KvCacheManager
from kvcache_core.step import Step
from tests.integrations.tiny import greedy, left_padded, random_ids, tiny_model

FAMILIES = ("llama", "mistral", "gemma2", "gemma3n", "gpt2", "bloom", "mpt")  # docs/identity.md has the others
PROMPTS = [random_ids(3, seed=1), random_ids(7, seed=2), random_ids(12, seed=3)]


def generate(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, cache: object, **kwargs: object):
    arguments = {"max_new_tokens": 10, "do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=mask, cache=cache, **arguments)


@pytest.fixture(params=["sdpa", "eager", ATTENTION_NAME])
def attend_by(request: pytest.FixtureRequest) -> Callable[[str], PreTrainedModel]:
    """Makes a model of a family that attends in one of several ways."""

    def make(family: str) -> PreTrainedModel:
        if request.param != "eager" and family in ("gemma2", "gpt_oss"):
            pytest.skip("only eager attention knows soft caps and sinks")
        model = copy.deepcopy(tiny_model(family))
        model.set_attn_implementation(request.param)
        return model

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_prompts_continue_as_on_dynamic_cache(family, attend_by, open_for):
    model, (ids, mask) = attend_by(family), left_padded(PROMPTS)
    cache = KvCache(open_for(model), model)
    expected = generate(tiny_model(family), ids, mask, DynamicCache(config=model.config), use_cache=True)
    assert torch.equal(generate(model, ids, mask, cache, use_cache=True), expected)
    assert [handle.num_tokens for handle in cache.handles] == [12, 16, 21]


@pytest.mark.parametrize("family", ["llama", "gemma3", "opt", "bloom", "gpt2"])
def test_each_row_says_what_it_says_alone(family, attend_by, open_for):
    model, (ids, mask) = attend_by(family), left_padded(PROMPTS)
    out = generate(model, ids, mask, KvCache(open_for(model), model))
    for row, prompt in enumerate(PROMPTS):
        assert torch.equal(out[row, 12:], greedy(model, prompt, new_tokens=10)[0, prompt.shape[1] :])


def test_a_single_padded_prompt_is_the_same_as_without_pads(attend_by, open_for):
    model = attend_by("llama")
    ids, mask = left_padded([PROMPTS[0]], width=9)
    cache = KvCache(open_for(model), model)
    out = generate(model, ids, mask, cache)
    assert torch.equal(out[0, 9:], greedy(model, PROMPTS[0], new_tokens=10)[0, 3:])
    assert (cache.get_seq_length(), cache.handle.num_tokens) == (18, 12)
    assert cache.handle.token_ids == tuple(out[0, 6:-1].tolist())


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunked_prefill_of_a_batch(chunk, attend_by, open_for):
    model, (ids, mask) = attend_by("gemma3"), left_padded(PROMPTS)
    cache = KvCache(open_for(model), model)
    assert torch.equal(
        generate(model, ids, mask, cache, prefill_chunk_size=chunk),
        generate(model, ids, mask, DynamicCache(config=model.config)),
    )


def test_a_batch_is_fed_by_hand_in_ragged_chunks(attend_by, open_for):
    model, (ids, mask) = attend_by("llama"), left_padded(PROMPTS)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache = KvCache(open_for(model), model)
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, position_ids=positions).logits
        start, got = 0, []
        for width in (5, 1, 1, 4, 1):
            stop = start + width
            got.append(
                model(
                    ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    position_ids=positions[:, start:stop],
                    cache=cache,
                ).logits
            )
            start = stop
    for row in range(3):
        real = mask[row].bool()
        torch.testing.assert_close(torch.cat(got, dim=1)[row, real], expected[row, real])


def test_pads_are_not_stored(model, manager):
    ids, mask = left_padded(PROMPTS)
    cache = KvCache(manager, model)
    generate(model, ids, mask, cache, max_new_tokens=1)
    assert [handle.num_tokens for handle in cache.handles] == [3, 7, 12]
    assert [handle.token_ids for handle in cache.handles] == [tuple(prompt[0].tolist()) for prompt in PROMPTS]
    assert manager.stats().used_blocks == 1 + 2 + 3
    keys = cache.layers[0].keys
    assert keys.shape == (3, 2, 12, 8)
    assert not keys[0, :, :9].any()
    assert keys[0, :, 9:].all()


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3n"])
def test_the_backend_attends_ragged_rows_without_a_padded_copy(family, open_for, monkeypatch):
    model = copy.deepcopy(tiny_model(family))
    model.set_attn_implementation(ATTENTION_NAME)
    queries: list[int] = []
    attend = Step.attend

    def count(self: Step, layer: int, query: torch.Tensor, **kwargs: float) -> torch.Tensor:
        queries.append(query.shape[0])
        return attend(self, layer, query, **kwargs)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a padded copy")

    monkeypatch.setattr(Step, "attend", count)
    monkeypatch.setattr(Step, "gather", refuse)
    ids, mask = left_padded(PROMPTS)
    generate(model, ids, mask, KvCache(open_for(model), model), max_new_tokens=3)
    layers = model.config.num_hidden_layers
    assert queries == [3 + 7 + 12] * layers + [3] * 2 * layers


def test_another_attention_function_under_our_name_fails_instead_of_computing_something(model, manager, monkeypatch):
    model = copy.deepcopy(model)
    model.set_attn_implementation(ATTENTION_NAME)
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION_NAME, sdpa_attention_forward)
    cache = KvCache(manager, model)
    with pytest.raises((RuntimeError, NotImplementedError)):
        generate(model, *left_padded(PROMPTS), cache)
    assert manager.stats().used_blocks in (0, 6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_second_turn_may_be_padded_too(family, attend_by, open_for):
    model = attend_by(family)
    cache = KvCache(open_for(model), model)
    turns = [
        [random_ids(length, seed=length + turn) for length in lengths]
        for turn, lengths in enumerate([(3, 7, 5), (4, 1, 6)])
    ]
    whole, mask = None, torch.zeros(3, 0, dtype=torch.long)
    for turn in turns:
        ids, new = left_padded(turn)
        mask = torch.cat([mask, new], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        whole = turn if whole is None else [torch.cat(pair, dim=1) for pair in zip(whole, turn, strict=True)]
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, position_ids=positions, cache=cache).logits
            for row, prompt in enumerate(whole):
                torch.testing.assert_close(logits[row, -1], tiny_model(family)(prompt).logits[0, -1])
    assert [handle.token_ids for handle in cache.handles] == [tuple(prompt[0].tolist()) for prompt in whole]
    assert cache.get_seq_length() == 7 + 6


def test_a_model_that_counts_columns_does_so_as_on_dynamic_cache_and_its_padded_rows_have_no_ids(attend_by, open_for):
    model = attend_by("llama")
    cache, plain = KvCache(open_for(model), model), DynamicCache(config=model.config)
    ids, mask = left_padded(PROMPTS)
    with torch.no_grad():
        for start, stop in ((0, 9), (9, 12)):
            arguments = {"attention_mask": mask[:, :stop]}
            got = model(ids[:, start:stop], cache=cache, **arguments).logits
            expected = tiny_model()(ids[:, start:stop], cache=plain, **arguments).logits
    torch.testing.assert_close(got, expected)
    assert [len(handle.token_ids) for handle in cache.handles] == [0, 0, 9 + 3]
    assert cache.prepare(ids, mask) == 5  # of the row without pads: as many columns as the second has pads


@pytest.mark.parametrize("columns", [1, 5, 6, 9, 12])
def test_crop_takes_columns_from_padded_rows(columns, model, manager):
    ids, mask = left_padded(PROMPTS)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    cache, shorter = KvCache(manager, model), KvCache(manager, model)
    kept = 12 - columns
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, cache=cache)
        cache.crop(-columns)
        assert cache.get_seq_length() == kept
        if not kept:
            assert manager.stats().used_blocks == 0
            return
        model(ids[:, :kept], attention_mask=mask[:, :kept], position_ids=positions[:, :kept], cache=shorter)
        for ours, expected in zip(cache.layers, shorter.layers, strict=True):
            torch.testing.assert_close(ours.keys, expected.keys)
        again = model(ids[:, kept:], attention_mask=mask, position_ids=positions[:, kept:], cache=cache).logits
        torch.testing.assert_close(again[:, -1], model(ids, attention_mask=mask, position_ids=positions).logits[:, -1])


def test_without_its_model_a_batch_stores_pads_as_tokens_and_is_masked_by_the_model(manager):
    model = copy.deepcopy(tiny_model())
    model.get_decoder()._forward_pre_hooks.clear()
    model.get_decoder()._forward_hooks.clear()
    ids, mask = left_padded(PROMPTS)
    cache = KvCache(manager)
    expected = generate(model, ids, mask, DynamicCache(config=model.config))
    assert torch.equal(generate(model, ids, mask, cache), expected)
    assert [handle.num_tokens for handle in cache.handles] == [21] * 3
    assert [handle.token_ids for handle in cache.handles] == [()] * 3


# -- passes that break off, and what a batch may not do -------------------------------------------------------


@pytest.fixture
def filled(model: PreTrainedModel, manager: KvCacheManager) -> Iterator[KvCache]:
    """A batch of 3, 7 and 12 tokens, which the test leaves as it is."""
    cache = KvCache(manager, model)
    ids, mask = left_padded(PROMPTS)
    generate(model, ids, mask, cache, max_new_tokens=1)
    before = [tensor.clone() for layer in cache.layers for tensor in (layer.keys, layer.values)]
    blocks = manager.stats().used_blocks
    yield cache
    after = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    assert (cache.get_seq_length(), cache.batch_size) == (12, 3)
    assert manager.stats().used_blocks == blocks
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def forward(model: PreTrainedModel, cache: KvCache, rows: int, width: int, **kwargs: object) -> torch.Tensor:
    ids = random_ids(width, seed=9).repeat(rows, 1)
    with torch.no_grad():
        return model(ids, cache=cache, **kwargs).logits


def full_mask(width: int) -> torch.Tensor:
    _, mask = left_padded(PROMPTS)
    return torch.cat([mask, torch.ones(3, width, dtype=torch.long)], dim=1)


def positions(width: int) -> torch.Tensor:
    return torch.tensor([[3], [7], [12]]) + torch.arange(width)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_pass_that_breaks_off_takes_back_every_row(error, model, filled):
    def fail(*_: object) -> None:
        raise error

    hook = model.get_decoder().layers[2].register_forward_pre_hook(fail)
    with pytest.raises(error):
        forward(model, filled, 3, 5, attention_mask=full_mask(5), position_ids=positions(5))
    hook.remove()
    filled.crop(0)


def test_rows_that_are_forked_for_a_pass_go_with_it(model, manager):
    cache = KvCache(manager, model)
    forward(model, cache, 1, 9)
    blocks = manager.stats().used_blocks

    def fail(*_: object) -> None:
        raise RuntimeError("broken off")

    hook = model.get_decoder().layers[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="broken off"):
        forward(model, cache, 4, 2)
    hook.remove()
    assert (cache.batch_size, cache.get_seq_length(), manager.stats().used_blocks) == (1, 9, blocks)
    assert len(manager.list_handles()) == 1


def test_another_number_of_rows_is_refused(model, filled):
    for rows in (1, 2, 4):
        with pytest.raises(ShapeError, match=f"the batch has {rows} rows and the cache 3"):
            forward(model, filled, rows, 2)


def test_a_mask_that_contradicts_the_cache_is_refused(model, filled):
    mask = full_mask(2)
    mask[1, 5] = 0
    with pytest.raises(ShapeError, match="column 5 of row 1 is a pad, but the cache holds a token"):
        forward(model, filled, 3, 2, attention_mask=mask)
    mask[1, :6] = 1
    with pytest.raises(ShapeError, match="column 0 of row 1 is a token, but the cache holds a pad"):
        forward(model, filled, 3, 2, attention_mask=mask)
    with pytest.raises(ShapeError, match="attention_mask is missing"):
        forward(model, filled, 3, 2)
    with pytest.raises(ShapeError, match="covers 2 tokens, but 12 are cached and 2 new: extend it to 14"):
        forward(model, filled, 3, 2, attention_mask=torch.ones(3, 2))


def test_positions_that_continue_neither_tokens_nor_columns_are_refused(model, filled):
    with pytest.raises(ShapeError, match="row 1 of the forward pass is at positions 8 to 9"):
        forward(
            model,
            filled,
            3,
            2,
            attention_mask=full_mask(2),
            position_ids=torch.tensor([[3, 4], [8, 9], [12, 13]]),
        )
    with pytest.raises(ShapeError, match="counted tokens so far and do not any more"):
        forward(model, filled, 3, 2, attention_mask=full_mask(2))

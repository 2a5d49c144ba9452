"""Prompts as plain token ids, and what two of them have in common."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any

from kvcache_core.block_table import blocks_for
from kvcache_core.errors import CacheFullError, ShapeError
from kvcache_core.manager import KvCacheManager
from kvcache_core.request import token_array

__all__ = ["Prompt", "common_prefix", "read_prompts", "require_length"]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch.

    Attributes:
        token_ids: Its ids, at least one.
        pads: Columns of padding before it.
    """

    token_ids: array[int]
    pads: int = 0


def read_prompts(input_ids: Any, attention_mask: Any = None) -> list[Prompt]:
    """The prompts of a batch, padded on the left.

    Args:
        input_ids: `[rows, tokens]` or `[tokens]`, a tensor or lists; lists may differ in length.
        attention_mask: 0 where there is a pad, of the same shape; None for no pads but those that even out lists.

    Raises:
        ShapeError: There is no prompt, one is empty or holds something else than ints, or the mask does not fit or
            has pads elsewhere.
    """
    rows = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if not rows or not isinstance(rows[0], (list, tuple)):
        rows = [rows]
    prompts = [token_array(row) for row in rows]
    if attention_mask is not None:
        masks = attention_mask.tolist() if hasattr(attention_mask, "tolist") else list(attention_mask)
        if not masks or not isinstance(masks[0], (list, tuple)):
            masks = [masks]
        prompts = _without_pads(prompts, masks)
    if not all(prompts):
        raise ShapeError("the prompt is empty; give at least one token" + (" in every row" if len(prompts) > 1 else ""))
    longest = max(map(len, prompts)) if attention_mask is None else len(rows[0])
    return [Prompt(prompt, longest - len(prompt)) for prompt in prompts]


def _without_pads(prompts: list[array[int]], masks: list[list[int]]) -> list[array[int]]:
    if [len(mask) for mask in masks] != [len(prompt) for prompt in prompts]:
        raise ShapeError("attention_mask must have the shape of input_ids")
    kept = []
    for number, (prompt, mask) in enumerate(zip(prompts, masks, strict=True)):
        tokens = sum(map(bool, mask))
        if not all(mask[len(mask) - tokens :]):
            raise ShapeError(
                f"row {number} has pads after its first token; pad on the left (tokenizer.padding_side = 'left')"
            )
        kept.append(prompt[len(prompt) - tokens :])
    return kept


def common_prefix(first: array[int], second: array[int]) -> int:
    """How many leading ids are the same."""
    low, high = 0, min(len(first), len(second))
    a, b, size = memoryview(first).cast("B"), memoryview(second).cast("B"), first.itemsize
    while low < high:  # they agree up to `low`, and not beyond `high`
        middle = (low + high + 1) // 2
        if a[low * size : middle * size] == b[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low


def require_length(manager: KvCacheManager, longest: int, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise CacheFullError unless a sequence of `longest` tokens holds the prompt and what is generated after it."""
    wanted = prompt_tokens + max(max_new_tokens, 1) - 1  # the last token is never fed back, so never cached
    if wanted <= longest:
        return
    fitting = longest - prompt_tokens + 1
    advice = f"ask for {fitting} new tokens at most" if fitting > 0 else "shorten the prompt"
    raise CacheFullError(
        f"the prompt has {prompt_tokens} tokens and the sequence may hold {longest}: {advice}, or raise "
        "max_sequence_length and the budget",
        needed=blocks_for(wanted, manager.block_size),
        free=manager.stats().free_blocks,
    )

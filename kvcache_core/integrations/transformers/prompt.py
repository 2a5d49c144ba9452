"""Prompts as plain token ids, and what two of them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcache_core.block_table import blocks_for
from kvcache_core.errors import CacheFullError, ShapeError
from kvcache_core.integrations.transformers.forward_pass import not_supported
from kvcache_core.request import token_array

if TYPE_CHECKING:
    from kvcache_core.handle import KvCacheHandle

__all__ = ["common_prefix", "require_length", "single_prompt"]


def single_prompt(input_ids: Any) -> tuple[int, ...]:
    """The ids of one prompt, given as `[tokens]` or `[1, tokens]`, a tensor or lists.

    Raises:
        ShapeError: It is empty, or holds something else than ints.
        UnsupportedError: There are several prompts.
    """
    rows = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if rows and isinstance(rows[0], (list, tuple)):
        if len(rows) != 1:
            raise not_supported(f"a batch of {len(rows)} prompts", "prepare and generate one prompt at a time")
        rows = rows[0]
    prompt = tuple(token_array(rows))
    if not prompt:
        raise ShapeError("the prompt is empty; give at least one token")
    return prompt


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids are the same."""
    pairs = zip(first, second)  # noqa: B905 - of different lengths on purpose
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def require_length(handle: KvCacheHandle, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raise CacheFullError unless the sequence may hold the prompt and what is generated after it."""
    longest = handle.max_tokens
    wanted = prompt_tokens + max(max_new_tokens, 1) - 1  # the last token is never fed back, so never cached
    if wanted <= longest:
        return
    fitting = longest - prompt_tokens + 1
    advice = f"ask for {fitting} new tokens at most" if fitting > 0 else "shorten the prompt"
    raise CacheFullError(
        f"the prompt has {prompt_tokens} tokens and the sequence may hold {longest}: {advice}, or raise "
        "max_sequence_length and the budget",
        needed=blocks_for(wanted, handle.manager.block_size),
        free=handle.manager.stats().free_blocks,
    )

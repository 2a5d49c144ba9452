"""Every way in which `generate` can run, on a `KvCache` and on `DynamicCache`, for the table in docs/identity.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvcache_core.errors import UnsupportedError
from kvcache_core.integrations.quiet import quiet_transformers
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache
from kvcache_core.integrations.transformers.opening import config_for_model
from kvcache_core.opening import open_cache
from tests.integrations.tiny import left_padded

__all__ = ["MODES", "SAME", "Mode", "outcomes"]

SAME, DIFFERENT = "same", "DIFFERENT"
NEW_TOKENS = 6

Ids = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Mode:
    """One way to generate.

    Attributes:
        name: What the table calls it.
        lengths: Tokens of each prompt.
        arguments: What `generate` is told.
        before: Fills the cache before the prompts come.
        needs_assistant: Whether the model drafts for itself.
    """

    name: str
    lengths: tuple[int, ...] = (9,)
    arguments: dict[str, Any] = field(default_factory=dict)
    before: Callable[[PreTrainedModel, KvCache, torch.Tensor], None] | None = None
    needs_assistant: bool = False


def _run_first(model: PreTrainedModel, cache: KvCache, ids: torch.Tensor) -> None:
    """The prompt but for its last two tokens is there already."""
    with torch.no_grad():
        model(ids[:, :-2], cache=cache)


def _other_request(model: PreTrainedModel, cache: KvCache, ids: torch.Tensor) -> None:
    """Another request, with the same beginning, is over."""
    other = cache.fork()
    with torch.no_grad():
        model(torch.cat([ids[:1, :-3], ids[:1, :2]], dim=1), cache=other)
    other.free()


_SAMPLE = {"do_sample": True, "temperature": 1.3}
MODES = (
    Mode("greedy"),
    Mode("sampling", arguments=_SAMPLE),
    Mode("padded batch", lengths=(3, 7, 12)),
    Mode("prefill in chunks", lengths=(3, 7, 12), arguments={"prefill_chunk_size": 5}),
    Mode("beams", lengths=(5, 9), arguments={"num_beams": 3}),
    Mode("sampled beams", lengths=(5, 9), arguments={"num_beams": 2, **_SAMPLE}),
    Mode("several samples", lengths=(5, 9), arguments={"num_return_sequences": 3, **_SAMPLE}),
    Mode("beams of a prefilled prompt", arguments={"num_beams": 3}, before=_run_first),
    Mode("prompt lookup", arguments={"prompt_lookup_num_tokens": 3}),
    Mode("assisted", needs_assistant=True),
    Mode("use_cache=False", lengths=(3, 7), arguments={"use_cache": False}),
    Mode("a further turn", lengths=(8,), before=_run_first),
    Mode("another request's prefix", lengths=(23,), before=_other_request),
)


def outcomes(model: PreTrainedModel, attention: str, modes: Iterable[Mode] = MODES) -> dict[str, str]:
    """What becomes of each mode: `"same"`, `"DIFFERENT"`, or why it is refused."""
    usual = model.config._attn_implementation
    with quiet_transformers(), open_cache(_config(model)) as pool:
        found = {}
        for mode in modes:
            prompts = _prompts(model, mode)
            expected = _generate(model, mode, prompts, DynamicCache(config=model.config))
            if attention == ATTENTION_NAME:
                model.set_attn_implementation(ATTENTION_NAME)
            cache = KvCache(pool, model, salt=mode.name)
            try:
                found[mode.name] = _outcome(model, mode, prompts, cache, expected)
            finally:
                cache.free()
                if attention == ATTENTION_NAME:
                    model.set_attn_implementation(usual)
        if problems := pool.audit():
            raise AssertionError(problems)
    return found


def _outcome(model: PreTrainedModel, mode: Mode, prompts: Ids, cache: KvCache, expected: torch.Tensor) -> str:
    try:
        if mode.before is not None:
            mode.before(model, cache, prompts[0])
            if cache.prepare(*prompts) == 0 and cache.manager.geometry.prefix_reusable:
                return "nothing reused"
        return SAME if torch.equal(_generate(model, mode, prompts, cache), expected) else DIFFERENT
    except UnsupportedError as error:
        return f"refused ({error.capability})"


def _config(model: PreTrainedModel) -> Any:

    return config_for_model(
        model, None, {"backend": "cpu", "budget": "4000 tokens", "max_sequence_length": 100, "block_size": 4}
    )


def _prompts(model: PreTrainedModel, mode: Mode) -> Ids:
    generator = torch.Generator().manual_seed(sum(mode.lengths))
    most = min(model.config.vocab_size, 30_000)
    return left_padded([torch.randint(3, most, (1, length), generator=generator) for length in mode.lengths])


def _generate(model: PreTrainedModel, mode: Mode, prompts: Ids, cache: Any) -> torch.Tensor:
    ids, mask = prompts
    arguments: dict[str, Any] = {"do_sample": False, "use_cache": True, **mode.arguments}
    if mode.needs_assistant:
        arguments["assistant_model"] = model
    if not arguments["use_cache"] and isinstance(cache, DynamicCache):
        cache = None  # it would store all the same
    torch.manual_seed(5)
    out: torch.Tensor = model.generate(
        ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        pad_token_id=0,
        **arguments,
    )
    return out

"""Batches and beams with SmolLM2 in bfloat16, on a `KvCache` and on transformers' `DynamicCache`, which is padded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcache_core.bench.figures import Figure, Samples, Series
from kvcache_core.bench.session import Bench
from kvcache_core.config import CacheConfig
from kvcache_core.opening import open_cache

__all__ = ["measure"]

#: Tokens of each prompt of a batch, and what is generated after them.
LENGTHS = (100, 300, 600, 1_000, 1_400, 2_000, 2_500, 3_000)
NEW_TOKENS = 32
#: Tokens of the prompt that beams continue, and what is generated after it.
CONTEXT, BEAMS, BEAM_TOKENS = 4_000, 4, 12
QUICK_LENGTHS, QUICK_CONTEXT = (10, 30, 50, 90), 100


def measure(bench: Bench) -> list[Figure | Series]:
    """Generate on each cache in turn: a batch from nothing, the same with its prompts cached, and beams.

    Raises:
        ImportError: transformers or the model's package is not installed.
    """
    from kvcache_core.integrations.models import load_model
    from kvcache_core.integrations.quiet import quiet_transformers

    model = load_model(dtype="bfloat16").model
    attention = model.config._attn_implementation
    try:
        with quiet_transformers():
            lengths = QUICK_LENGTHS if bench.quick else LENGTHS
            return [
                *_ragged(bench, model, lengths),
                *_decode(bench, model, lengths),
                *_beams(bench, model, QUICK_CONTEXT if bench.quick else CONTEXT),
            ]
    finally:
        model.set_attn_implementation(attention)


def _ragged(bench: Bench, model: Any, lengths: Sequence[int]) -> list[Figure]:
    """A batch from nothing, prefill included."""
    from transformers import DynamicCache

    from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache

    ids, mask = _batch(lengths)
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS}
    with open_cache(_config(model, lengths)) as pool:
        times = bench.interleaved(
            {
                "KvCache": _case(model, ids, lambda: KvCache(pool, model), ATTENTION_NAME, arguments),
                "DynamicCache": _case(model, ids, lambda: DynamicCache(config=model.config), "sdpa", arguments),
            },
            rounds=2,
            warmup=0,
        )
    what = f"{_named(lengths)}, {NEW_TOKENS} new ones each"
    return _compared(times, what, NEW_TOKENS * len(lengths), at_least=1.2)


def _decode(bench: Bench, model: Any, lengths: Sequence[int]) -> list[Figure]:
    """The same with the prompts cached."""
    from transformers import DynamicCache

    from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache

    ids, mask = _batch(lengths)
    before = ids.shape[1] - 1
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS // 2}
    with open_cache(_config(model, lengths)) as pool:
        ours, theirs = KvCache(pool, model), DynamicCache(config=model.config)
        _fill(ours, theirs, mask[:, :-1], model.dtype)
        times = bench.interleaved(
            {
                "KvCache": _case(model, ids, lambda: _cut(ours, before), ATTENTION_NAME, arguments),
                "DynamicCache": _case(model, ids, lambda: _cut(theirs, before), "sdpa", arguments),
            },
            rounds=3,
            warmup=1,
        )
        memory = pool.storage.nbytes / _nbytes(theirs)
        ours.free()
    what = f"{_named(lengths)} that are cached"
    return [
        *_compared(times, what, NEW_TOKENS // 2 * len(lengths)),
        Figure(name=f"memory of the KvCache, of DynamicCache's, {what}", value=memory, unit="x", peer="transformers"),
    ]


def _batch(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.zeros(len(lengths), lengths[-1], dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, lengths[-1] - length :] = 1
    return _random_ids(*mask.shape), mask


def _config(model: Any, lengths: Sequence[int]) -> CacheConfig:
    from kvcache_core.integrations.transformers.opening import config_for_model

    room = 2 * len(lengths) * (lengths[-1] + NEW_TOKENS)
    return config_for_model(model, None, {"backend": "cpu", "budget": f"{room} tokens"})


def _named(lengths: Sequence[int]) -> str:
    return f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]:,} tokens"


def _beams(bench: Bench, model: Any, context: int) -> list[Figure]:
    from transformers import DynamicCache

    from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache

    ids = _random_ids(1, context)
    ours, theirs = KvCache.for_model(model, backend="cpu"), DynamicCache(config=model.config)
    _fill(ours, theirs, torch.ones(1, context - 1, dtype=torch.long), model.dtype)
    theirs.batch_repeat_interleave(BEAMS)
    arguments: dict[str, Any] = {"num_beams": BEAMS, "max_new_tokens": BEAM_TOKENS}
    times = bench.interleaved(
        {
            "KvCache": _case(model, ids, lambda: _cut(ours, context - 1), ATTENTION_NAME, arguments),
            "DynamicCache": _case(model, ids, lambda: _cut(theirs, context - 1), "sdpa", arguments),
        },
        rounds=3,
        warmup=1,
    )
    memory = ours.manager.storage.nbytes / _nbytes(theirs)
    ours.free()
    what = f"{BEAMS} beams after {context:,} tokens"
    name = f"memory of the KvCache, of DynamicCache's, {what}"
    return [
        *_compared(times, what, BEAM_TOKENS, at_least=2.0),
        Figure(name=name, value=memory, unit="x", peer="transformers", at_most=1 / 3),
    ]


def _compared(times: dict[str, Samples], what: str, tokens: int, at_least: float | None = None) -> list[Figure]:
    figures = [
        Figure.of(
            f"{name}, {what}",
            samples.inverse(tokens),
            "tokens/s",
            peer=None if name == "KvCache" else "transformers",
        )
        for name, samples in times.items()
    ]
    ratio = times["DynamicCache"] / times["KvCache"]
    title = f"KvCache, of DynamicCache, {what}"
    return [*figures, Figure.of(title, ratio, "x", peer="transformers", at_least=at_least)]


def _random_ids(rows: int, width: int) -> torch.Tensor:
    return torch.randint(100, 40_000, (rows, width), generator=torch.Generator().manual_seed(0))


def _nbytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _cut(cache: Any, columns: int) -> Any:
    surplus = int(cache.get_seq_length()) - columns
    if surplus > 0:
        cache.crop(-surplus)
    return cache


@torch.no_grad()
def _fill(ours: Any, theirs: Any, mask: torch.Tensor, dtype: torch.dtype) -> None:
    """Store the same random K and V in both caches: how long a step takes does not depend on what they are."""
    rows, width = mask.shape
    ours.pass_writer.begin(
        rows,
        width,
        input_ids=None,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        attention_mask=mask,
        attends=True,
    )
    for layer in range(ours.manager.geometry.num_layers):
        spec = ours.manager.own_spec(layer)
        key, value = (torch.randn(rows, spec.num_kv_heads, width, spec.head_dim).to(dtype) for _ in range(2))
        ours.update(key, value, layer)
        theirs.update(key, value, layer)
    ours.pass_writer.end(succeeded=True)


def _case(
    model: Any, ids: torch.Tensor, cache: Callable[[], Any], attention: str, arguments: dict[str, Any]
) -> Callable[[], None]:
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, **arguments}

    def generate() -> None:
        model.set_attn_implementation(attention)
        model.generate(ids, cache=cache(), min_new_tokens=arguments["max_new_tokens"], **arguments)

    return generate

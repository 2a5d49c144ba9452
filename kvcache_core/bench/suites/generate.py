"""`generate` with SmolLM2 in bfloat16, on a `KvCache` and on transformers' own caches, which hold the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcache_core.bench.figures import Figure, Samples, Series
from kvcache_core.bench.session import Bench

__all__ = ["measure"]

NEW_TOKENS = 16
#: Tokens of context -> rounds, and how much faster than a DynamicCache is asked for.
CONTEXTS = {512: (12, 1.0), 2_000: (8, None), 8_000: (8, 1.4)}


def measure(bench: Bench) -> list[Figure | Series]:
    """Generate on each cache in turn, at several lengths of context.

    Raises:
        ImportError: transformers or the model's package is not installed.
    """
    from kvcache_core.integrations.models import load_model
    from kvcache_core.integrations.quiet import quiet_transformers

    model = load_model(dtype="bfloat16").model
    series = Series(name="Generate with SmolLM2-135M in bfloat16", x="tokens of context", y="ms per token")
    found: list[Figure | Series] = [series]
    with quiet_transformers():
        for context, (rounds, wanted) in CONTEXTS.items():
            if bench.quick and context > min(CONTEXTS):
                continue
            times = _times(bench, model, context, rounds)
            for name, samples in times.items():
                series.add(name, context, samples.median * 1e3 / NEW_TOKENS)
            found += _figures(times, context, wanted)
    return found


def _figures(times: dict[str, Samples], context: int, wanted: float | None) -> list[Figure]:
    figures = []
    for name, samples in times.items():
        rate = samples.inverse(NEW_TOKENS)
        peer = None if name == "KvCache" else "transformers"
        figures.append(Figure.of(f"{name} after {context} tokens", rate, "tokens/s", peer=peer))
    for name, least in (("DynamicCache", wanted), ("StaticCache", None)):
        ratio = times[name] / times["KvCache"]
        title = f"KvCache, of {name}, after {context} tokens"
        figures.append(Figure.of(title, ratio, "x", peer="transformers", at_least=least))
    return figures


def _times(bench: Bench, model: Any, context: int, rounds: int) -> dict[str, Samples]:
    from transformers import DynamicCache, StaticCache

    from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache

    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(100, 40_000, (1, context), generator=generator)
    ours = KvCache.for_model(model, backend="cpu")
    dynamic = DynamicCache(config=model.config)
    static = StaticCache(config=model.config, max_cache_len=context + NEW_TOKENS)
    _fill(ours, [dynamic, static], context - 1, model.dtype)
    attention = model.config._attn_implementation
    try:
        return bench.interleaved(
            {
                "KvCache": _case(model, prompt, ours, ATTENTION_NAME),
                "DynamicCache": _case(model, prompt, dynamic, "sdpa"),
                "StaticCache": _case(model, prompt, static, "sdpa"),
            },
            rounds=rounds,
            warmup=2,
        )
    finally:
        model.set_attn_implementation(attention)
        ours.free()


@torch.no_grad()  # not inference mode: a StaticCache could not be written afterwards
def _fill(ours: Any, others: list[Any], num_tokens: int, dtype: torch.dtype) -> None:
    """Store the same random K and V in all caches: how long a step takes does not depend on what they are."""
    pairs = []
    for layer in range(ours.manager.geometry.num_layers):
        spec = ours.manager.own_spec(layer)
        key, value = (torch.randn(1, spec.num_kv_heads, num_tokens, spec.head_dim).to(dtype) for _ in range(2))
        for other in others:
            other.update(key, value, layer)
        pairs.append((key[0].transpose(0, 1), value[0].transpose(0, 1)))
    ours.handle.append(pairs)


def _case(model: Any, prompt: torch.Tensor, cache: Any, attention: str) -> Callable[[], None]:
    def generate() -> None:
        surplus = int(cache.get_seq_length()) - (prompt.shape[1] - 1)
        if surplus > 0:
            cache.crop(-surplus)
        model.set_attn_implementation(attention)
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            cache=cache,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
        )

    return generate

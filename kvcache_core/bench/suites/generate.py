"""`generate` with SmolLM2 in bfloat16, on a `KvCache` and on transformers' own caches, which hold the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcache_core.bench.figures import Figure, Samples, Series
from kvcache_core.bench.session import Bench
from kvcache_core.opening import open_cache

__all__ = ["measure"]

NEW_TOKENS = 16
#: Tokens of context -> rounds, and how much faster than a DynamicCache is asked for.
CONTEXTS = {512: (12, 1.0), 2_000: (8, None), 8_000: (8, 1.4)}
#: Tokens that two requests begin with, and tokens of their own after them.
SHARED, OWN = 4_000, 16
QUICK_SHARED = 160


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
        found += _first_tokens(bench, model, QUICK_SHARED if bench.quick else SHARED)
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


def _first_tokens(bench: Bench, model: Any, shared: int) -> list[Figure]:
    """How long requests take to their first token: one that finds nothing, and others that begin as it did."""
    from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache
    from kvcache_core.integrations.transformers.opening import config_for_model

    generator = torch.Generator().manual_seed(0)
    system = torch.randint(100, 40_000, (1, shared), generator=generator)
    attention = model.config._attn_implementation
    settings = {"backend": "cpu", "budget": f"{4 * (shared + 100)} tokens", "max_sequence_length": shared + 100}
    reused: list[int] = []

    def request() -> None:
        own = torch.randint(100, 40_000, (1, OWN), generator=generator)
        prompt = torch.cat([system, own], dim=1)
        cache = KvCache(pool, model)
        reused.append(cache.prepare(prompt))
        model.generate(prompt, cache=cache, max_new_tokens=1, do_sample=False)
        cache.free()

    model.set_attn_implementation(ATTENTION_NAME)
    try:
        with open_cache(config_for_model(model, None, settings)) as pool:
            first = bench.interleaved({"the first request": request}, rounds=1, warmup=0)["the first request"]
            later = bench.interleaved({"a later request": request}, rounds=9, warmup=1)["a later request"]
    finally:
        model.set_attn_implementation(attention)
    if reused[0] or set(reused[1:]) != {shared}:
        raise RuntimeError(f"the requests reused {reused} tokens of {shared}")
    what = f"{shared:,} tokens that are cached and {OWN} that are not"
    return [
        Figure.of(f"first token after {shared + OWN:,} tokens, none cached", first, "s"),
        Figure.of(f"first token after {what}", later * 1e3, "ms"),
        Figure.of(f"first token after {what}, of none cached", later / first.median, "x", at_most=1 / 20),
    ]


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

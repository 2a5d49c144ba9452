"""`generate` with SmolLM2 in bfloat16: tokens a second on a `KvCache` and on transformers' `DynamicCache`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import Cache, DynamicCache

from benchmarks._measure import Figure, interleaved
from kvcache_core.integrations.models import load_model
from kvcache_core.integrations.quiet import quiet_transformers
from kvcache_core.integrations.transformers import ATTENTION_NAME, KvCache

__all__ = ["measure"]

NEW_TOKENS = 16
PREFILL_CHUNK = 1_024
#: Tokens of context -> rounds, and the ratio that is asked for.
CONTEXTS = {512: (12, 1.0), 8_000: (6, 1.4)}


def measure() -> list[Figure]:
    """Generate the same tokens on each cache in turn, after a prompt that all of them hold."""
    model = load_model(dtype="bfloat16").model
    figures = []
    with quiet_transformers():
        for context, (rounds, wanted) in CONTEXTS.items():
            prompt = torch.randint(100, 40_000, (1, context), generator=torch.Generator().manual_seed(0))
            ours = KvCache.for_model(model, backend="cpu")
            theirs = DynamicCache(config=model.config)
            cases = {
                "KvCache": _case(model, prompt, ours, ATTENTION_NAME),
                "KvCache under sdpa": _case(model, prompt, ours, "sdpa"),
                "DynamicCache": _case(model, prompt, theirs, "sdpa"),
            }
            seconds = interleaved(cases, rounds=rounds, warmup=2)
            figures += [
                Figure(name=f"{name} after {context} tokens", value=NEW_TOKENS / taken, unit="tokens/s")
                for name, taken in seconds.items()
            ]
            figures.append(
                Figure(
                    name=f"KvCache, of DynamicCache, after {context} tokens",
                    value=seconds["DynamicCache"] / seconds["KvCache"],
                    unit="x",
                    at_least=wanted,
                )
            )
            ours.free()
    model.set_attn_implementation("sdpa")
    return figures


def _case(model: torch.nn.Module, prompt: torch.Tensor, cache: Cache, attention: str) -> Callable[[], None]:
    def generate() -> None:
        surplus = cache.get_seq_length() - (prompt.shape[1] - 1)
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
            prefill_chunk_size=PREFILL_CHUNK,
        )

    return generate

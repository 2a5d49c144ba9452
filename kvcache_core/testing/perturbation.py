"""What a query must not see has no influence on it, whatever it holds.

These tests need no reference: they change later tokens, or memory that no committed token owns, and demand that
nothing else changes. Faults of other caches that they are named after: `transformers#48748` (causality applied by
nobody), `tt-metal#48899` (an earlier row of a step polluted by later ones), `sglang#32477` (NaN in unused memory leaks
through 0 * NaN), `vllm-mlx#385` (a reader of raw buffers sees a rejected tail).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.testing.conformance import Conformance

__all__ = ["PerturbationConformance"]

POISONS = {"nan": float("nan"), "inf": float("inf"), "-inf": -float("inf"), "1e4": 1e4, "huge": 3e38}


class PerturbationConformance(Conformance):
    """Later tokens and unowned memory never reach an output."""

    def outputs(
        self,
        cache: KvCacheManager,
        chunks: list[int],
        perturb: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> dict[int, torch.Tensor]:
        """Feed random rows in chunks, `perturb(first position, rows)` applied, and return every layer's outputs."""
        handle, rows = cache.allocate(), dict[int, list[torch.Tensor]]()
        total = sum(chunks)
        for count in chunks:
            first = handle.num_tokens
            with cache.step({handle: count}) as step:
                for layer in cache.geometry.caching_layers:
                    spec = cache.own_spec(layer)
                    key, value = (
                        self.random(total, spec.num_kv_heads, dim, dtype=cache.dtype, seed=seed + layer)
                        for seed, dim in ((10, spec.head_dim), (20, spec.value_head_dim))
                    )
                    part = slice(first, first + count)
                    step.write(layer, perturb(first, key[part].clone()), perturb(first, value[part].clone()))
                for layer in self.attending_layers(cache):
                    spec = self.layer_spec(cache, layer)
                    query = self.random(total, 2 * spec.num_kv_heads, spec.head_dim, dtype=cache.dtype, seed=30 + layer)
                    rows.setdefault(layer, []).append(step.attend(layer, query[first : first + count]))
        handle.free()
        return {layer: torch.cat(parts) for layer, parts in rows.items()}

    @pytest.mark.parametrize("chunk", ["whole", "1", "7", "block", "block + 1"])
    def test_transformers_48748_a_later_token_changes_no_earlier_output(self, dtype: str, chunk: str) -> None:
        size = self.block_size
        total = min(6 * size, max(size + 8, 64))
        step = {"whole": total, "1": 1, "7": 7, "block": size, "block + 1": size + 1}[chunk]
        chunks = [min(step, total - first) for first in range(0, total, step)]
        with self.cache(dtype=dtype) as cache:
            before = self.outputs(cache, chunks, lambda first, rows: rows)
            for changed in (1, size - 1 or 1, size, size + 1, total - 1):

                def perturb(first: int, rows: torch.Tensor, changed: int = changed) -> torch.Tensor:
                    rows[max(0, changed - first) :] *= -3.0
                    return rows

                after = self.outputs(cache, chunks, perturb)
                for layer in before:
                    assert torch.equal(before[layer][:changed], after[layer][:changed])
                    assert not torch.equal(before[layer][changed:], after[layer][changed:])

    @pytest.mark.parametrize("poison", POISONS)
    def test_tt_metal_48899_the_first_row_of_a_step_does_not_depend_on_the_others(self, poison: str) -> None:
        with self.cache(num_blocks=-(-600 // self.block_size)) as cache:
            for history in (0, 1, 63, 64, 65, 128):
                chunks = [history] if history else []

                def perturb(first: int, rows: torch.Tensor, history: int = history) -> torch.Tensor:
                    if first == history and len(rows) > 1:
                        largest = torch.finfo(rows.dtype).max
                        rows[1:] = max(-largest, min(largest, POISONS[poison])) if poison == "huge" else POISONS[poison]
                    return rows

                alone = self.outputs(cache, [*chunks, 1, 4], lambda first, rows: rows)
                beside = self.outputs(cache, [*chunks, 5], perturb)
                for layer, expected in alone.items():
                    one = torch.ones((), dtype=cache.dtype)
                    self.assert_close(
                        beside[layer][history], expected[history].cpu().double(), 3 * one, what=f"history {history}"
                    )

    # -- memory that no committed token owns -------------------------------------------------------------

    def poison_unowned(self, cache: KvCacheManager, value: float) -> None:
        """Fill all memory that no token owns with `value`, as far as the public interface reaches it.

        Free blocks are taken, written and given back. A backend whose memory can be reached more directly may
        override this.
        """
        free = cache.stats().free_blocks
        if not free:
            return
        count = min(free * cache.block_size, cache.max_sequence_length)
        with cache.allocate() as handle:
            self.write_constant(cache, handle, count, value)

    def write_constant(self, cache: KvCacheManager, handle: KvCacheHandle, count: int, value: float) -> None:
        """Append rows whose elements all have one value."""
        with cache.step({handle: count}) as step:
            for layer in cache.geometry.caching_layers:
                key, rows = self.rows(cache, layer, [([0] * count, 0)])
                step.write(layer, torch.full_like(key, value), torch.full_like(rows, value))

    def rejected(self, cache: KvCacheManager, handle: KvCacheHandle, value: float) -> None:
        """Leave rows of one value behind a handle's last token, in every way there is."""
        length, count = handle.num_tokens, cache.block_size + 2
        step = cache.begin({handle: count})
        for layer in cache.geometry.caching_layers:
            key, rows = self.rows(cache, layer, [([0] * count, 0)])
            step.write(layer, torch.full_like(key, value), torch.full_like(rows, value))
        step.abort()
        self.write_constant(cache, handle, count, value)
        handle.truncate(length)
        with cache.step({handle: count}) as step:
            for layer in cache.geometry.caching_layers:
                key, rows = self.rows(cache, layer, [([0] * count, 0)])
                step.write(layer, torch.full_like(key, value), torch.full_like(rows, value))
            step.accept(handle, 0)

    def read_everything(self, cache: KvCacheManager, value: float) -> list[torch.Tensor]:
        """Go through every operation, with rejected rows of `value` everywhere, and return all that is read."""
        seen: list[torch.Tensor] = []
        size = cache.block_size
        self.poison_unowned(cache, value)
        handles = [cache.allocate() for _ in range(3)]
        for round_number, counts in enumerate(((size + 1, 2, 0), (1, 1, 1), (size, 0, 2 * size), (1, 1, 1))):
            for handle in handles:
                self.rejected(cache, handle, value)
            with cache.step(dict(zip(handles, counts, strict=True))) as step:
                self.write_random(step, seed=round_number)
                for layer in self.attending_layers(cache):
                    spec = self.layer_spec(cache, layer)
                    rows = (step.num_new_tokens, 2 * spec.num_kv_heads, spec.head_dim)
                    seen.append(step.attend(layer, self.random(*rows, dtype=cache.dtype)))
            handles[1].free()
            handles[1] = handles[0].fork()
            self.poison_unowned(cache, value)
        for handle in handles:
            for layer in self.attending_layers(cache):
                both = handle.kv_cache(layer)
                assert both is not None
                seen += [tensor.clone() for tensor in both]
            handle.free()
        return seen

    @pytest.mark.parametrize("poison", POISONS)
    def test_sglang_32477_poison_in_unowned_memory_changes_no_bit(self, dtype: str, poison: str) -> None:
        largest = torch.finfo(getattr(torch, dtype)).max
        value = min(largest, POISONS[poison]) if poison == "huge" else POISONS[poison]
        with self.cache(dtype=dtype) as clean, self.cache(dtype=dtype) as poisoned:
            expected, actual = self.read_everything(clean, 0.5), self.read_everything(poisoned, value)
            for wanted, found in zip(expected, actual, strict=True):
                assert torch.isfinite(found).all()
                assert torch.equal(wanted, found)

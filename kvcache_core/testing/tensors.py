"""The tensors that a cache hands out: views of its memory, or copies.

A view shows committed rows, which never change. So nothing that the cache does may change what it shows until the
handle is truncated, swapped or freed; and even then it never shows another sequence's rows.
"""

from __future__ import annotations

import gc

import torch

from kvcache_core.handle import KvCacheHandle
from kvcache_core.testing.conformance import Conformance

__all__ = ["TensorConformance"]

Pair = tuple[torch.Tensor, torch.Tensor]


class TensorConformance(Conformance):
    """What was read stays what it was."""

    def both(self, handle: KvCacheHandle, layer: int = 0) -> Pair:
        """Keys and values of a layer that caches."""
        pair = handle.kv_cache(layer)
        assert pair is not None
        return pair

    def test_reads_carry_no_gradient_and_copies_are_the_callers_own(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, self.block_size + 1)
            assert handle.dense_is_view is cache.storage.dense_is_view
            for tensor in self.both(handle):
                assert not tensor.requires_grad
                assert tensor.device == cache.device
                if not handle.dense_is_view:
                    tensor.zero_()
            self.assert_holds(handle, tokens)

    def test_a_view_stays_what_it_was_whatever_the_cache_does_next(self) -> None:
        size = self.block_size
        with self.cache(num_blocks=max(64, 256 // size)) as cache:
            handle, tokens = self.filled(cache, size + 1)
            fork = handle.fork()
            held = [(reader, layer, self.both(reader, layer)) for reader in (handle, fork) for layer in (0, 1, 4)]
            before = [tuple(tensor.clone() for tensor in pair) for _, _, pair in held]
            more = [self.tokens(2 * size) for _ in range(3)]
            self.feed(cache, {fork: more[0]})
            self.feed(cache, {handle: more[1]})
            second = handle.fork()
            step = cache.begin({handle: more[2], second: more[2]})
            self.write(step, {handle: more[2], second: more[2]})
            step.abort()
            cache.extend(handle, 3 * size)
            second.free()
            others = [self.filled(cache, size) for _ in range(2)]
            gc.collect()
            for (_, _, pair), old in zip(held, before, strict=True):
                for tensor, kept in zip(pair, old, strict=True):
                    assert torch.equal(tensor, kept)
            self.assert_holds(handle, tokens + more[1])
            self.assert_holds(fork, tokens + more[0])
            for other, held_tokens in others:
                self.assert_holds(other, held_tokens)

    def test_a_cache_may_be_fed_from_its_own_tensors(self) -> None:
        size = self.block_size
        with self.cache(self.geometry("uniform")) as cache:
            handle, _ = self.filled(cache, size + 1)
            fork = handle.fork()
            for writer in (fork, handle, fork):
                length = writer.num_tokens
                layers = [self.both(handle, layer) for layer in cache.geometry.caching_layers]
                expected = [[tensor.clone() for tensor in pair] for pair in layers]
                writer.append(layers)
                for layer, pair in zip(cache.geometry.caching_layers, expected, strict=True):
                    for stored, wanted in zip(self.both(writer, layer), pair, strict=True):
                        error = self.round_trip_error * float(wanted.abs().max())
                        assert bool(((stored[length:] - wanted).abs() <= error).all())

    def test_a_tensor_outlives_its_handle_and_never_shows_another_sequence(self) -> None:
        with self.cache() as cache:
            handle, _ = self.filled(cache, 2 * self.block_size + 1)
            both = self.both(handle)
            before = [tensor.clone() for tensor in both]
            handle.free()
            gc.collect()
            others = [self.filled(cache, 2 * self.block_size + 1) for _ in range(2)]
            for tensor, old in zip(both, before, strict=True):
                row_is_old = (tensor == old).flatten(1).all(dim=1)
                row_is_zero = (tensor == 0).flatten(1).all(dim=1)
                assert bool((row_is_old | row_is_zero).all())
            for other, tokens in others:
                self.assert_holds(other, tokens)
        gc.collect()
        assert both[0].shape[0] == 2 * self.block_size + 1
        assert both[0].sum().isfinite()  # still mapped after the cache was closed

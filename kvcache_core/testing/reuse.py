"""Prefix reuse: what finished sequences leave behind for later prompts.

Core finds, keeps and evicts prefixes for every backend; a backend has to bear that a sequence without handles is forked
from, and truncated from the tail. Faults of other caches that these tests are named after: `vllm#11186` (a prompt that
is wholly cached), `vllm#5188` (a partial block found as a full one), `vllm#4761` (an evicted block still found),
`vllm#44701` (a salt and an adapter of one name), `tenstorrent/vllm#415` (a hit gives other results than a miss),
`dynamo#12108` (what a prompt found is evicted to make room for its rest).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvcache_core.config import PrefixCacheConfig
from kvcache_core.handle import KvCacheHandle
from kvcache_core.manager import KvCacheManager
from kvcache_core.testing.conformance import Conformance

__all__ = ["ReuseConformance"]

REUSE = PrefixCacheConfig(enabled=True, namespace="model")


class ReuseConformance(Conformance):
    """A prompt finds what sequences of the same tenant stored, in whole blocks, and what it finds is right."""

    def run_prompt(self, cache: KvCacheManager, prompt: Sequence[int], **request: Any) -> tuple[KvCacheHandle, int]:
        """Open a sequence for a prompt, store what was not found, and return it with how many tokens were found."""
        handle = cache.allocate(token_ids=prompt, **request)
        found = handle.num_tokens
        self.assert_holds(handle, prompt[:found])
        self.feed(cache, {handle: prompt[found:]})
        self.assert_holds(handle, prompt)
        return handle, found

    def found(self, cache: KvCacheManager, prompt: Sequence[int], **request: Any) -> int:
        """How many tokens a prompt finds; its sequence is gone afterwards."""
        handle, found = self.run_prompt(cache, prompt, **request)
        handle.free()
        return found

    def test_vllm_11186_a_prompt_finds_whole_blocks_and_never_its_last_token(self) -> None:
        size = self.block_size
        for length in sorted({1, size - 1 or 1, size, size + 1, 2 * size, 2 * size + 1}):
            with self.cache(prefix=REUSE) as cache:
                prompt = self.tokens(length)
                assert self.found(cache, prompt) == 0
                assert self.found(cache, prompt) == (length - 1) // size * size
                assert self.found(cache, [*prompt, *self.tokens(1)]) == length // size * size
                assert cache.audit() == ()

    def test_what_live_sequences_hold_is_found_and_shared(self) -> None:
        size = self.block_size
        with self.cache(prefix=REUSE) as cache:
            prompt = self.tokens(2 * size + 1)
            first, _ = self.run_prompt(cache, prompt)
            second, found = self.run_prompt(cache, [*prompt[: 2 * size], *self.tokens(size)])
            assert found == 2 * size
            more = self.tokens(size)
            self.feed(cache, {first: more, second: more})
            self.assert_holds(first, prompt + more)
            first.truncate(1)
            first.free()
            assert self.found(cache, prompt) == 2 * size
            assert second.num_tokens == 4 * size

    def test_vllm_5188_only_full_blocks_are_found_and_only_as_they_are_now(self) -> None:
        size = self.block_size
        with self.cache(prefix=REUSE) as cache:
            tokens = self.tokens(2 * size)
            handle, _ = self.run_prompt(cache, tokens[: 2 * size - 1])
            assert self.found(cache, [*tokens, *self.tokens(1)]) == size
            handle.truncate(size // 2)
            other = self.tokens(2 * size)
            self.feed(cache, {handle: other})
            changed = tokens[: size // 2] + other
            assert self.found(cache, [*changed, *self.tokens(1)]) == len(changed) // size * size
            self.assert_holds(handle, changed)

    def test_vllm_4761_what_was_evicted_is_not_found(self) -> None:
        size = self.block_size
        with self.cache(prefix=REUSE, num_blocks=4) as cache:
            first = self.tokens(2 * size)
            self.run_prompt(cache, first)[0].free()
            for _ in range(3):
                self.run_prompt(cache, self.tokens(2 * size))[0].free()
            free = cache.stats().free_blocks + cache.stats().cached_blocks
            assert free == 4
            assert self.found(cache, [*first, *self.tokens(1)]) == 0
            assert cache.stats().evictions > 0

    def test_dynamo_12108_what_a_prompt_found_is_not_evicted_to_make_room_for_its_rest(self) -> None:
        size = self.block_size
        with self.cache(prefix=REUSE, num_blocks=8, max_sequence_length=8 * size) as cache:
            oldest = self.tokens(4 * size)
            self.run_prompt(cache, oldest)[0].free()
            self.run_prompt(cache, self.tokens(4 * size))[0].free()
            with cache.allocate() as probe:
                forks_share = cache.storage.shared_tokens(probe.sequence.slot, size) == size
            handle, found = self.run_prompt(cache, [*oldest, *self.tokens(3 * size)])
            assert found == 4 * size or not forks_share
            assert cache.audit() == ()
            handle.free()

    @pytest.mark.parametrize(
        "other", [{"salt": "b"}, {}, {"adapter": "a"}, {"salt": "a", "adapter": "a"}, {"salt": b"a"}]
    )
    def test_vllm_44701_another_tenant_or_adapter_finds_nothing(self, other: dict[str, Any]) -> None:
        with self.cache(prefix=REUSE) as cache:
            prompt = self.tokens(3 * self.block_size)
            self.run_prompt(cache, prompt, salt="a")[0].free()
            assert self.found(cache, prompt, **other) == 0
            assert self.found(cache, prompt, salt="a") == 2 * self.block_size

    def test_tenstorrent_vllm_415_a_hit_gives_what_a_miss_gives(self, dtype: str) -> None:
        size = self.block_size
        with self.cache(prefix=REUSE, dtype=dtype) as cache:
            shared, rest = self.tokens(2 * size), self.tokens(size + 1)
            self.run_prompt(cache, shared)[0].free()
            outputs = []
            for salt, hit in ((None, 2 * size), ("cold", 0)):
                handle = cache.allocate(token_ids=shared + rest, salt=salt)
                assert handle.num_tokens == hit
                self.feed(cache, {handle: (shared + rest)[hit : 2 * size]})
                with cache.step({handle: rest}) as step:
                    self.write(step, {handle: rest})
                    outputs.append(
                        {
                            layer: self.assert_attends(step, layer, self.query_of(cache, layer, len(rest)))
                            for layer in self.attending_layers(cache)
                        }
                    )
                handle.free()
            for layer, expected in outputs[1].items():
                assert torch.equal(outputs[0][layer], expected)

    def query_of(self, cache: KvCacheManager, layer: int, rows: int) -> torch.Tensor:
        """Return a random query for a layer."""
        spec = self.layer_spec(cache, layer)
        return self.random(rows, 2 * spec.num_kv_heads, spec.head_dim, dtype=cache.dtype)

    def test_without_names_nothing_is_found(self) -> None:
        with self.cache(prefix=REUSE) as cache:
            prompt = self.tokens(2 * self.block_size)
            handle = cache.allocate()
            with cache.step({handle: len(prompt)}) as step:
                self.write(step, {handle: prompt})
            handle.free()
            assert self.found(cache, prompt) == 0
            assert cache.stats().cached_blocks <= 2

"""Truncation, rollback and speculation.

Faults of other caches that these tests are named after: `sglang#31616` (rejected tokens leave part of a page taken
for ever), `mlx-lm#1427`, `mlx-lm#1437` and `mlx-lm#1776` (a window that has filled cannot be rolled back, or is,
wrongly), `vllm-mlx#385` (rows beyond the length shown). `transformers#48280` and the assistant's half of
`transformers#31644` are about the adapter to transformers and are tested there.
"""

from __future__ import annotations

import random

import pytest

from kvcache_core.errors import ShapeError, StepError
from kvcache_core.testing.conformance import Conformance

__all__ = ["TruncateConformance"]


class TruncateConformance(Conformance):
    """Truncation keeps exactly the first tokens and gives back the rest at once."""

    def test_truncate_keeps_the_first_tokens_and_gives_back_the_rest(self) -> None:
        size = self.block_size
        with self.cache() as cache:
            for kept in (3 * size, 2 * size + 1, 2 * size, size - 1, 1, 0):
                handle, tokens = self.filled(cache, 3 * size)
                free = cache.stats().free_blocks
                handle.truncate(kept)
                self.assert_holds(handle, tokens[:kept])
                assert list(handle.token_ids) == tokens[:kept]
                assert cache.stats().free_blocks == free + 3 - -(-kept // size)
                more = self.tokens(size + 1)
                self.feed(cache, {handle: more})
                self.assert_holds(handle, tokens[:kept] + more)
                handle.free()

    @pytest.mark.parametrize("length", [-1, 6, True, 2.0, None, "1"])
    def test_truncate_refuses_what_is_no_length_of_the_sequence(self, length: object) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 5)
            with pytest.raises(ShapeError):
                handle.truncate(length)  # type: ignore[arg-type]
            self.assert_holds(handle, tokens)

    def test_truncate_gives_back_reserved_room(self) -> None:
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 1, num_tokens=5 * self.block_size)
            assert handle.block_table.num_blocks == 5
            cache.extend(handle, 7 * self.block_size)
            assert handle.block_table.free_tokens >= 7 * self.block_size
            handle.truncate(1)
            assert handle.block_table.num_blocks == 1
            self.assert_holds(handle, tokens)

    def test_vllm_mlx_385_rows_that_were_cut_off_never_come_back(self) -> None:
        size = self.block_size
        with self.cache() as cache:
            handle, tokens = self.filled(cache, 3 * size)
            handle.truncate(size + 1)
            cache.extend(handle, 4 * size)
            self.assert_holds(handle, tokens[: size + 1])
            fork = handle.fork()
            self.assert_holds(fork, tokens[: size + 1])
            new = self.tokens(1)
            self.feed(cache, {fork: new})
            self.assert_holds(fork, tokens[: size + 1] + new)
            handle.truncate(0)
            self.assert_holds(handle, [])
            assert handle.token_ids == ()

    def test_truncating_one_side_leaves_forks_and_their_blocks_alone(self) -> None:
        size = self.block_size
        with self.cache() as cache:
            parent, tokens = self.filled(cache, 2 * size + 1)
            fork = parent.fork()
            table = fork.block_table
            parent.truncate(size + 1)
            more = self.tokens(2 * size)
            self.feed(cache, {parent: more})
            self.assert_holds(fork, tokens)
            assert fork.block_table == table
            fork.truncate(1)
            again = self.tokens(size)
            self.feed(cache, {fork: again})
            self.assert_holds(parent, tokens[: size + 1] + more)
            self.assert_holds(fork, tokens[:1] + again)

    def test_sglang_31616_rounds_of_drafts_and_rejections_leak_nothing(self, block_size: int) -> None:
        dice = random.Random(block_size)
        with self.cache(self.geometry("uniform"), block_size=block_size, num_blocks=512 // block_size + 8) as cache:
            total = cache.stats().free_blocks
            handle = cache.allocate()
            tokens: list[int] = []
            for round_number in range(100):
                drafted = self.tokens(dice.randint(1, 7))
                kept = dice.randint(0, len(drafted))
                if round_number % 2:
                    with cache.step({handle: drafted}) as step:
                        self.write(step, {handle: drafted})
                        step.accept(handle, kept)
                else:
                    self.feed(cache, {handle: drafted})
                    handle.truncate(len(tokens) + kept)
                tokens += drafted[:kept]
                if len(tokens) > 400:
                    tokens = tokens[: dice.randint(0, 20)]
                    handle.truncate(len(tokens))
                held = -(-len(tokens) // block_size)
                assert handle.block_table.num_blocks == held
                assert cache.stats().free_blocks == total - held
                if round_number % 10 == 0:
                    self.assert_holds(handle, tokens)
            self.assert_holds(handle, tokens)
            handle.free()
            assert cache.stats().free_blocks == total

    def test_accept_keeps_only_the_first_new_tokens(self) -> None:
        size = self.block_size
        for kept in (0, 1, size - 1, size, size + 2):
            with self.cache() as cache:
                handle, tokens = self.filled(cache, size - 1)
                other, others_tokens = self.filled(cache, 2)
                new = {handle: self.tokens(size + 2), other: self.tokens(1)}
                with cache.step(new) as step:
                    self.write(step, new)
                    step.accept(handle, 1)
                    step.accept(handle, kept)
                    assert handle.num_tokens == size - 1
                self.assert_holds(handle, tokens + new[handle][:kept])
                assert list(handle.token_ids) == tokens + new[handle][:kept]
                assert handle.block_table.num_blocks == -(-handle.num_tokens // size)
                self.assert_holds(other, others_tokens + new[other])
                more = self.tokens(size)
                self.feed(cache, {handle: more})
                self.assert_holds(handle, tokens + new[handle][:kept] + more)

    def test_accept_refuses_other_handles_and_impossible_counts(self) -> None:
        with self.cache() as cache:
            handle, other = cache.allocate(), cache.allocate()
            step = cache.begin({handle: 2})
            for count in (-1, 3, True, 1.0, None):
                with pytest.raises(ShapeError):
                    step.accept(handle, count)  # type: ignore[arg-type]
            with pytest.raises(StepError):
                step.accept(other, 0)
            step.abort()

    @pytest.mark.parametrize("kept", [17, 5])
    def test_mlx_lm_1776_truncating_past_a_window_is_exact(self, kept: int) -> None:
        with self.cache() as cache:  # the mixed shape has a window of block_size + 1
            handle = cache.allocate()
            tokens = self.tokens(20)
            for token in tokens:
                self.feed(cache, {handle: [token]})
            handle.truncate(kept)
            self.assert_holds(handle, tokens[:kept])
            self._assert_continues_as_if_fresh(handle.num_tokens, tokens[:kept])

    def _assert_continues_as_if_fresh(self, kept: int, tokens: list[int]) -> None:
        """Attention after a rollback equals that of a sequence which never held the rejected tokens."""
        with self.cache() as cache:
            rejected, new = self.tokens(3), self.tokens(2)
            rolled, fresh = cache.allocate(), cache.allocate()
            self.feed(cache, {rolled: tokens + rejected, fresh: tokens})
            rolled.truncate(kept)
            with cache.step({rolled: new, fresh: new}) as step:
                assert step.positions.tolist() == [kept, kept + 1] * 2
                self.write(step, {rolled: new, fresh: new})
                for layer in self.attending_layers(cache):
                    spec = self.layer_spec(cache, layer)
                    query = self.random(2, spec.num_kv_heads, spec.head_dim).repeat(2, 1, 1)
                    out = self.assert_attends(step, layer, query)
                    assert (out[:2] == out[2:]).all()

    def test_mlx_lm_1437_rolling_back_inside_a_filled_window_keeps_positions(self) -> None:
        window = self.block_size + 1
        for length in (window - 1, window, window + 1, 2 * window):
            self._assert_continues_as_if_fresh(length, self.tokens(length))

    def test_mlx_lm_1427_a_wrong_draft_every_third_token_does_not_change_the_outcome(self) -> None:
        window = self.block_size + 1
        with self.cache() as cache:
            speculative, plain = cache.allocate(), cache.allocate()
            tokens = self.tokens(4 * window)
            for index, token in enumerate(tokens):
                self.feed(cache, {plain: [token]})
                wrong = self.tokens(2) if index % 3 == 2 else []
                draft = [token, *wrong]
                with cache.step({speculative: draft}) as step:
                    self.write(step, {speculative: draft})
                    step.accept(speculative, 1)
            self.assert_holds(speculative, tokens)
            self.assert_holds(plain, tokens)
            assert speculative.block_table.num_blocks == plain.block_table.num_blocks
            query = self.random(1, 2, self.head_dim).repeat(2, 1, 1)
            last = self.tokens(1)
            with cache.step({speculative: last, plain: last}) as step:
                self.write(step, {speculative: last, plain: last})
                out = step.attend(0, query)
            assert (out[0] == out[1]).all()

    def test_scrub_zeroes_what_nobody_names_any_more(self) -> None:
        with self.cache(scrub=True) as cache:
            handle, tokens = self.filled(cache, 2 * self.block_size + 1)
            fork = handle.fork()
            handle.truncate(1)
            self.assert_holds(fork, tokens)
            fork.truncate(self.block_size + 1)
            self.assert_holds(fork, tokens[: self.block_size + 1])
            handle.free()
            self.assert_holds(fork, tokens[: self.block_size + 1])
            more = self.tokens(self.block_size)
            step = cache.begin({fork: more})
            self.write(step, {fork: more})
            step.abort()
            self.feed(cache, {fork: more})
            self.assert_holds(fork, tokens[: self.block_size + 1] + more)

from __future__ import annotations

import errno
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcache_core.errors import CacheFullError
from kvcache_core.geometry import CacheGeometry
from kvcache_cpu import base, mapped
from kvcache_cpu.memory import HERE
from kvcache_cpu.pages import PAGE
from kvcache_cpu.residency import Residency, residency
from plugins.cpu.tests.driver import Driver, MakeDriver, Sequence, assert_same_bits

#: 30 layers, 3 kv heads of 64: the shape of SmolLM2-135M. 180 runs.
SMOL = CacheGeometry.uniform(30, 3, 64)
RUNS = 30 * 3 * 2
TOKEN_BYTES = RUNS * 64 * 2


def pages_of(sequence: Sequence) -> Residency:
    return residency(sequence.slot.mapping.address, sequence.slot.mapping.length)


def file_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:kvcache")


def filled(driver: Driver, num_tokens: int) -> Sequence:
    """A sequence with so many tokens, without a copy in the oracle."""
    sequence = driver.open()
    driver.append(sequence, num_tokens)
    return sequence


class TestMemory:
    def test_a_sequence_takes_its_tokens_bytes_and_at_most_a_page_per_run(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16", max_sequence_length=100_000)
        sequence = driver.open()
        assert driver.storage.nbytes == 0
        for num_tokens in (1, 30, 1, 200):
            driver.append(sequence, num_tokens)
            exact = sequence.length * TOKEN_BYTES
            taken = sum(pages_of(sequence))
            assert driver.storage.nbytes == taken
            assert exact <= taken <= exact + RUNS * PAGE

    def test_a_fork_takes_no_private_memory(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        source = filled(driver, 500)
        before = driver.storage.nbytes
        fork = driver.fork(source)
        driver.check(fork)
        assert pages_of(fork).private == 0
        assert driver.storage.nbytes == before

    def test_the_first_token_of_a_fork_copies_at_most_a_page_per_run(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        source = filled(driver, 500)
        forks = [driver.fork(source) for _ in range(3)]
        for fork in forks:
            driver.append(fork, 1)
            assert pages_of(fork).private <= RUNS * PAGE
        driver.check(source, *forks)

    def test_truncate_gives_pages_back_at_once(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        sequence = filled(driver, 500)
        driver.truncate(sequence, 100)
        assert driver.storage.nbytes <= 100 * TOKEN_BYTES + RUNS * PAGE
        driver.truncate(sequence, 0)
        assert driver.storage.nbytes == 0

    def test_truncating_a_fork_gives_its_private_pages_back(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        source = filled(driver, 100)
        fork, other = driver.fork(source), driver.fork(source)
        driver.append(other, 65)  # takes the place of the owner, so that the fork stays private
        driver.append(fork, 400)
        assert pages_of(fork).private >= 400 * TOKEN_BYTES
        driver.truncate(fork, 200)
        assert pages_of(fork).private <= 100 * TOKEN_BYTES + 2 * RUNS * PAGE
        driver.truncate(fork, 100)
        assert pages_of(fork).private == 0
        driver.check(source, fork, other)

    def test_closing_the_source_keeps_only_what_forks_share(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        source = filled(driver, 500)
        fork = driver.fork(source, 100)
        driver.close(source)
        assert driver.storage.nbytes <= 100 * TOKEN_BYTES + RUNS * PAGE
        driver.check(fork)
        driver.close(fork)
        assert driver.storage.nbytes == 0

    def test_a_fork_that_outgrows_its_source_does_not_take_its_memory_twice(self, mapped_driver: MakeDriver) -> None:
        """A private write to a page that the file lacks makes the kernel add an empty page to the file too."""
        driver = mapped_driver(CacheGeometry.uniform(2, 3, 64), dtype="bfloat16")
        runs, token_bytes = 12, 12 * 64 * 2
        source = filled(driver, 40)
        first, second = driver.fork(source), driver.fork(source)
        driver.append(first, 65)
        for num_tokens in (500, *[1] * 100):
            driver.append(second, num_tokens)
        assert second.slot.mapping.private
        taken = driver.storage._memory._ledger.file.committed + pages_of(second).private
        assert taken <= 1.02 * (40 + 65 + 600) * token_bytes + 3 * runs * PAGE
        driver.check(source, first, second)

    def test_empty_pages_are_accounted_for_when_another_sequence_goes_during_the_step(
        self, mapped_driver: MakeDriver
    ) -> None:
        driver = mapped_driver()
        source = filled(driver, 224)
        late, early = driver.fork(source), driver.fork(source, 189)
        driver.append(early, 195)
        rows = driver.random_rows(100)
        batch = driver.begin({early: 100})
        driver.close(late)
        for layer, (key, value) in rows.items():
            driver.storage.write(batch, layer, key, value)
        assert driver.unaccounted_bytes <= 0
        driver.storage.truncate(early.slot, early.length)
        driver.check(source, early)

    @pytest.mark.parametrize("num_tokens", [40, 200])
    @pytest.mark.parametrize("layers_before", [0, 2])
    def test_empty_pages_are_accounted_for_when_the_file_loses_its_pages_during_the_step(
        self, mapped_driver: MakeDriver, num_tokens: int, layers_before: int
    ) -> None:
        driver = mapped_driver()
        source = filled(driver, 100)
        fork = driver.fork(source)
        driver.append(source, 400)
        rows = driver.random_rows(num_tokens)
        batch = driver.begin({fork: num_tokens})
        for index, (layer, (key, value)) in enumerate(rows.items()):
            if index == layers_before:
                driver.close(source)
            driver.storage.write(batch, layer, key, value)
        assert driver.unaccounted_bytes <= 0
        driver.storage.truncate(fork.slot, fork.length)
        driver.check(fork)

    def test_many_sequences_need_one_file_descriptor(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = filled(driver, 3)
        before = len(os.listdir("/proc/self/fd"))
        sequences = [driver.open() for _ in range(500)] + [driver.fork(source) for _ in range(500)]
        assert len(os.listdir("/proc/self/fd")) == before
        for sequence in sequences:
            driver.close(sequence)

    def test_reported_bytes_agree_with_the_kernel(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        source = filled(driver, 64)
        forks = [driver.fork(source) for _ in range(3)]
        for fork in forks:
            driver.append(fork, 33)
        measured = driver.storage._memory._ledger.file.committed + sum(
            pages_of(sequence).private for sequence in (source, *forks)
        )
        assert driver.storage.nbytes == measured

    def test_a_reservation_far_beyond_the_machines_memory_costs_nothing(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16", max_sequence_length=10_000_000)
        source = driver.open()
        driver.append(source, 1)
        fork = driver.fork(source)
        assert source.slot.mapping.length > 200 * 2**30
        assert driver.storage.nbytes <= RUNS * PAGE
        driver.check(source, fork)


class TestSharing:
    def test_an_append_by_either_side_is_not_seen_by_the_other(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = filled(driver, 21)
        fork = driver.fork(source)
        for sequence in (source, fork, fork, source):
            driver.append(sequence, 1)
            driver.check(source, fork)

    def test_a_source_that_truncates_below_the_fork_point_and_writes_again_leaves_the_fork_alone(
        self, mapped_driver: MakeDriver
    ) -> None:
        driver = mapped_driver()
        source = filled(driver, 300)
        forks = [driver.fork(source), driver.fork(source, 120)]
        driver.truncate(source, 50)
        driver.check(source, *forks)
        driver.append(source, 200)
        driver.check(source, *forks)
        driver.close(source)
        driver.check(*forks)

    @pytest.mark.parametrize("back", [0, 1, 2])
    def test_a_fork_keeps_its_last_tokens_however_little_the_source_goes_back(
        self, mapped_driver: MakeDriver, back: int
    ) -> None:
        driver = mapped_driver()
        source = filled(driver, 60)
        fork = driver.fork(source)
        driver.truncate(source, 60 - back)
        driver.append(source, 3)
        assert source.slot.mapping.private is (back > 0)
        driver.check(source, fork)

    def test_tensors_handed_out_before_stay_valid_when_the_source_becomes_private(
        self, mapped_driver: MakeDriver
    ) -> None:
        driver = mapped_driver()
        source = filled(driver, 100)
        fork = driver.fork(source)
        driver.truncate(source, 40)
        views = driver.storage.gather(source.slot, (), 40, 0)
        driver.append(source, 10)
        assert torch.equal(views[0], source.rows[0][0][:40])
        assert torch.equal(views[1], source.rows[0][1][:40])
        driver.check(source, fork)

    def test_forks_of_forks_of_forks_are_independent(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        family = [filled(driver, 50)]
        for generation in range(6):
            driver.append(family[-1], 7)
            family.append(driver.fork(family[-1]))
            driver.append(family[generation // 2], 3)
            driver.check(*family)
        for member in family:
            driver.append(member, 1)
        driver.check(*family)

    @pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
    def test_sequences_close_in_any_order(self, mapped_driver: MakeDriver, order: tuple[int, ...]) -> None:
        driver = mapped_driver()
        source = filled(driver, 60)
        child = driver.fork(source, 50)
        driver.append(child, 20)
        family = [source, child, driver.fork(child), driver.fork(child, 30)]
        for sequence in family:
            driver.append(sequence, 5)
        left = list(family)
        for index in order:
            driver.close(family[index])
            left.remove(family[index])
            driver.check(*left)
            for sequence in left:
                driver.append(sequence, 1)
        assert driver.storage.nbytes == 0

    def test_a_fork_of_a_fork_copies_only_what_the_fork_wrote(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        source = filled(driver, 512)
        first, child = driver.fork(source), driver.fork(source)
        driver.append(first, 65)
        driver.append(child, 32)
        assert child.slot.mapping.private
        assert driver.storage.shared_tokens(child.slot, 544) == 512
        assert driver.storage.shared_tokens(child.slot, 300) == 300
        grandchild = driver.fork(child)
        assert pages_of(grandchild).private <= 32 * TOKEN_BYTES + RUNS * PAGE
        driver.check(source, first, child, grandchild)

    def test_a_chain_of_forks_whose_sources_are_freed_never_copies_the_past(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        sequence = filled(driver, 256)
        for _ in range(5):
            assert driver.storage.shared_tokens(sequence.slot, sequence.length) == sequence.length
            following = driver.fork(sequence)
            driver.close(sequence)
            driver.append(following, 20)
            sequence = following
            assert pages_of(sequence).private == 0
            assert driver.storage.nbytes <= sequence.length * TOKEN_BYTES + RUNS * PAGE
        driver.check(sequence)

    def test_a_survivor_that_has_written_shares_everything_with_its_own_forks(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = filled(driver, 100)
        first, second = driver.fork(source), driver.fork(source)
        driver.append(first, 5)
        driver.append(second, 60)
        assert second.slot.mapping.private
        driver.close(source)
        driver.close(first)
        assert driver.storage.shared_tokens(second.slot, 160) == 160
        fork = driver.fork(second)
        assert pages_of(fork).private == pages_of(second).private == 0
        driver.append(fork, 3)
        driver.append(second, 3)
        driver.check(second, fork)

    def test_a_fork_rewritten_from_the_start_shares_nothing_any_more(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = filled(driver, 100)
        fork = driver.fork(source)
        driver.truncate(fork, 0)
        driver.append(fork, 30)
        assert not fork.slot.mapping.private
        assert fork.slot.mapping.base is not source.slot.mapping.base
        driver.close(source)
        driver.check(fork)

    @pytest.mark.parametrize("steps", [[65], [64, 1], [1] * 65])
    def test_a_fork_takes_the_place_of_the_owner_once_it_has_more_than_64_rows_of_its_own(
        self, mapped_driver: MakeDriver, steps: list[int]
    ) -> None:
        driver = mapped_driver()
        source = filled(driver, 100)
        fork = driver.fork(source)
        for num_tokens in steps:
            assert fork.slot.mapping.private
            driver.append(fork, num_tokens)
        assert source.slot.mapping.private
        assert not fork.slot.mapping.private
        driver.append(source, 3)
        driver.check(source, fork)

    def test_a_fork_never_takes_the_place_of_an_owner_that_has_gone_on(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = filled(driver, 100)
        fork = driver.fork(source)
        driver.append(source, 1)
        for _ in range(2):
            driver.append(fork, 100)
        assert not source.slot.mapping.private
        driver.check(source, fork)

    def test_a_fork_becomes_the_owner_at_once_where_there_is_none(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = filled(driver, 100)
        fork = driver.fork(source)
        driver.close(source)
        driver.append(fork, 1)
        assert not fork.slot.mapping.private
        driver.check(fork)

    def test_a_fork_of_an_empty_sequence_is_an_empty_sequence(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = driver.open()
        fork = driver.fork(source)
        driver.append(source, 3)
        driver.append(fork, 4)
        driver.check(source, fork)

    def test_rows_that_only_a_closed_fork_needed_are_given_back(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        source = filled(driver, 400)
        fork = driver.fork(source)
        driver.truncate(source, 10)
        assert driver.storage.nbytes >= 400 * TOKEN_BYTES
        driver.close(fork)
        assert driver.storage.nbytes <= 10 * TOKEN_BYTES + RUNS * PAGE
        driver.check(source)

    @pytest.mark.parametrize("num_tokens", [105, 130, 160])
    def test_a_private_source_keeps_what_is_written_to_it_while_it_is_forked(
        self, mapped_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, num_tokens: int
    ) -> None:
        """A cached prompt may be forked while another thread writes the next step of the sequence that it is in."""
        geometry = CacheGeometry.uniform(1, 2, 64)

        def reached(moment: int) -> bool:
            driver = mapped_driver(geometry)
            source = filled(driver, 100)
            writer = driver.fork(source)
            driver.append(writer, 60)
            assert writer.slot.mapping.private
            rows = driver.random_rows(4)
            batch = driver.begin({writer: 4})
            batch.plan.table(0)  # looked up under the lock; what follows takes none
            calls = itertools.count()

            def written_first(call: Callable[..., Any]) -> Callable[..., Any]:
                def hooked(*arguments: Any, **options: Any) -> Any:
                    if next(calls) == moment:
                        driver.storage.write(batch, 0, *rows[0])
                    return call(*arguments, **options)

                return hooked

            with monkeypatch.context() as patch:
                for name in ("map_pages", "copy", "move", "discard"):
                    patch.setattr(mapped, name, written_first(getattr(mapped, name)))
                fork = driver.fork(writer, num_tokens)
            if next(calls) <= moment:
                return False
            writer.rows = {0: (torch.cat([writer.rows[0][0], rows[0][0]]), torch.cat([writer.rows[0][1], rows[0][1]]))}
            driver.check(source, writer, fork)
            measured = driver.storage._memory._ledger.file.committed + sum(
                pages_of(sequence).private for sequence in (source, writer, fork)
            )
            assert driver.storage.nbytes == measured
            return True

        moments = list(itertools.takewhile(reached, itertools.count()))
        assert len(moments) > 4


class TestWindow:
    """Rows that several sequences read are read where their pages are mapped already."""

    def test_a_step_of_a_fork_maps_no_pages_but_those_that_it_writes(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        source = filled(driver, 500)
        self.attend_everywhere(driver, source)
        before = pages_of(source)
        assert sum(before) >= 500 * TOKEN_BYTES
        first, second = driver.fork(source), driver.fork(source)
        for fork in (first, second):
            self.attend_everywhere(driver, fork)
            assert sum(pages_of(fork)) <= 2 * RUNS * PAGE
        self.attend_everywhere(driver, source)
        assert sum(pages_of(source)) <= 2 * RUNS * PAGE
        driver.check(source, first, second)

    def test_it_lasts_when_the_source_is_closed(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(SMOL, dtype="bfloat16")
        source = filled(driver, 500)
        first, second = driver.fork(source), driver.fork(source)
        driver.close(source)
        for fork in (first, second, first):
            self.attend_everywhere(driver, fork)
            assert sum(pages_of(fork)) <= 2 * RUNS * PAGE
        driver.check(first, second)

    def test_it_goes_with_the_last_sequence(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        before = Path("/proc/self/maps").read_text().count("\n")
        for closed_first in (False, True):
            source = filled(driver, 100)
            forks = [driver.fork(source), driver.fork(source, 30)]
            if closed_first:
                driver.close(source)
            driver.check(*forks)
            for sequence in forks if closed_first else [*forks, source]:
                driver.close(sequence)
        assert driver.storage.nbytes == 0
        assert Path("/proc/self/maps").read_text().count("\n") <= before + 1

    def test_a_system_that_refuses_it_serves_forks_all_the_same(
        self, mapped_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(address: int, length: int) -> int:
            raise OSError(errno.EINVAL, "Invalid argument")

        monkeypatch.setattr(base, "lift", refused)
        driver = mapped_driver()
        source = filled(driver, 100)
        forks = [driver.fork(source), driver.fork(source, 30)]
        for sequence in (*forks, source):
            self.attend_everywhere(driver, sequence)
            assert driver.storage._memory.elsewhere(sequence.slot) == HERE
        driver.check(source, *forks)

    def test_a_fork_attends_bit_by_bit_as_a_sequence_of_its_own_does(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = filled(driver, 700)
        fork = driver.fork(source, 650)
        own = driver.open()
        driver.write({own: {layer: (k[:650], v[:650]) for layer, (k, v) in source.rows.items()}})
        rows = driver.random_rows(3)
        query = torch.randn(3, 4, 24)
        results = [driver.attend(driver.write({sequence: rows}), 2, query) for sequence in (fork, own)]
        assert driver.storage._memory.elsewhere(fork.slot).num_tokens >= 650
        assert_same_bits(*results)

    def test_what_the_source_writes_after_going_back_is_not_seen_there(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = filled(driver, 300)
        fork = driver.fork(source)
        batch = driver.write({fork: driver.random_rows(1)})
        query = torch.randn(1, 4, 24)
        before = driver.attend(batch, 0, query)
        driver.truncate(source, 50)
        driver.append(source, 260)
        assert_same_bits(driver.attend(batch, 0, query), before)  # the same step, planned before
        driver.check(source, fork)

    @staticmethod
    def attend_everywhere(driver: Driver, sequence: Sequence) -> None:
        batch = driver.write({sequence: driver.random_rows(1)})
        for group in driver.spec.geometry.groups:
            for layer in group.layers:
                driver.attend(batch, layer, torch.randn(1, 2 * group.num_kv_heads, group.head_dim))


class TestLifetime:
    def test_views_outlive_their_sequence_and_hold_its_memory(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        sequence = filled(driver, 200)
        key, value = driver.storage.gather(sequence.slot, (), 200, 3)
        expected = sequence.rows[3]
        driver.close(sequence)
        held = driver.storage.nbytes
        assert held > 0
        other = filled(driver, 200)
        assert torch.equal(key, expected[0])
        assert torch.equal(value, expected[1])
        driver.close(other)
        del key
        assert driver.storage.nbytes == held
        del value
        assert driver.storage.nbytes == 0

    def test_views_outlive_the_storage(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        sequence = filled(driver, 50)
        descriptors = len(os.listdir("/proc/self/fd"))
        view = driver.storage.gather(sequence.slot, (), 50, 2)[1]
        expected = sequence.rows[2][1]
        driver.storage.shutdown()
        assert torch.equal(view, expected)
        del view
        assert len(os.listdir("/proc/self/fd")) == descriptors - 1

    def test_a_storage_that_is_dropped_without_shutdown_gives_its_memory_back(self) -> None:
        driver = Driver("mapped", SMOL, dtype="bfloat16")
        sequence = filled(driver, 10)
        fork = driver.fork(sequence)
        addresses = [s.slot.mapping.address for s in (sequence, fork)]
        descriptor = driver.storage._memory._ledger.file.fd
        del driver, sequence, fork
        maps = Path("/proc/self/maps").read_text()
        assert not any(f"{address:x}-" in maps for address in addresses)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

    def test_a_step_that_is_kept_does_not_hold_the_memory_of_closed_sequences(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        sequence = driver.open()
        batches = []
        for _ in range(3):
            batches.append(driver.write({sequence: driver.random_rows(4)}))
            driver.attend(batches[-1], 0, torch.randn(4, 4, 24))
        driver.close(sequence)
        assert driver.storage.nbytes == 0

    def test_a_mapping_that_goes_while_the_books_are_locked_is_entered_afterwards(
        self, mapped_driver: MakeDriver
    ) -> None:
        driver = mapped_driver()
        sequence = filled(driver, 10)
        ledger = driver.storage._memory._ledger
        with ledger:
            driver.close(sequence)  # as the garbage collector may, in the middle of an operation
            assert len(ledger.bases) == 1
        assert ledger.bases == set()
        assert driver.storage.nbytes == 0

    def test_a_child_process_leaves_the_parents_rows_alone(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver()
        source = filled(driver, 100)
        fork = driver.fork(source, 60)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                driver.close(fork)
                driver.close(source)
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        driver.check(source, fork)


class TestRefusal:
    @staticmethod
    def refuse(monkeypatch: pytest.MonkeyPatch, call: str = "map_pages", module: ModuleType = mapped) -> None:
        def refused(*arguments: Any, **options: Any) -> int:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        monkeypatch.setattr(module, call, refused)

    def test_a_refused_reservation_is_a_cache_full_error_with_numbers(
        self, mapped_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver = mapped_driver(max_sequence_length=160)
        with monkeypatch.context() as patch:
            self.refuse(patch)
            with pytest.raises(CacheFullError, match=r"up to 160 tokens.*refuses to reserve \d+ bytes") as caught:
                driver.open()
        assert caught.value.needed == 10
        assert driver.storage.nbytes == 0
        driver.check(filled(driver, 20))

    def test_a_reservation_larger_than_the_address_space_is_a_cache_full_error(self, mapped_driver: MakeDriver) -> None:
        driver = mapped_driver(max_sequence_length=2**40)
        with pytest.raises(CacheFullError, match="address space"):
            driver.open()
        assert list(driver.storage.audit()) == []

    def test_a_refused_fork_changes_nothing(self, mapped_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        driver = mapped_driver()
        source = filled(driver, 30)
        with monkeypatch.context() as patch:
            self.refuse(patch)
            with pytest.raises(CacheFullError):
                driver.fork(source)
        driver.append(source, 1)
        driver.check(source, driver.fork(source))

    @pytest.mark.parametrize("call", ["map_pages", "move"])
    def test_a_source_that_cannot_become_private_stays_as_it_was(
        self, mapped_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        driver = mapped_driver()
        source = filled(driver, 30)
        fork = driver.fork(source)
        driver.truncate(source, 10)
        driver.check(source, fork)
        mappings = Path("/proc/self/maps").read_text().count("\n")
        with monkeypatch.context() as patch:
            self.refuse(patch, call)
            with pytest.raises(CacheFullError):
                driver.begin({source: 1})
        assert Path("/proc/self/maps").read_text().count("\n") <= mappings
        driver.check(source, fork)
        driver.append(source, 25)
        driver.check(source, fork)

    def test_memory_is_given_back_where_the_system_refuses_to_unmap_and_the_addresses_when_it_no_longer_does(
        self, mapped_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kernel joins neighbouring mappings, and parts them only where the process may have one more."""
        driver = mapped_driver()
        mappings = file_mappings()
        source = filled(driver, 100)
        forks = [driver.fork(source), driver.fork(source, 60)]
        driver.append(forks[0], 5)
        for fork in forks:
            TestWindow.attend_everywhere(driver, fork)
        with monkeypatch.context() as patch:
            self.refuse(patch, "unmap", base)
            for sequence in (forks[1], source, forks[0]):
                address, length = sequence.slot.mapping.address, sequence.slot.mapping.length
                driver.close(sequence)
                assert residency(address, length).private == 0
            assert driver.storage.nbytes == 0
            assert driver.storage._memory._ledger.bases == set()
            assert file_mappings() > mappings
        driver.check(filled(driver, 1))
        assert file_mappings() == mappings + 1

    @pytest.mark.parametrize("call", ["map_pages", "move"])
    def test_a_fork_that_cannot_become_the_owner_writes_privately(
        self, mapped_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        driver = mapped_driver()
        source = filled(driver, 30)
        fork = driver.fork(source)
        with monkeypatch.context() as patch:
            self.refuse(patch, call)
            driver.append(fork, 10)
            driver.append(fork, 10)
        assert fork.slot.mapping.private
        driver.append(source, 5)
        driver.check(source, fork)

    def test_a_fork_rewritten_from_the_start_without_address_space_stays_private(
        self, mapped_driver: MakeDriver, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        driver = mapped_driver()
        source = filled(driver, 30)
        fork = driver.fork(source)
        driver.truncate(fork, 0)
        with monkeypatch.context() as patch:
            self.refuse(patch)
            driver.append(fork, 10)
        driver.append(fork, 10)
        driver.check(source, fork, driver.fork(fork))


def test_LMCache_LMCache_1858_threads_with_sequences_of_their_own_do_not_disturb_one_another(
    mapped_driver: MakeDriver,
) -> None:
    driver = mapped_driver()
    lock = threading.Lock()  # core's, over everything but the data
    root = filled(driver, 40)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        mine = Driver.sharing(driver, seed, lock)
        try:
            for _ in range(15):
                sequence = mine.fork(root)
                mine.append(sequence, 50)
                views = mine.storage.gather(sequence.slot, (), sequence.length, 0)
                child = mine.fork(sequence, 60)
                mine.truncate(sequence, 45)
                mine.append(sequence, 10)
                mine.append(child, 3)
                mine.check(sequence, child, audit=False)
                mine.close(sequence)
                mine.check(child, audit=False)
                mine.close(child)
                del views  # gives the memory back without the lock
        except BaseException as error:  # noqa: BLE001 - the main thread reports it
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    driver.check(root)
    driver.close(root)
    assert driver.storage.nbytes == 0

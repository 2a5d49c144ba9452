from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest

from kvcache_core.geometry import CacheGeometry
from kvcache_cpu.base import Base, Ledger, Mapping
from kvcache_cpu.layout import Layout
from kvcache_cpu.pages import PAGE, PageFile, map_pages, mapping_fault

pytestmark = pytest.mark.skipif(mapping_fault() is not None, reason=str(mapping_fault()))

#: One row a page and run.
LAYOUT = Layout.of(CacheGeometry.uniform(1, 1, PAGE), 1, 8, PAGE)


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    ledger = Ledger(PageFile(), scrub=False)
    yield ledger
    assert ledger.audit() == []
    ledger.retire()


def mapping_of(ledger: Ledger, base: Base, *, private: bool, shared: int = 0, extent: int = 0) -> Mapping:
    address = map_pages(ledger.file.fd, base.offset, base.layout.nbytes, private=private)
    mapping = Mapping(base, address, private, shared, extent)
    ledger.enter(mapping, base, private=private, shared=shared)
    return mapping


def test_what_private_mappings_read_is_frozen_until_the_last_of_them_leaves(ledger: Ledger) -> None:
    with ledger:
        base = ledger.new_base(LAYOUT)
        owner = mapping_of(ledger, base, private=False, extent=8)
        forks = [mapping_of(ledger, base, private=True, shared=shared, extent=shared) for shared in (5, 3, 4)]
        assert (base.frozen, base.needed) == (5, 8)
        ledger.leave(owner)
        assert (base.owner, base.frozen, base.needed, base.filled) == (None, 5, 5, 5)
        ledger.leave(forks[0])
        assert base.needed == base.filled == 4
        ledger.leave(forks[1])
        ledger.leave(forks[2])
        assert ledger.bases == set()


def test_mappings_that_go_while_the_lock_is_held_are_settled_when_it_is_released(ledger: Ledger) -> None:
    with ledger:
        base = ledger.new_base(LAYOUT)
        owner = mapping_of(ledger, base, private=False, extent=2)
        ledger.unreferenced(owner)
        assert ledger.bases == {base}
    assert ledger.bases == set()


def test_a_mapping_that_goes_on_another_thread_never_waits_for_the_lock(ledger: Ledger) -> None:
    with ledger:
        base = ledger.new_base(LAYOUT)
        owner = mapping_of(ledger, base, private=False)
        thread = threading.Thread(target=ledger.unreferenced, args=(owner,))
        thread.start()
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert ledger.bases == set()


def test_the_collector_may_run_in_the_middle_of_an_operation(ledger: Ledger) -> None:
    class Cycle:
        def __init__(self, mapping: Mapping) -> None:
            self.me, self.mapping = self, mapping

        def __del__(self) -> None:
            ledger.unreferenced(self.mapping)

    with ledger:
        Cycle(mapping_of(ledger, ledger.new_base(LAYOUT), private=False))
        gc.collect()
        assert len(ledger.bases) == 1
    assert ledger.bases == set()


def test_the_file_closes_with_the_last_mapping_after_retirement() -> None:
    ledger = Ledger(PageFile(), scrub=False)
    with ledger:
        owner = mapping_of(ledger, ledger.new_base(LAYOUT), private=False, extent=1)
        ledger.retire()
    assert ledger.nbytes == 0
    ledger.unreferenced(owner)
    with pytest.raises(OSError, match="Bad file descriptor"):
        ledger.file.take(PAGE)


def _lose_owner(base: Base, owner: Mapping, fork: Mapping) -> None:
    base.owner = None


def _thaw(base: Base, owner: Mapping, fork: Mapping) -> None:
    base.frozen = 1


def _drop_rows(base: Base, owner: Mapping, fork: Mapping) -> None:
    base.filled = 2


def _share_too_much(base: Base, owner: Mapping, fork: Mapping) -> None:
    fork.extent = 1


def _misfile(base: Base, owner: Mapping, fork: Mapping) -> None:
    fork.base = Base(0, LAYOUT)


@pytest.mark.parametrize(
    ("break_it", "finding"),
    [
        (_lose_owner, "not exactly the owner"),
        (_thaw, "1 rows are frozen but private mappings read 3"),
        (_drop_rows, "2 rows are kept but 4 are needed"),
        (_share_too_much, "reads 3 rows of it but has only 1"),
        (_misfile, "belongs to another base"),
    ],
)
def test_the_audit_finds_what_is_inconsistent(break_it: Callable[[Base, Mapping, Mapping], None], finding: str) -> None:
    ledger = Ledger(PageFile(), scrub=False)
    with ledger:
        base = ledger.new_base(LAYOUT)
        owner = mapping_of(ledger, base, private=False, extent=4)
        fork = mapping_of(ledger, base, private=True, shared=3, extent=3)
        assert ledger.audit() == []
        break_it(base, owner, fork)
        assert any(finding in line for line in ledger.audit())

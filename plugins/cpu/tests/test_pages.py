from __future__ import annotations

import ctypes
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache_cpu import pages
from kvcache_cpu.pages import PAGE, PageFile, discard, lift, map_pages, mapping_fault, move, unmap
from kvcache_cpu.residency import residency

pytestmark = pytest.mark.skipif(mapping_fault() is not None, reason=str(mapping_fault()))


@pytest.fixture
def file() -> Iterator[PageFile]:
    file = PageFile()
    yield file
    file.close()


def peek(address: int) -> int:
    return ctypes.c_ubyte.from_address(address).value


def poke(address: int, value: int) -> None:
    ctypes.c_ubyte.from_address(address).value = value


def test_memory_is_committed_by_touch_and_given_back_by_punch(file: PageFile) -> None:
    offset = file.take(8 * PAGE)
    address = map_pages(file.fd, offset, 8 * PAGE, private=False)
    assert file.committed == 0
    poke(address, 1)
    poke(address + 3 * PAGE, 1)
    assert file.committed == 2 * PAGE
    file.punch(offset, PAGE)
    assert file.committed == PAGE
    assert peek(address) == 0
    unmap(address, 8 * PAGE)


def test_a_range_that_is_used_again_reads_as_zeros(file: PageFile) -> None:
    offset = file.take(PAGE)
    address = map_pages(file.fd, offset, PAGE, private=False)
    poke(address, 7)
    unmap(address, PAGE)
    file.give_back(offset, PAGE)
    assert file.take(PAGE) == offset
    address = map_pages(file.fd, offset, PAGE, private=False)
    assert peek(address) == 0
    unmap(address, PAGE)


def test_ranges_in_use_do_not_overlap(file: PageFile) -> None:
    lengths = [PAGE, 3 * PAGE, PAGE, 2 * PAGE]
    taken = [(file.take(length), length) for length in lengths]
    file.give_back(*taken.pop(1))
    taken += [(file.take(length), length) for length in (2 * PAGE, 3 * PAGE, 3 * PAGE)]
    taken.sort()
    assert all(start + length <= after for (start, length), (after, _) in itertools.pairwise(taken))


def test_punching_the_file_leaves_private_copies_and_discarding_them_leaves_the_file(file: PageFile) -> None:
    offset = file.take(PAGE)
    owner = map_pages(file.fd, offset, PAGE, private=False)
    fork = map_pages(file.fd, offset, PAGE, private=True)
    poke(owner, 1)
    poke(fork + 1, 2)
    file.punch(offset, PAGE)
    assert (peek(owner), peek(fork), peek(fork + 1)) == (0, 1, 2)
    poke(owner, 3)
    discard(fork, PAGE)
    assert (peek(fork), peek(fork + 1)) == (3, 0)
    unmap(owner, PAGE)
    unmap(fork, PAGE)


def test_a_moved_mapping_takes_the_place_of_the_other(file: PageFile) -> None:
    offset = file.take(PAGE)
    owner = map_pages(file.fd, offset, PAGE, private=False)
    poke(owner, 1)
    move(map_pages(file.fd, offset, PAGE, private=True), PAGE, owner)
    poke(owner, 2)
    other = map_pages(file.fd, offset, PAGE, private=False)
    assert (peek(owner), peek(other)) == (2, 1)
    unmap(owner, PAGE)
    unmap(other, PAGE)


def test_a_refused_mapping_is_an_error_that_names_the_call(file: PageFile) -> None:
    with pytest.raises(OSError, match="mmap") as caught:
        map_pages(file.fd, 1, PAGE, private=False)  # not at a page
    assert caught.value.errno == errno.EINVAL


def test_a_child_process_does_not_give_back_the_pages_of_its_parent(file: PageFile) -> None:
    offset = file.take(PAGE)
    address = map_pages(file.fd, offset, PAGE, private=False)
    poke(address, 1)
    child = os.fork()
    if child == 0:
        file.punch(offset, PAGE)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert peek(address) == 1
    unmap(address, PAGE)


def test_the_file_is_closed_once_and_not_inherited_by_other_programs() -> None:
    file = PageFile()
    assert not os.get_inheritable(file.fd)
    file.close()
    file.close()
    assert file.committed == 0


def test_a_platform_without_files_in_memory_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.sys, "platform", "darwin")
    assert pages.mapping_fault.__wrapped__() == "mapped memory needs 64-bit Linux"


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_sandbox_that_refuses_files_in_memory_is_told_apart(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert "refuses what mapped memory needs" in str(pages.mapping_fault.__wrapped__())


def test_a_kernel_that_does_not_copy_on_write_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = pages.map_pages
    monkeypatch.setattr(pages, "map_pages", lambda *range_, private: shared(*range_, private=False))
    assert "do not copy on write" in str(pages.mapping_fault.__wrapped__())


def test_a_kernel_that_does_not_know_the_no_exec_seal_gets_a_plain_file(monkeypatch: pytest.MonkeyPatch) -> None:
    create = os.memfd_create
    seen = []

    def old_kernel(name: str, flags: int) -> int:
        seen.append(flags)
        if flags & ~(os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING):
            raise OSError(errno.EINVAL, "unknown flag")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", old_kernel)
    PageFile().close()
    assert len(seen) == 2


def test_a_lifted_mapping_takes_the_page_table_along(file: PageFile) -> None:
    length = 700 * PAGE  # more than a page table holds
    offset = file.take(length)
    address = map_pages(file.fd, offset, length, private=False)
    for page in range(0, 700, 7):
        poke(address + page * PAGE, page % 251)
    lifted = lift(address, length)
    assert (residency(lifted, length).shared, residency(address, length).shared) == (100 * PAGE, 0)
    assert all(peek(lifted + page * PAGE) == page % 251 for page in range(0, 700, 7))
    poke(address, 99)
    poke(address + PAGE, 98)  # a page that neither had
    assert (peek(lifted), peek(lifted + PAGE)) == (99, 98)
    unmap(address, length)
    assert peek(lifted) == 99
    unmap(lifted, length)


def test_a_refused_lift_leaves_the_mapping_and_the_address_space_as_they_were(
    file: PageFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = map_pages(file.fd, file.take(PAGE), PAGE, private=False)
    poke(address, 7)
    mappings = Path("/proc/self/maps").read_text().count("\n")
    monkeypatch.setattr(pages, "_MREMAP_DONTUNMAP", 0x800)  # a flag that no kernel knows
    with pytest.raises(OSError, match="mremap: Invalid argument"):
        lift(address, PAGE)
    assert Path("/proc/self/maps").read_text().count("\n") == mappings
    assert peek(address) == 7
    unmap(address, PAGE)

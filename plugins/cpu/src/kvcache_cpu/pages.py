"""Memory pages of the operating system: a file that lives in memory, and private and shared mappings of it.

Thin, typed wrappers around the system calls. Python's own `mmap` module is not used here: it keeps a duplicate file
descriptor for every mapping, offers no way to map over an existing address, and closing one under a tensor
crashes the process.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from functools import cache
from typing import Any

__all__ = [
    "PAGE",
    "PageFile",
    "copy",
    "discard",
    "lift",
    "map_pages",
    "mapping_fault",
    "move",
    "unmap",
    "zero",
]

#: Bytes of a page.
PAGE = mmap.PAGESIZE

_NOTHING = 0x0
_READ_WRITE = 0x1 | 0x2
_MAP_SHARED = 0x1
_MAP_PRIVATE = 0x2
_MAP_ANONYMOUS = 0x20
# Without it a private mapping of 40 GiB is charged in full when it is made, and refused.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_MREMAP_MAYMOVE = 0x1
_MREMAP_FIXED = 0x2
_MREMAP_DONTUNMAP = 0x4
_MADV_DONTNEED = 4
_FALLOC_FL_KEEP_SIZE = 0x1
_FALLOC_FL_PUNCH_HOLE = 0x2
_MFD_NOEXEC_SEAL = 0x8
_MAP_FAILED = ctypes.c_void_p(-1).value
# Page tables move as wholes between addresses that are equal modulo this.
_TABLE = 2 << 20


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, number, offset = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int64
    libc.mmap.restype = libc.mremap.restype = pointer
    libc.mmap.argtypes = (pointer, size, number, number, number, offset)
    libc.mremap.argtypes = (pointer, size, size, number, pointer)
    libc.munmap.argtypes = (pointer, size)
    libc.madvise.argtypes = (pointer, size, number)
    libc.fallocate.argtypes = (number, number, offset, offset)
    return libc


def _fail(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")


def map_pages(fd: int, offset: int, length: int, *, private: bool) -> int:
    """Map `length` bytes of a file and return their address; nothing is committed until it is touched.

    Args:
        fd: The file.
        offset: First byte, a multiple of the page size.
        length: Bytes.
        private: Writes go to private copies of the touched pages (copy-on-write) instead of to the file.

    Raises:
        OSError: The system refuses the mapping.
    """
    flags = (_MAP_PRIVATE if private else _MAP_SHARED) | _MAP_NORESERVE
    address = _libc().mmap(None, length, _READ_WRITE, flags, fd, offset)
    if address == _MAP_FAILED:
        raise _fail("mmap")
    return int(address)


def move(source: int, length: int, target: int) -> None:
    """Move a mapping over another one of the same length, which it replaces, in one step for all threads.

    Mapping first and moving then, rather than mapping over the target, leaves the target as it was when
    the system refuses the new mapping.
    """
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED
    if _libc().mremap(source, length, length, flags, target) == _MAP_FAILED:
        raise _fail("mremap")


def lift(address: int, length: int) -> int:
    """Map what a shared mapping maps a second time, take the page table over, and return the new address.

    Reading at the new address meets no page faults where the old one would not have. The old mapping stays, and is
    as if it had not been touched yet. Costs some 50 µs for each 100 MB.

    Raises:
        OSError: The system refuses; Linux before 5.13 always does.
    """
    libc = _libc()
    room = length + _TABLE
    start = libc.mmap(None, room, _NOTHING, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)
    if start == _MAP_FAILED:
        raise _fail("mmap")
    target = start + (address - start) % _TABLE
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if libc.mremap(address, length, length, flags, target) == _MAP_FAILED:
        error = _fail("mremap")
        unmap(start, room)
        raise error
    for gap, size in ((start, target - start), (target + length, start + room - target - length)):
        if size:
            unmap(gap, size)
    return int(target)


def unmap(address: int, length: int) -> None:
    """Remove a mapping; what only it referred to is given back."""
    if _libc().munmap(address, length):
        raise _fail("munmap")


def discard(address: int, length: int) -> None:
    """Give back the private copies of whole pages of a private mapping; the file shows through again."""
    if _libc().madvise(address, length, _MADV_DONTNEED):
        raise _fail("madvise")


def copy(source: int, target: int, length: int) -> None:
    """Copy bytes between addresses."""
    ctypes.memmove(target, source, length)


def zero(address: int, length: int) -> None:
    """Overwrite bytes with zeros."""
    ctypes.memset(address, 0, length)


class PageFile:
    """A file in memory from which ranges are taken, all zero, and given back.

    One file serves all sequences of a cache, so that many sequences need one file descriptor. It belongs to the
    process that made it: in a child after `os.fork` nothing is given back, as that would empty the parent's
    pages.

    Attributes:
        fd: The file descriptor.
    """

    def __init__(self, name: str = "kvcache") -> None:
        self.fd = _memory_file(name)
        self._pid = os.getpid()
        self._size = 0
        self._close = weakref.finalize(self, os.close, self.fd)
        self._close.atexit = False
        self._free: dict[int, list[int]] = {}

    def take(self, length: int) -> int:
        """Return the offset of a range of `length` bytes, a multiple of the page size, that reads as zeros."""
        reusable = self._free.get(length)
        if reusable:
            return reusable.pop()
        offset = self._size
        os.ftruncate(self.fd, offset + length)
        self._size = offset + length
        return offset

    def give_back(self, offset: int, length: int) -> None:
        """Give a range back that was taken."""
        self.punch(offset, length)
        self._free.setdefault(length, []).append(offset)

    def punch(self, offset: int, length: int) -> None:
        """Zero a range of bytes and give its whole pages back; private copies of them stay."""
        if os.getpid() != self._pid:
            return
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        while _libc().fallocate(self.fd, mode, offset, length):
            if ctypes.get_errno() != errno.EINTR:
                raise _fail("fallocate")

    @property
    def committed(self) -> int:
        """Bytes of memory the file takes now; 0 once it is closed."""
        return os.fstat(self.fd).st_blocks * 512 if self._close.alive else 0

    def close(self) -> None:
        """Close the descriptor. Mappings stay, so whoever needs `punch` closes after the last is gone."""
        self._close()


def _memory_file(name: str) -> int:
    create = getattr(os, "memfd_create", None)
    if create is None:
        raise OSError(errno.ENOSYS, "memfd_create is not available")
    try:
        return int(create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return int(create(name, os.MFD_CLOEXEC))  # a kernel before 6.3


@cache
def mapping_fault() -> str | None:
    """Return why sequences cannot live in mapped memory on this system, or None when they can.

    Tries the whole mechanism on one page, since sandboxes and emulated kernels leave out parts of it.
    """
    if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
        return "mapped memory needs 64-bit Linux"
    try:
        return None if _copy_on_write_works() else "this kernel's private mappings do not copy on write"
    except (OSError, AttributeError) as error:  # AttributeError: a C library without one of the calls
        return f"this system refuses what mapped memory needs: {error}"


def _copy_on_write_works() -> bool:
    file = PageFile("kvcache-probe")
    mapped: list[int] = []
    try:
        offset = file.take(PAGE)
        for private in (False, True, True):
            mapped.append(map_pages(file.fd, offset, PAGE, private=private))
        owner, fork = ((ctypes.c_ubyte * PAGE).from_address(address) for address in mapped[:2])
        owner[0] = 1
        fork[1] = fork[0] + 1
        works = fork[0] == 1 and owner[1] == 0
        file.punch(offset, PAGE)
        works &= owner[0] == 0 and fork[1] == 2
        discard(mapped[1], PAGE)
        owner[0] = 3
        works &= fork[0] == 3 and fork[1] == 0
        move(mapped.pop(), PAGE, mapped[0])  # from here on the owner is private too
        owner[0] = 4
        return works and fork[0] == 3
    finally:
        for address in mapped:
            unmap(address, PAGE)
        file.close()

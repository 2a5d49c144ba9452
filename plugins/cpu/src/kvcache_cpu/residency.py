"""Which pages of a range of addresses are really there, as the Linux kernel tells it."""

from __future__ import annotations

from array import array
from typing import NamedTuple

from kvcache_cpu.pages import PAGE

__all__ = ["Residency", "residency"]

_PRESENT = 1 << 63
_OF_FILE = 1 << 61


class Residency(NamedTuple):
    """Bytes of pages that this process has mapped in a range.

    Attributes:
        shared: Pages of the file, which other mappings may use too.
        private: Pages of this mapping alone: copies made when it was written.
    """

    shared: int
    private: int


def residency(address: int, length: int) -> Residency:
    """Count the pages in a page-aligned range, from `/proc/self/pagemap`.

    Exact by address, unlike `/proc/self/smaps`, in which neighbouring mappings may appear as one.
    """
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = array("Q", pagemap.read(length // PAGE * 8))
    present = [entry for entry in entries if entry & _PRESENT]
    shared = sum(1 for entry in present if entry & _OF_FILE)
    return Residency(shared * PAGE, (len(present) - shared) * PAGE)

"""Zeroed host memory that the system commits page by page, as it is touched."""

from __future__ import annotations

import mmap

import torch

__all__ = ["lazy_zeros"]


def lazy_zeros(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return `num_elements` zeros on the CPU, whose memory is taken only where it is written.

    `torch.zeros` writes every page at once. The memory lives as long as a tensor views it.

    Raises:
        OSError: The address space or the commit limit of the machine does not allow so much.
    """
    length = num_elements * dtype.itemsize
    if hasattr(mmap, "MAP_ANONYMOUS"):
        # Private, so that a forked child writes to its own pages; without a reservation of swap, which a budget
        # above the free memory would not get.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        memory = mmap.mmap(-1, length, flags=flags)
    else:
        memory = mmap.mmap(-1, length)
    return torch.frombuffer(memory, dtype=dtype)

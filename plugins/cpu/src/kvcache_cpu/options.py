"""The options of the CPU backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcache_core.plugin import BackendOptions

__all__ = ["CpuOptions", "MemoryKind"]

MemoryKind = Literal["auto", "mapped", "heap"]


class CpuOptions(BackendOptions):
    """Options of the CPU backend.

    Attributes:
        memory: Where sequences live. `"mapped"`: reserved virtual memory that the kernel fills page by page;
            appends never move data and forks share pages (Linux). `"heap"`: ordinary tensors that grow by
            doubling; a fork copies (every platform). `"auto"`: mapped where the platform can, else heap.
    """

    memory: MemoryKind = Field(
        default="auto",
        description="mapped (reserved virtual memory, forks share pages; Linux), heap (growing tensors, forks copy) "
        "or auto (mapped where the platform can)",
    )

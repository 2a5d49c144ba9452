"""The options of the CPU backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcache_core.plugin import BackendOptions

__all__ = ["AttentionKind", "CpuOptions", "MemoryKind"]

AttentionKind = Literal["auto", "native", "torch"]

MemoryKind = Literal["auto", "mapped", "heap"]


class CpuOptions(BackendOptions):
    """Options of the CPU backend.

    Attributes:
        memory: Where sequences live. `"mapped"`: reserved virtual memory that the kernel fills page by page;
            appends never move data and forks share pages (Linux). `"heap"`: ordinary tensors that grow by
            doubling; a fork copies (every platform). `"auto"`: mapped where the platform can, else heap.
        attention: What attends with few new tokens. `"native"`: the compiled kernel of this package; it has to be
            built, and serves head dims that are multiples of 8 in float32, bfloat16 and float16. `"torch"`: torch's
            own. `"auto"`: native where it can be, else torch. Long prefills are torch's in any case.
    """

    memory: MemoryKind = Field(
        default="auto",
        description="mapped (reserved virtual memory, forks share pages; Linux), heap (growing tensors, forks copy) "
        "or auto (mapped where the platform can)",
    )
    attention: AttentionKind = Field(
        default="auto",
        description="native (the compiled kernel, for decoding and short queries), torch, or auto (native where it "
        "was built and fits the model)",
    )

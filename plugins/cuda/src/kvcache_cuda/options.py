"""The options of the CUDA backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcache_core.plugin import BackendOptions

__all__ = ["CudaOptions", "KernelWish"]

KernelWish = Literal["auto", "flashinfer", "varlen", "reference"]


class CudaOptions(BackendOptions):
    """Options of the CUDA backend.

    Attributes:
        device: `"auto"` for the GPU that the configuration's `device` names, or the first; `"cpu"` runs the same code
            on the CPU, for tests and for machines without a GPU.
        kernel: What attends. `"auto"` takes the first of flashinfer, varlen and reference that fits.
        swap_blocks: Blocks in pinned host memory that sequences can be swapped out to; 0 for no swapping.
        check_tables: Whether every block table is checked on the host before a kernel reads it.
    """

    device: Literal["auto", "cpu"] = Field(
        default="auto",
        description="auto (the GPU) or cpu (the same code on the CPU, for tests and machines without a GPU)",
    )
    kernel: KernelWish = Field(
        default="auto",
        description="flashinfer (if installed), varlen (torch's own paged attention), reference (plain torch, exact) "
        "or auto (the first of them that fits)",
    )
    swap_blocks: int = Field(
        default=0,
        ge=0,
        le=2**31 - 1,
        description="blocks of pinned host memory that sequences can be swapped out to; 0 for no swapping",
    )
    check_tables: bool = Field(
        default=False, description="check every block table on the host before a kernel reads it, to find slips"
    )

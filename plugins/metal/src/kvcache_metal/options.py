"""The options of the Metal backend."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvcache_core.plugin import BackendOptions

__all__ = ["LARGEST_TENSOR", "GuardName", "MetalOptions"]

#: The functions of `kvcache_metal.guards`.
GuardName = Literal[
    "blocking_uploads",
    "bounded_tensors",
    "bucketed_lengths",
    "contiguous_operands",
    "equal_head_dims",
    "float_mask",
    "folded_heads",
    "whole_tensors",
]

#: Most bytes of a tensor that MPS computes with.
LARGEST_TENSOR = 2**32 - 1


class MetalOptions(BackendOptions):
    """Options of the Metal backend.

    Attributes:
        device: `"auto"` for the GPU; `"cpu"` runs the same code on the CPU, for tests and on other machines.
        max_tensor_bytes: Most bytes of a tensor of the pool; never more than 2^31 - 1 elements either.
        disable_guards: Guards to leave out, to try a torch in which their fault is mended. Results may be wrong.
    """

    device: Literal["auto", "cpu"] = Field(
        default="auto",
        description="auto (the GPU) or cpu (the same code on the CPU, for tests and machines without an Apple GPU)",
    )
    max_tensor_bytes: int = Field(
        default=LARGEST_TENSOR,
        ge=1,
        le=2**63 - 1,
        description="most bytes of one tensor of the pool, which has as many as it takes; MPS fails above 4 GiB",
    )
    disable_guards: tuple[GuardName, ...] = Field(
        default=(),
        description="guards against known faults of torch MPS to leave out, to try a torch that has mended them; "
        "results may be wrong",
    )

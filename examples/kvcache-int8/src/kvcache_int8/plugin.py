"""What kvcache-core finds through the entry point. Nothing here, and nothing imported here, imports torch."""

from __future__ import annotations

from kvcache_core.plugin import BackendDescriptor, HostInfo, hookimpl

__all__ = ["CAPABILITIES", "ROUND_TRIP_ERROR", "kvcache_backends"]

#: What the backend can do beyond the mandatory contract.
CAPABILITIES = frozenset({"unequal_head_dims"})

#: Half a step is 1/254 of a row's largest element, and rounding the scale adds 1/256 of that. Reading a row back in
#: the coarsest dtype, bfloat16, adds 1/256 of the element.
ROUND_TRIP_ERROR = 0.008


@hookimpl
def kvcache_backends(host: HostInfo) -> list[BackendDescriptor]:
    """Declare the `int8` backend."""
    return [
        BackendDescriptor(
            name="int8",
            interface=(1, 0),
            storage="kvcache_int8.storage:Int8Storage",
            summary="keys and values in 8 bits, with a scale for each token and head",
            placement="paged",
            devices=("cpu", "cuda", "mps"),
            dtypes=("bfloat16", "float16", "float32", "float64"),
            options="kvcache_int8.options:Int8Options",
            probe="kvcache_int8.probe:probe",
            capabilities=CAPABILITIES,
            priority=-100,  # it loses precision, so it is for those who ask for it
            round_trip_error=ROUND_TRIP_ERROR,
        )
    ]

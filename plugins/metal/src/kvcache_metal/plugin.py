"""What the entry point names: the declaration of the Metal backend. Imports nothing heavy."""

from __future__ import annotations

from kvcache_core.plugin import BackendDescriptor, HostInfo, hookimpl

__all__ = ["CAPABILITIES", "kvcache_backends"]

#: No `swap`: the host's memory is the GPU's, so that moving a sequence there would save nothing.
CAPABILITIES = frozenset({"unequal_head_dims"})


@hookimpl
def kvcache_backends(host: HostInfo) -> list[BackendDescriptor]:
    """Declare the `metal` backend."""
    return [
        BackendDescriptor(
            name="metal",
            interface=(1, 0),
            storage="kvcache_metal.storage:MetalStorage",
            summary="a pool of blocks on an Apple GPU, through torch MPS and around its known faults",
            placement="paged",
            devices=("mps", "cpu"),  # the CPU only where the options ask for it, see the probe
            dtypes=("bfloat16", "float16", "float32"),  # MPS has neither float64 nor arithmetic in fp8
            options="kvcache_metal.options:MetalOptions",
            probe="kvcache_metal.probe:probe",
            capabilities=CAPABILITIES,
            priority=90,
        )
    ]

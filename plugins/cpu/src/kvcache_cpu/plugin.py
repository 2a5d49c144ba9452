"""What the entry point names: the declaration of the CPU backend. Imports nothing heavy."""

from __future__ import annotations

from kvcache_core.plugin import BackendDescriptor, HostInfo, hookimpl

__all__ = ["kvcache_backends"]


@hookimpl
def kvcache_backends(host: HostInfo) -> list[BackendDescriptor]:
    """Declare the `cpu` backend."""
    return [
        BackendDescriptor(
            name="cpu",
            interface=(1, 0),
            storage="kvcache_cpu.storage:CpuStorage",
            summary="contiguous rows in reserved virtual memory, forks without copying",
            placement="contiguous",
            devices=("cpu",),
            dtypes=("float32", "bfloat16", "float16", "float64"),
            options="kvcache_cpu.options:CpuOptions",
            probe="kvcache_cpu.probe:probe",
            capabilities=frozenset({"unequal_head_dims"}),
            priority=0,
        )
    ]

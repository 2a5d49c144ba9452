"""What the entry point names: the declaration of the CUDA backend. Imports nothing heavy."""

from __future__ import annotations

from kvcache_core.plugin import BackendDescriptor, HostInfo, hookimpl

__all__ = ["CAPABILITIES", "kvcache_backends"]

CAPABILITIES = frozenset(
    {
        "export.flash_attn",
        "export.flashinfer",
        "export.varlen",
        "export.vllm",
        "graph_capture",
        "swap",
        "unequal_head_dims",
    }
)


@hookimpl
def kvcache_backends(host: HostInfo) -> list[BackendDescriptor]:
    """Declare the `cuda` backend."""
    return [
        BackendDescriptor(
            name="cuda",
            interface=(1, 0),
            storage="kvcache_cuda.storage:CudaStorage",
            summary="a pool of blocks on an NVIDIA GPU, read by paged attention kernels",
            placement="paged",
            devices=("cuda", "cpu"),  # the CPU only where the options ask for it, see the probe
            dtypes=("bfloat16", "float16", "float32", "float64"),
            options="kvcache_cuda.options:CudaOptions",
            probe="kvcache_cuda.probe:probe",
            capabilities=CAPABILITIES,
            priority=100,
        )
    ]

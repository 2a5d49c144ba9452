"""Whether the CPU backend can run here, answered without importing torch."""

from __future__ import annotations

from importlib.util import find_spec

from kvcache_core.plugin import Available, ProbeRequest, ProbeResult, Unavailable
from kvcache_cpu.native.library import level, native_fault
from kvcache_cpu.pages import mapping_fault

__all__ = ["probe"]


def probe(request: ProbeRequest) -> ProbeResult:
    """Return whether the configuration could run on this machine's CPU."""
    device_type, _, index = request.device.partition(":")
    if device_type not in ("auto", "cpu") or index not in ("", "0"):
        return Unavailable(
            code="other-device",
            reason=f"it serves the device 'cpu', not {request.device!r}",
            hint="set device to 'cpu' or 'auto'",
        )
    if find_spec("torch") is None:
        return Unavailable(code="torch-missing", reason="torch is not installed", hint="install torch 2.6 or newer")
    kind = request.options.memory
    fault = mapping_fault() if kind != "heap" else None
    if fault is not None and kind == "mapped":
        return Unavailable(
            code="no-mapped-memory",
            reason=f"options.memory is 'mapped', but {fault}",
            hint="set options.memory to 'auto' or 'heap'",
        )
    attention, no_kernel = request.options.attention, None
    if attention != "torch":
        no_kernel = native_fault(request.geometry, request.dtype)
    if no_kernel is not None and attention == "native":
        return Unavailable(
            code="no-native-attention",
            reason=f"options.attention is 'native', but {no_kernel}",
            hint="set options.attention to 'auto' or 'torch'",
        )
    memory = "heap memory: forks copy" if kind == "heap" or fault is not None else "mapped memory: forks share pages"
    attends = f"native attention ({level()})" if attention != "torch" and no_kernel is None else "torch's attention"
    return Available(device="cpu", detail="; ".join([_because(memory, fault), _because(attends, no_kernel)]))


def _because(what: str, why: str | None) -> str:
    return what if why is None else f"{what} ({why})"

"""Whether the int8 backend can run here, answered without importing torch."""

from __future__ import annotations

from importlib.util import find_spec

from kvcache_core.plugin import Available, ProbeRequest, ProbeResult, Unavailable

__all__ = ["probe"]


def probe(request: ProbeRequest) -> ProbeResult:
    """Return whether the configuration could run on this machine.

    It runs wherever torch does. Whether torch has a device other than the CPU is found out when the cache is opened.
    """
    if find_spec("torch") is None:
        return Unavailable(code="torch-missing", reason="torch is not installed", hint="pip install torch")
    device = "cpu" if request.device == "auto" else request.device
    return Available(device=device, detail="8 bits an element")

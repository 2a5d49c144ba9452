"""Which guards this Mac's torch still needs: `python -m plugins.metal.tests.still_needed`.

Runs each guard's scenario on the GPU, with it and without it, each in a process of its own, since a fault may end the
process. Buckets are counted by the stand-in alone: their scenario shows nothing here.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import torch

from kvcache_core.plugin import Available, ProbeRequest
from kvcache_metal.options import MetalOptions
from kvcache_metal.probe import probe
from kvcache_metal.storage import MetalStorage
from plugins.metal.tests.caches import DEVICE, OPTIONS, open_on_mps
from plugins.metal.tests.scenarios import SCENARIOS

__all__ = ["fits", "main"]

#: Bytes that the scenario of large tensors takes.
_LARGE = 12 << 30


def fits(guard: str) -> bool:
    """Whether this machine has the memory for a guard's scenario."""
    return guard != "bounded_tensors" or MetalStorage.device_memory(DEVICE, None).free > _LARGE


def main() -> int:
    """Print a line for each guard; 0 if there is a GPU to ask."""
    found = probe(ProbeRequest(options=MetalOptions(**OPTIONS)))
    if not isinstance(found, Available):
        print(f"metal: {found.reason}")
        return 1
    print(f"{found.detail}, torch {torch.__version__}\n")
    for guard in SCENARIOS:
        print(f"{guard:<20} {_verdict(guard)}", flush=True)
    return 0


def _verdict(guard: str) -> str:
    if not fits(guard):
        return "not tried: too little memory is free"
    failure = _failure(guard, "")
    if failure:
        return f"BROKEN: fails with the guard in force; {failure}"
    failure = _failure(guard, guard)
    return f"needed: {failure}" if failure else "no fault seen without it"


def _failure(guard: str, disabled: str) -> str:
    """How a scenario fails in a process of its own; an empty string if it does not."""
    program = f"from plugins.metal.tests.still_needed import run; run({guard!r}, {disabled!r})"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return "it hangs"
    if done.returncode == 0:
        return ""
    if done.returncode < 0:
        return f"the process ends by signal {-done.returncode}"
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return last[0][:100] or "it fails"


def run(guard: str, disabled: str) -> None:
    """Run a guard's scenario on the GPU, with all guards or without one."""
    SCENARIOS[guard](partial(open_on_mps, {"disable_guards": [disabled] if disabled else []}))


if __name__ == "__main__":
    sys.exit(main())

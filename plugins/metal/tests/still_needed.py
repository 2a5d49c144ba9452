"""Which guards this Mac's torch still needs: `python -m plugins.metal.tests.still_needed`.

Runs each guard's scenario on the GPU, with it and without it, each in a process of its own, since a fault may end the
process. What buckets save shows in the memory that the driver holds in the end.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import torch

from kvcache_core.budget import format_bytes
from kvcache_core.plugin import Available, ProbeRequest
from kvcache_metal.options import MetalOptions
from kvcache_metal.probe import probe
from kvcache_metal.storage import MetalStorage
from plugins.metal.tests.caches import DEVICE, DRY_RUN, OPTIONS, open_on_mps
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
    failure, memory = _try(guard, "")
    if failure:
        return f"BROKEN: fails with the guard in force; {failure}"
    failure, memory_without = _try(guard, guard)
    if failure:
        return f"needed: {failure}"
    if guard == "bucketed_lengths":
        return f"the driver holds {memory} in the end, and {memory_without} without it"
    return "no fault seen without it"


def _try(guard: str, disabled: str) -> tuple[str, str]:
    """How a scenario fails in a process of its own, an empty string if it does not; and the driver's memory."""
    program = f"from plugins.metal.tests.still_needed import run; run({guard!r}, {disabled!r})"
    try:
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return "it hangs", ""
    if done.returncode < 0:
        return f"the process ends by signal {-done.returncode}", ""
    if done.returncode > 0:
        last = done.stderr.strip().splitlines()[-1:] or [""]
        return last[0][:100] or "it fails", ""
    return "", done.stdout.strip()


def run(guard: str, disabled: str) -> None:
    """Run a scenario on the GPU, with all guards or without one, and print what the driver then holds."""
    SCENARIOS[guard](partial(open_on_mps, {"disable_guards": [disabled] if disabled else []}))
    print(format_bytes(0 if DRY_RUN else torch.mps.driver_allocated_memory()))


if __name__ == "__main__":
    sys.exit(main())

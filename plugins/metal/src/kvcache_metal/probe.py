"""Whether the Metal backend can run here. What can be answered without torch is answered first, and without it."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib.util import find_spec

from kvcache_core.plugin import Available, ProbeRequest, ProbeResult, Unavailable

__all__ = ["probe"]

#: The oldest macOS on which current torch offers MPS, and the first with bfloat16 there.
OLDEST_MACOS = (14, 0)


def probe(request: ProbeRequest) -> ProbeResult:
    """Return whether the configuration could run on this machine's Apple GPU, or on the CPU if the options say so."""
    device_type, _, index = request.device.partition(":")
    on_cpu = request.options.device == "cpu"
    if find_spec("torch") is None:
        return Unavailable(code="torch-missing", reason="torch is not installed", hint="install torch 2.6 or newer")
    if on_cpu:
        return _probe_cpu(request)
    if device_type not in ("auto", "mps") or index not in ("", "0"):
        return Unavailable(
            code="other-device",
            reason=f"it serves the device 'mps', not {request.device!r}",
            hint="set device to 'mps', or option device to 'cpu' to run its code on the CPU",
        )
    return _against_this_machine() or _against_this_torch() or _available()


def _probe_cpu(request: ProbeRequest) -> ProbeResult:
    if request.device.partition(":")[0] not in ("auto", "cpu"):
        return Unavailable(
            code="other-device",
            reason=f"option device is 'cpu' and the configuration's device is {request.device!r}",
            hint="set device to 'auto', or drop the option",
        )
    return Available(device="cpu", detail="on the CPU, as option device asks")


def _against_this_machine() -> Unavailable | None:
    if platform.system() != "Darwin":
        return Unavailable(
            code="not-macos",
            reason=f"Metal is part of macOS, and this is {platform.system() or sys.platform}",
            hint="option device 'cpu' runs the same code on the CPU",
        )
    if platform.machine() != "arm64":
        if _translated():
            return Unavailable(
                code="not-apple-silicon",
                reason="this Python is built for Intel and runs under Rosetta",
                hint="install a Python and a torch for arm64",
            )
        return Unavailable(
            code="not-apple-silicon",
            reason=f"it needs Apple silicon, and this Mac has a processor of type {platform.machine()}",
            hint="option device 'cpu' runs the same code on the CPU",
        )
    version = _macos_version()
    if version is not None and version < OLDEST_MACOS:
        return Unavailable(
            code="macos-too-old",
            reason=f"it needs macOS {_text(OLDEST_MACOS)} or newer, and this is {_text(version)}",
            hint="update macOS",
        )
    return None


def _against_this_torch() -> Unavailable | None:
    # Only torch knows, and nothing before has ruled it out. This finds the GPU and asks nothing of it.
    import torch  # noqa: PLC0415 - takes a second; see above

    if not torch.backends.mps.is_built():
        return Unavailable(
            code="torch-without-mps",
            reason=f"torch {torch.__version__} is built without MPS",
            hint="install a build of torch with MPS, such as the one on PyPI",
        )
    if not torch.backends.mps.is_available():
        return Unavailable(
            code="no-device",
            reason=f"torch {torch.__version__} finds no Metal device",
            hint="virtual machines and some sandboxes have none",
        )
    return None


def _available() -> Available:
    chip = _sysctl("machdep.cpu.brand_string") or "Apple GPU"
    version = _macos_version()
    where = f"{chip}, macOS {_text(version)}" if version else chip
    return Available(device="mps:0", detail=f"{where}; this backend is not yet confirmed on hardware")


def _macos_version() -> tuple[int, int] | None:
    """The version of macOS, or None where the system only tells the one it pretends to be for old programs."""
    numbers = platform.mac_ver()[0].split(".")
    try:
        version = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
    except ValueError:
        return None
    return None if version == (10, 16) else version


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _translated() -> bool:
    return _sysctl("sysctl.proc_translated") == "1"


def _sysctl(name: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - the names are fixed
            ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()

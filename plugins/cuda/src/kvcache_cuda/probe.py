"""Whether the CUDA backend can run here, answered without importing torch and without starting CUDA."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from kvcache_core.plugin import Available, ProbeRequest, ProbeResult, Unavailable
from kvcache_cuda.devices import DriverProblem, Gpu, visible_gpus
from kvcache_cuda.kernels import KernelReport, Situation, judge

__all__ = ["probe"]

_INSTALL_TORCH = "install a CUDA build of torch (https://pytorch.org/get-started)"


def probe(request: ProbeRequest) -> ProbeResult:
    """Return whether the configuration could run on a GPU of this machine, or on the CPU if the options say so."""
    device_type, _, index = request.device.partition(":")
    if find_spec("torch") is None:
        return Unavailable(code="torch-missing", reason="torch is not installed", hint=_INSTALL_TORCH)
    if request.options.device == "cpu":
        return _probe_cpu(request)
    if device_type not in ("auto", "cuda"):
        return Unavailable(
            code="other-device",
            reason=f"it serves CUDA devices, not {request.device!r}",
            hint="set device to 'cuda', or option device to 'cpu' to run its code on the CPU",
        )
    build = _TorchBuild.installed()
    if build.cuda is None:
        kind = "for ROCm" if build.hip else "without CUDA"
        return Unavailable(
            code="torch-without-cuda", reason=f"torch {build.version} is built {kind}", hint=_INSTALL_TORCH
        )
    try:
        gpus = visible_gpus()
    except DriverProblem as problem:
        return Unavailable(code=problem.code, reason=str(problem), hint="install the NVIDIA driver, or mend it")
    number = int(index or 0)
    if number >= len(gpus):
        return Unavailable(
            code="no-device",
            reason=f"there is no GPU cuda:{number}; {len(gpus)} can be seen",
            hint="see nvidia-smi, and the environment variable CUDA_VISIBLE_DEVICES",
        )
    report = _judge(request, build, gpus[number])
    if report.chosen is None:
        return _kernel_unavailable(report)
    return Available(device=f"cuda:{number}", detail=f"{gpus[number].name}, {report}", block_size=report.block_size)


def _probe_cpu(request: ProbeRequest) -> ProbeResult:
    if request.device.partition(":")[0] not in ("auto", "cpu"):
        return Unavailable(
            code="other-device",
            reason=f"option device is 'cpu' and the configuration's device is {request.device!r}",
            hint="set device to 'auto', or drop the option",
        )
    report = _judge(request, _TorchBuild.installed(), None)
    if report.chosen is None:
        return _kernel_unavailable(report)
    return Available(device="cpu", detail=f"on the CPU, as option device asks, {report}", block_size=report.block_size)


def _kernel_unavailable(report: KernelReport) -> Unavailable:
    reason = next(verdict.reason for verdict in report.verdicts if verdict.name == report.wish)
    return Unavailable(
        code="kernel-unavailable",
        reason=f"option kernel is {report.wish!r}, but {reason}",
        hint="set option kernel to 'auto', or change what it does not fit",
    )


def _judge(request: ProbeRequest, build: _TorchBuild, gpu: Gpu | None) -> KernelReport:
    return judge(
        request.options.kernel,
        Situation(
            device_type="cpu" if gpu is None else "cuda",
            compute_capability=None if gpu is None else gpu.compute_capability,
            torch_version=build.release,
            has_flashinfer=find_spec("flashinfer") is not None,
            dtype=request.dtype,
            block_size=request.block_size,
            geometry=request.geometry,
        ),
    )


class _TorchBuild:
    """What the installed torch says about itself in `torch/version.py`, which is read and not run.

    Attributes:
        version: Its version.
        cuda: The CUDA version it is built for, or None.
        hip: The ROCm version it is built for, or None.
    """

    def __init__(self, text: str) -> None:
        said = dict(re.findall(r"^(\w+)(?:\s*:[^=\n]+)?\s*=\s*(?:'([^']*)'|None)", text, re.MULTILINE))
        self.version = said.get("__version__") or "0.0"
        self.cuda = said.get("cuda") or None
        self.hip = said.get("hip") or None

    @property
    def release(self) -> tuple[int, int]:
        """Major and minor."""
        major, minor = re.findall(r"\d+", self.version)[:2]
        return int(major), int(minor)

    @classmethod
    def installed(cls) -> _TorchBuild:
        spec = find_spec("torch")
        folders = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
        for folder in folders:
            file = Path(folder, "version.py")
            if file.is_file():
                return cls(file.read_text(encoding="utf-8"))
        return cls("")

"""The GPUs of this machine, asked of the driver's management library, which starts nothing on them.

CUDA itself cannot be used in a forked child once the parent has started it, so that looking for a GPU must not.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pynvml

__all__ = ["DriverProblem", "Gpu", "visible_gpus"]


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        uuid: Its UUID.
        name: Its product name.
        compute_capability: Major and minor.
    """

    uuid: str
    name: str
    compute_capability: tuple[int, int]


class DriverProblem(Exception):
    """The driver cannot be asked.

    Attributes:
        code: `"no-driver"` or `"driver-error"`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[Gpu]:
    """Return the GPUs that CUDA would see, in the driver's order.

    Raises:
        DriverProblem: The NVIDIA driver is not installed, or does not answer.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        raise DriverProblem("no-driver", "the NVIDIA driver is not installed") from None
    except pynvml.NVMLError as error:
        raise DriverProblem("driver-error", f"the NVIDIA driver does not answer: {error}") from None
    try:
        gpus = [_describe(number) for number in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError as error:
        raise DriverProblem("driver-error", f"the NVIDIA driver does not describe its GPUs: {error}") from None
    finally:
        pynvml.nvmlShutdown()
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if chosen is None else list(_select(gpus, chosen))


def _describe(number: int) -> Gpu:
    device = pynvml.nvmlDeviceGetHandleByIndex(number)
    return Gpu(
        uuid=_text(pynvml.nvmlDeviceGetUUID(device)),
        name=_text(pynvml.nvmlDeviceGetName(device)),
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(device)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _select(gpus: list[Gpu], chosen: str) -> Iterable[Gpu]:
    """Yield what a list of indices or (shortened) UUIDs names; as CUDA does, up to the first that names nothing.

    A slice of a GPU is named by `MIG-...`; it counts as one GPU, of the kind of the first.
    """
    for word in (part.strip() for part in chosen.split(",")):
        if word.startswith("MIG-"):
            found = gpus[:1]
        elif word.isdigit():
            found = gpus[int(word) : int(word) + 1]
        else:
            found = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)][:1]
        if not found:
            return
        yield from found

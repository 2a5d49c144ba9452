"""Which attention kernels fit a configuration, and why the others do not. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvcache_core.geometry import CacheGeometry
from kvcache_cuda.options import KernelWish

__all__ = ["KernelName", "KernelReport", "Situation", "Verdict", "judge"]

KernelName = Literal["flashinfer", "varlen", "reference"]

#: Stock FlashAttention 2 reads pages of a multiple of so many tokens.
FA2_BLOCK_MULTIPLE = 256
#: The block size of kernels that take any: small enough to waste little, large enough to read well.
USUAL_BLOCK_SIZE = 16

_HALF = ("bfloat16", "float16")
_VARLEN_SINCE = (2, 13)
_AMPERE = (8, 0)
_FLASHINFER_DIMS = (64, 128, 256)
_FA2_LARGEST_DIM = 256
_FA2_DIM_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What decides which kernels fit.

    Attributes:
        device_type: `"cuda"` or `"cpu"`.
        compute_capability: Of the GPU, such as `(9, 0)`; None on the CPU.
        torch_version: Major and minor.
        has_flashinfer: Whether FlashInfer is installed.
        dtype: Stored dtype by torch's name.
        block_size: Tokens per block, or None where a kernel may choose.
        geometry: What is cached, or None where it is not known yet.
    """

    device_type: str
    compute_capability: tuple[int, int] | None
    torch_version: tuple[int, int]
    has_flashinfer: bool
    dtype: str
    block_size: int | None
    geometry: CacheGeometry | None


@dataclass(frozen=True)
class Verdict:
    """Whether a kernel fits.

    Attributes:
        name: The kernel.
        fits: Whether it does.
        reason: Why not, or what speaks for it, as a phrase.
    """

    name: KernelName
    fits: bool
    reason: str


@dataclass(frozen=True)
class KernelReport:
    """The kernel that is used, and what was found out about all of them.

    Attributes:
        chosen: The kernel that is used, or None if the one asked for does not fit.
        wish: What was asked for.
        verdicts: Every kernel, preferred ones first.
    """

    chosen: Verdict | None
    wish: KernelWish
    verdicts: tuple[Verdict, ...]

    @property
    def block_size(self) -> int:
        """The block size that suits the chosen kernel."""
        return FA2_BLOCK_MULTIPLE if self.chosen and self.chosen.name == "varlen" else USUAL_BLOCK_SIZE

    def __str__(self) -> str:
        others = "; ".join(f"{v.name}: {v.reason}" for v in self.verdicts if v is not self.chosen and not v.fits)
        if self.chosen is None:
            return f"kernel {self.wish} does not fit: {others}"
        return f"kernel {self.chosen.name}: {self.chosen.reason}{f' ({others})' if others else ''}"


def judge(wish: KernelWish, situation: Situation) -> KernelReport:
    """Choose a kernel."""
    verdicts = (
        _verdict("flashinfer", _against_flashinfer(situation), "paged kernels of FlashInfer"),
        _verdict("varlen", _against_varlen(situation), "torch's own varlen_attn, FlashAttention 2"),
        Verdict("reference", True, "plain torch, exact on every device"),
    )
    chosen = next((verdict for verdict in verdicts if verdict.fits and wish in ("auto", verdict.name)), None)
    return KernelReport(chosen, wish, verdicts)


def _verdict(name: KernelName, against: Iterator[str], merit: str) -> Verdict:
    reason = next(against, None)
    return Verdict(name, reason is None, reason or merit)


def _against_flashinfer(situation: Situation) -> Iterator[str]:
    yield from _against_gpu_kernels(situation)
    if not situation.has_flashinfer:
        yield "flashinfer is not installed"
    for dim in _head_dims(situation):
        if dim not in _FLASHINFER_DIMS:
            yield f"it reads head_dim {', '.join(map(str, _FLASHINFER_DIMS))}, not {dim}"


def _against_varlen(situation: Situation) -> Iterator[str]:
    yield from _against_gpu_kernels(situation)
    if situation.torch_version < _VARLEN_SINCE:
        yield f"it takes block tables since torch 2.13, and this is {'.'.join(map(str, situation.torch_version))}"
    for dim in _head_dims(situation):
        if dim > _FA2_LARGEST_DIM or dim % _FA2_DIM_MULTIPLE:
            yield f"it reads a head_dim of up to 256 and a multiple of 8, not {dim}"
    if situation.block_size is not None and situation.block_size % FA2_BLOCK_MULTIPLE:
        yield f"it reads blocks of a multiple of 256 tokens, not {situation.block_size}"


def _against_gpu_kernels(situation: Situation) -> Iterator[str]:
    if situation.device_type != "cuda":
        yield "it runs on the GPU only"
    capability = situation.compute_capability
    if capability is not None and capability < _AMPERE:
        yield f"it needs compute capability 8.0, and this GPU has {'.'.join(map(str, capability))}"
    if situation.dtype not in _HALF:
        yield f"it reads bfloat16 and float16, not {situation.dtype}"
    for group in situation.geometry.groups if situation.geometry else ():
        if group.head_dim != group.value_head_dim:
            yield f"it needs equal dims of K and V, not {group.head_dim} and {group.value_head_dim}"


def _head_dims(situation: Situation) -> list[int]:
    return sorted({group.head_dim for group in situation.geometry.groups}) if situation.geometry else []

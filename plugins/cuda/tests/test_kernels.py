"""Which kernel fits, and the words for why not."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache_core import CacheGeometry
from kvcache_cuda.kernels import KernelReport, Situation, judge


def report(wish: Any = "auto", **changes: Any) -> KernelReport:
    """The judgement for an H100 with stock torch 2.13, bfloat16 and blocks of 256."""
    values: dict[str, Any] = {
        "device_type": "cuda",
        "compute_capability": (9, 0),
        "torch_version": (2, 13),
        "has_flashinfer": False,
        "dtype": "bfloat16",
        "block_size": 256,
        "geometry": CacheGeometry.uniform(2, 8, 128),
    }
    return judge(wish, Situation(**values | changes))


def chosen(made: KernelReport) -> str | None:
    return made.chosen.name if made.chosen else None


def reason(made: KernelReport, name: str) -> str:
    return next(verdict.reason for verdict in made.verdicts if verdict.name == name)


def test_auto_prefers_flashinfer_then_torchs_own_then_the_reference() -> None:
    assert chosen(report(has_flashinfer=True)) == "flashinfer"
    assert chosen(report()) == "varlen"
    assert chosen(report(dtype="float32")) == "reference"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"device_type": "cpu", "compute_capability": None}, "on the GPU only"),
        ({"compute_capability": (7, 5)}, "compute capability 8.0, and this GPU has 7.5"),
        ({"torch_version": (2, 12)}, "since torch 2.13, and this is 2.12"),
        ({"dtype": "float64"}, "bfloat16 and float16, not float64"),
        ({"block_size": 16}, "a multiple of 256 tokens, not 16"),
        ({"block_size": 128}, "not 128"),
        ({"geometry": CacheGeometry.uniform(1, 1, 288)}, "up to 256 and a multiple of 8, not 288"),
        ({"geometry": CacheGeometry.uniform(1, 1, 84)}, "multiple of 8, not 84"),
        ({"geometry": CacheGeometry.uniform(1, 1, 128, value_head_dim=64)}, "equal dims of K and V, not 128 and 64"),
    ],
)
def test_what_varlen_does_not_fit_goes_to_the_reference_with_a_reason(changes: dict[str, Any], word: str) -> None:
    made = report(**changes)
    assert chosen(made) == "reference"
    assert word in reason(made, "varlen")
    assert word in str(made)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"has_flashinfer": False}, "not installed"),
        ({"geometry": CacheGeometry.uniform(1, 1, 80)}, "head_dim 64, 128, 256, not 80"),
        ({"dtype": "float32"}, "not float32"),
    ],
)
def test_what_flashinfer_does_not_fit_has_a_reason(changes: dict[str, Any], word: str) -> None:
    made = report(**{"has_flashinfer": True, **changes})
    assert chosen(made) != "flashinfer"
    assert word in reason(made, "flashinfer")


@pytest.mark.parametrize("size", [1, 8, 16, 24, 32, 48, 64, 100, 128, 256])
def test_flash_attention_1579_every_block_size_has_a_kernel_that_reads_it(size: int) -> None:
    assert chosen(report(block_size=size)) == ("varlen" if size == 256 else "reference")
    assert chosen(report(block_size=size, has_flashinfer=True)) == "flashinfer"


def test_an_open_block_size_follows_the_kernel() -> None:
    assert report(block_size=None).block_size == 256
    assert report(block_size=None, has_flashinfer=True).block_size == 16
    assert report(block_size=None, dtype="float32").block_size == 16


@pytest.mark.parametrize("wish", ["flashinfer", "varlen"])
def test_a_kernel_that_was_asked_for_is_never_replaced_by_another(wish: str) -> None:
    made = report(wish, dtype="float32", has_flashinfer=True)
    assert made.chosen is None
    assert str(made).startswith(f"kernel {wish} does not fit")


def test_the_reference_can_be_asked_for_where_others_fit() -> None:
    assert chosen(report("reference", has_flashinfer=True)) == "reference"


def test_an_unknown_geometry_speaks_against_nothing() -> None:
    assert chosen(report(geometry=None, block_size=None, has_flashinfer=True)) == "flashinfer"

"""The suite of decode attention."""

import pytest
import torch

from kvcache_core.bench import vllm_attention
from kvcache_core.bench.figures import Figure
from kvcache_core.bench.run import run_suites
from kvcache_core.bench.session import Bench


def test_a_quick_run_compares_attention_with_torch_and_with_reading() -> None:
    report = run_suites(["attend"], Bench(quick=True))
    assert report.skipped == {}
    names = [figure.name for figure in report.figures["attend"]]
    assert {"9/3/64 bfloat16, 1 x 200: attend", "9/3/64 bfloat16, 1 x 200: SDPA folded, of ours"} <= set(names)
    assert any(name.startswith("9/3/64 float32, 3 ragged") for name in names)
    assert all(isinstance(figure, Figure) and figure.value > 0 for figure in report.figures["attend"])
    (series,) = report.series["attend"]
    assert {"kvcache-core", "SDPA enable_gqa", "SDPA folded"} <= set(series.lines)


def test_a_machine_without_vllm_has_no_call_of_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_attention, "find_spec", lambda name: None)
    vllm_attention._load.cache_clear()
    rows = torch.randn(4, 1, 32)
    assert vllm_attention.vllm_decode(torch.randn(1, 2, 32), [(rows, rows)], 1.0) is None
    vllm_attention._load.cache_clear()

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from kvcache_core.plugin import Available, ProbeRequest, Unavailable
from kvcache_cpu import probe as module
from kvcache_cpu.options import CpuOptions
from kvcache_cpu.probe import probe


def ask(memory: Any = "auto", device: str = "auto") -> Available | Unavailable:
    return probe(ProbeRequest(options=CpuOptions(memory=memory), device=device))


@pytest.mark.parametrize("device", ["auto", "cpu", "cpu:0"])
@pytest.mark.parametrize("memory", ["auto", "heap"])
def test_it_runs_on_the_cpu(memory: str, device: str) -> None:
    answer = ask(memory, device)
    assert isinstance(answer, Available)
    assert answer.device == "cpu"
    assert answer.detail


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", "cpu:1", "cpux"])
def test_it_does_not_claim_another_device(device: str) -> None:
    answer = ask(device=device)
    assert isinstance(answer, Unavailable)
    assert answer.code == "other-device"
    assert repr(device) in answer.reason


def test_mapped_memory_that_this_system_lacks_is_refused_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mapping_fault", lambda: "mapped memory needs 64-bit Linux")
    answer = ask("mapped")
    assert isinstance(answer, Unavailable)
    assert answer.code == "no-mapped-memory"
    assert "64-bit Linux" in answer.reason
    assert "heap" in answer.hint


def test_auto_says_that_it_fell_back_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "mapping_fault", lambda: "mapped memory needs 64-bit Linux")
    answer = ask("auto")
    assert isinstance(answer, Available)
    assert "heap" in answer.detail
    assert "64-bit Linux" in answer.detail


def test_a_machine_without_torch_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "torch" else find(name))
    answer = ask()
    assert isinstance(answer, Unavailable)
    assert answer.code == "torch-missing"

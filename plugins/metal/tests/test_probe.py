"""The probe's answers, each with a stable code, and torch is asked last."""

from __future__ import annotations

import platform
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache_core import CacheGeometry, open_cache
from kvcache_core.errors import BackendUnavailableError, NoBackendAvailableError
from kvcache_core.plugin import Available, ProbeRequest, Unavailable
from kvcache_metal import probe as module
from kvcache_metal.options import MetalOptions
from kvcache_metal.probe import probe

GEOMETRY = CacheGeometry.uniform(2, 8, 128)


def ask(options: dict[str, Any] | None = None, **request: Any) -> Any:
    return probe(ProbeRequest(options=MetalOptions(**options or {}), **request))


class NoTorch:
    """Stands where torch would be imported from."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("torch was asked")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Mac, and a way to change that."""

    def set_up(
        system: str = "Darwin",
        processor: str = "arm64",
        macos: str = "15.3.1",
        translated: str = "0",
        has_torch: bool = True,
        built: bool = True,
        available: bool = True,
        asks_torch: bool = False,
    ) -> None:
        said = {"sysctl.proc_translated": translated, "machdep.cpu.brand_string": "Apple M4 Pro"}
        mps = SimpleNamespace(is_built=lambda: built, is_available=lambda: available)
        torch = SimpleNamespace(__version__="2.13.0", backends=SimpleNamespace(mps=mps))
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "machine", lambda: processor)
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), processor))
        monkeypatch.setattr(module, "_sysctl", lambda name: said[name])
        monkeypatch.setattr(module, "find_spec", lambda name: object() if has_torch else None)
        monkeypatch.setitem(sys.modules, "torch", torch if asks_torch else NoTorch())

    set_up(asks_torch=True)
    return set_up


def test_a_mac_is_named_and_said_to_be_unconfirmed(machine: Any) -> None:
    found = ask()
    assert isinstance(found, Available)
    assert found.device == "mps:0"
    assert found.detail.startswith("Apple M4 Pro, macOS 15.3; ")
    assert "not yet confirmed on hardware" in found.detail
    assert ask(device="mps") == ask(device="mps:0") == found


@pytest.mark.parametrize(
    ("state", "request_", "code", "word"),
    [
        ({"has_torch": False}, {}, "torch-missing", "not installed"),
        ({"system": "Linux", "processor": "x86_64"}, {}, "not-macos", "this is Linux"),
        ({"system": "Windows", "processor": "AMD64"}, {}, "not-macos", "this is Windows"),
        ({"processor": "x86_64"}, {}, "not-apple-silicon", "processor of type x86_64"),
        ({"processor": "x86_64", "translated": "1"}, {}, "not-apple-silicon", "under Rosetta"),
        ({"macos": "13.7.4"}, {}, "macos-too-old", "needs macOS 14.0 or newer, and this is 13.7"),
        ({"macos": "12"}, {}, "macos-too-old", "this is 12.0"),
        ({"built": False, "asks_torch": True}, {}, "torch-without-mps", "torch 2.13.0 is built without MPS"),
        ({"available": False, "asks_torch": True}, {}, "no-device", "no Metal device"),
        ({}, {"device": "mps:1"}, "other-device", "'mps:1'"),
        ({}, {"device": "cpu"}, "other-device", "'cpu'"),
        ({}, {"device": "cuda"}, "other-device", "'cuda'"),
    ],
)
def test_what_is_missing_has_a_code_a_reason_and_a_hint(
    machine: Any, state: dict[str, Any], request_: dict[str, Any], code: str, word: str
) -> None:
    machine(**state)
    found = ask(**request_)
    assert isinstance(found, Unavailable)
    assert found.code == code
    assert word in found.reason
    assert found.hint


@pytest.mark.parametrize("macos", ["14.0", "15", "26.4.1", "16.0", "10.16", ""])
def test_a_version_that_is_new_enough_or_not_told_is_left_to_torch(machine: Any, macos: str) -> None:
    machine(macos=macos, asks_torch=True)
    assert isinstance(ask(), Available)


def test_the_cpu_is_used_when_the_options_say_so(machine: Any) -> None:
    machine(system="Linux")
    assert ask({"device": "cpu"}).device == "cpu"
    assert ask({"device": "cpu"}, device="cpu").device == "cpu"
    assert ask({"device": "cpu"}, device="mps").code == "other-device"


@pytest.mark.parametrize(
    "failure", [FileNotFoundError("sysctl"), subprocess.TimeoutExpired("sysctl", 5)], ids=["missing", "slow"]
)
def test_a_system_that_does_not_tell_its_chip_is_no_obstacle(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def run(*arguments: Any, **keywords: Any) -> Any:
        raise failure

    monkeypatch.setattr(subprocess, "run", run)
    assert module._sysctl("machdep.cpu.brand_string") == ""


# -- through core ------------------------------------------------------------------------------------------


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")


def test_a_missing_gpu_is_no_cpu_in_disguise(linux: None) -> None:
    with pytest.raises(BackendUnavailableError, match="Metal is part of macOS") as caught:
        open_cache(backend="metal", geometry=GEOMETRY)
    assert caught.value.code == "not-macos"
    with pytest.raises(BackendUnavailableError, match="option device to 'cpu'"):
        open_cache(backend="metal", geometry=GEOMETRY, device="cpu")
    with open_cache(backend="metal", geometry=GEOMETRY, device="cpu", budget="4 blocks", options={"device": "cpu"}):
        pass


def test_auto_passes_over_a_missing_gpu_quietly(linux: None) -> None:
    with pytest.raises(NoBackendAvailableError, match="Metal is part of macOS"):
        open_cache(geometry=GEOMETRY, disable=["cpu", "cuda"])

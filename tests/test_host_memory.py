from __future__ import annotations

from pathlib import Path

import pytest

from kvcache_core import host_memory as host
from kvcache_core.host_memory import host_memory
from kvcache_cpu.storage import CpuStorage


def control_group(tmp_path: Path, membership: str, files: dict[str, str]) -> list[tuple[int, int]]:
    (tmp_path / "cgroup").write_text(membership)
    for name, text in files.items():
        path = tmp_path / "fs" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return list(host._group_limits(tmp_path / "cgroup", tmp_path / "fs"))


def test_the_machine_has_memory_and_not_more_free_than_it_has() -> None:
    memory = host_memory()
    assert 0 < memory.free <= memory.total
    assert CpuStorage.device_memory("cpu", None).total == memory.total


def test_limits_of_version_2_groups_and_of_those_above_them_count(tmp_path: Path) -> None:
    files = {
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "7\n",
        "a/memory.max": "1000\n",
        "a/memory.current": "400\n",
    }
    assert control_group(tmp_path, "0::/a/b\n", files) == [(1000, 400)]


def test_limits_of_version_1_groups_count(tmp_path: Path) -> None:
    files = {"memory/job/memory.limit_in_bytes": "512\n", "memory/job/memory.usage_in_bytes": "100\n"}
    assert control_group(tmp_path, "5:cpu:/x\n4:memory:/job\n", files) == [(512, 100)]


def test_a_group_that_is_mounted_at_the_top_counts_although_its_path_is_the_hosts(tmp_path: Path) -> None:
    files = {"memory.max": "2048\n", "memory.current": "1\n"}
    assert control_group(tmp_path, "0::/docker/0123\n", files) == [(2048, 1)]


def test_a_path_that_leads_outside_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1")
    assert control_group(tmp_path, "0::/../\n", {"x": ""}) == []


def test_a_group_limit_lowers_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_machine_memory", lambda: (1000, 800))
    monkeypatch.setattr(host, "_group_limits", lambda: iter([(500, 100), (900, 850)]))
    assert host_memory().total == 500
    assert host_memory().free == 50
    monkeypatch.setattr(host, "_group_limits", lambda: iter([(500, 600)]))
    assert host_memory().free == 0


def test_a_system_without_proc_reports_all_memory_as_free(tmp_path: Path) -> None:
    assert host._available(tmp_path / "missing", 77) == 77
    assert list(host._group_limits(tmp_path / "missing", tmp_path)) == []

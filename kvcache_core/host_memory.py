"""How much memory this machine has, as far as this process may use it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from kvcache_core.storage import DeviceMemory

__all__ = ["host_memory"]


def host_memory() -> DeviceMemory:
    """Return the memory of the machine, or of the control group this process is confined to."""
    total, free = _machine_memory()
    for limit, used in _group_limits():
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return DeviceMemory(total=total, free=free)


def _machine_memory() -> tuple[int, int]:
    if sys.platform == "win32":
        return _windows_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return total, _available(Path("/proc/meminfo"), total)


def _available(meminfo: Path, total: int) -> int:
    """Memory that can be had without swapping; all of it where the system does not tell."""
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux, or /proc is not mounted
    return total


def _group_limits(
    membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[int, int]]:
    """Yield limit and present use in bytes of each control group, of either version, that has a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return  # not Linux, or /proc is not mounted
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            top, limit_name, use_name = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit_name, use_name = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path is often that of the host, or leads out of it; the group is then mounted at the top.
        group = top if ".." in Path(path).parts else top / path.lstrip("/")
        for folder in dict.fromkeys((group, *group.parents, top)):
            if folder == top or top in folder.parents:
                limit, use = _number(folder / limit_name), _number(folder / use_name)
                if limit is not None:
                    yield limit, use or 0


def _number(file: Path) -> int | None:
    """The number in a file; None for no such file, or for the word "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _windows_memory() -> tuple[int, int]:
    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_ulong),
            ("load", ctypes.c_ulong),
            ("total", ctypes.c_ulonglong),
            ("available", ctypes.c_ulonglong),
            ("rest", ctypes.c_ulonglong * 5),
        )

    status = Status(length=ctypes.sizeof(Status))
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # type: ignore[attr-defined,unused-ignore]
    return int(status.total), int(status.available)

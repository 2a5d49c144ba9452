"""What runs in the child process of `kvcache conformance`: pytest over the kit, telling the parent how it goes.

This is no part of `kvcache_core.testing`, since pytest has to be running when the kit is imported for a failing
assertion to show its values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import pytest

__all__ = ["main"]

_MODULE = "kvcache_core.testing.installed"
_CLASS = "TestBackend"


def main(task: Mapping[str, Any]) -> None:
    """Run the kit on the subject that `task` describes, and write a line of JSON for everything that happens.

    The process ends at once, without the exit handlers and threads that a plugin may have left behind.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what the backend prints is no part of the answer
    folder = Path(task["folder"])
    settings = folder / "pytest.ini"
    settings.write_text("[pytest]\n", encoding="utf-8")
    spec = find_spec(_MODULE.rpartition(".")[0])
    places = spec.submodule_search_locations if spec else None
    module = Path(next(iter(places or ())), f"{_MODULE.rpartition('.')[2]}.py")
    arguments = [str(module), "-c", str(settings), "--rootdir", str(folder), "--noconftest"]
    arguments += ["-p", "no:cacheprovider", "-p", "no:terminal"]
    if task["select"]:
        arguments += ["-k", task["select"]]
    status = pytest.main(arguments, plugins=[_Telling(out, task["subject"])])
    _tell(out, "ended", status=pytest.ExitCode(status).name)
    out.flush()
    os._exit(0)


def _tell(out: IO[str], kind: str, **facts: Any) -> None:
    out.write(json.dumps({"kind": kind, **facts}) + "\n")


class _Telling:
    """A pytest plugin that gives the collected class its declarations, and passes on what happens."""

    def __init__(self, out: IO[str], subject: Mapping[str, Any]) -> None:
        self._out = out
        self._subject = subject
        self._groups: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    def pytest_pycollect_makeitem(self, name: str, obj: Any) -> None:
        """Declare what the backend declares."""
        if name != _CLASS:
            return
        for field in ("backend", "device", "block_size", "round_trip_error"):
            setattr(obj, field, self._subject[field])
        obj.dtypes = tuple(self._subject["dtypes"])
        obj.block_sizes = tuple(self._subject["block_sizes"])
        obj.capabilities = frozenset(self._subject["capabilities"])
        obj.options = self._subject["options"]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Say what kept the kit from being imported."""
        if report.failed:
            _tell(self._out, "failed", reason=f"the kit cannot be collected: {_crash(report)}")

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Let `-k` choose whole parts of the kit, too."""
        item.extra_keyword_matches.add(_group(item))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Say what will run."""
        for item in session.items:
            name = _group(item)
            if name not in self._groups.values():
                summary = (_owner(item).__doc__ or "").strip().splitlines()[0]
                _tell(self._out, "group", name=name, summary=summary)
            self._groups[item.nodeid] = name
            self._names[item.nodeid] = item.name
        _tell(self._out, "planned", count=len(session.items))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Say which test begins."""
        _tell(self._out, "begins", name=self._names[nodeid])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Say how a test went, once its last part is over or a part of it has failed."""
        node = report.nodeid
        self._seconds[node] = self._seconds.get(node, 0.0) + report.duration
        if report.when != "call" and report.passed:
            return
        reason = _skip_reason(report) if report.skipped else _crash(report) if report.failed else ""
        _tell(
            self._out,
            "test",
            name=self._names[node],
            group=self._groups[node],
            outcome=report.outcome,
            seconds=self._seconds[node],
            reason=reason,
            details=report.longreprtext if report.failed else "",
        )


def _owner(item: pytest.Item) -> type:
    """The part of the kit that a test comes from."""
    name = getattr(item, "originalname", item.name)
    bases: tuple[type, ...] = getattr(item, "cls").__mro__  # noqa: B009 - only a pytest.Function has it
    return next(part for part in bases if name in vars(part))


def _group(item: pytest.Item) -> str:
    return _owner(item).__name__.removesuffix("Conformance")


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def _crash(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message) if crash is not None else report.longreprtext

"""What `kvcache conformance` finds out: the conformance kit run on an installed backend, in a process of its own."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal

from kvcache_core import child
from kvcache_core.config import CacheConfig
from kvcache_core.errors import KvCacheError
from kvcache_core.registry import BackendRegistry, get_registry
from kvcache_core.selection import Selection, choose

__all__ = ["ConformanceReport", "GroupResult", "Result", "Subject", "missing_requirements", "run_kit"]

Outcome = Literal["passed", "failed", "skipped"]

#: Dtypes whose rounding the kit knows, in the order in which they are tried.
TRIED_DTYPES = ("float32", "bfloat16", "float16", "float64")

_DEFAULT_BLOCK_SIZES = (1, 2, 4, 16)
_MOST_BLOCK_SIZES = 4

#: Seconds that importing the kit, and torch with it, may take at least.
_STARTING_SECONDS = 300.0

#: Names of the pytest exit codes that say that the tests ran.
_ORDERLY = ("OK", "TESTS_FAILED", "NO_TESTS_COLLECTED")


def missing_requirements() -> str | None:
    """Say what the kit needs and is not installed, or return None."""
    missing = [name for name in ("pytest", "hypothesis", "torch") if find_spec(name) is None]
    if not missing:
        return None
    return f"kvcache_core.testing needs {' and '.join(missing)}: pip install 'kvcache-core[testing]'"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the kit is told about the backend under test, all of it declared by the backend itself.

    Attributes:
        backend: `"distribution:name"`, or the name.
        distribution: Who provides it and in which version, or None.
        device: The device that its probe names.
        dtypes: The dtypes to try.
        untried_dtypes: Those it stores and the kit has no tolerance for.
        block_size: Tokens per block in most tests.
        block_sizes: Block sizes to try where they matter.
        capabilities: What it declares beyond the contract.
        round_trip_error: Largest relative error of what it reads back.
        options: The options as they were given.
    """

    backend: str
    distribution: str | None
    device: str
    dtypes: tuple[str, ...]
    untried_dtypes: tuple[str, ...]
    block_size: int
    block_sizes: tuple[int, ...]
    capabilities: tuple[str, ...]
    round_trip_error: float
    options: Mapping[str, Any]

    @classmethod
    def of(cls, selection: Selection, options: Mapping[str, Any]) -> Subject:
        """What a chosen backend declares.

        Raises:
            KvCacheError: It stores no dtype that the kit could try.
        """
        backend, descriptor = selection.backend, selection.backend.descriptor
        dtypes = tuple(dtype for dtype in TRIED_DTYPES if dtype in descriptor.dtypes)
        if not dtypes:
            raise KvCacheError(
                f"the kit tries {', '.join(TRIED_DTYPES)}, and backend {backend.name!r} stores none of them "
                f"(it stores {', '.join(descriptor.dtypes)})"
            )
        sizes = descriptor.block_sizes or {*_DEFAULT_BLOCK_SIZES, selection.block_size}
        tried = sorted({*sorted(sizes)[:_MOST_BLOCK_SIZES], selection.block_size})
        return cls(
            backend=backend.qualified,
            distribution=str(backend.distribution) if backend.distribution else None,
            device=selection.device,
            dtypes=dtypes,
            untried_dtypes=tuple(dtype for dtype in descriptor.dtypes if dtype not in dtypes),
            block_size=4 if 4 in sizes else tried[0],
            block_sizes=tuple(tried),
            capabilities=tuple(sorted(descriptor.capabilities)),
            round_trip_error=descriptor.round_trip_error,
            options=dict(options),
        )


@dataclass(frozen=True)
class Result:
    """How one test went.

    Attributes:
        name: Its name, with its arguments in brackets.
        group: The part of the kit it belongs to.
        outcome: `"passed"`, `"failed"` or `"skipped"`.
        seconds: How long it took.
        reason: Why it was skipped, or what failed; empty for one that passed.
        details: The traceback of one that failed.
    """

    name: str
    group: str
    outcome: Outcome
    seconds: float
    reason: str = ""
    details: str = ""


@dataclass
class GroupResult:
    """How the tests of one part of the kit went.

    Attributes:
        name: The part.
        summary: What it is about.
        passed: How many passed.
        failed: How many failed.
        skipped: How many were skipped.
        seconds: How long they took.
    """

    name: str
    summary: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0


@dataclass
class ConformanceReport:
    """How the kit went; `to_json` is stable.

    Attributes:
        subject: What was tried.
        groups: The parts of the kit, in order.
        tests: All tests that ran, in order.
        planned: How many tests were to run.
        seconds: How long it took as a whole.
        ending: Why the tests ended early, or None.
    """

    subject: Subject
    groups: dict[str, GroupResult] = field(default_factory=dict)
    tests: list[Result] = field(default_factory=list)
    planned: int = 0
    seconds: float = 0.0
    ending: str | None = None

    @property
    def conforms(self) -> bool:
        """Whether every test ran, and none failed."""
        return self.ending is None and self.count("failed") == 0

    def count(self, outcome: Outcome) -> int:
        """How many tests had this outcome."""
        return sum(test.outcome == outcome for test in self.tests)

    def add(self, test: Result) -> None:
        """Note a result."""
        self.tests.append(test)
        group = self.groups.setdefault(test.group, GroupResult(test.group, ""))
        setattr(group, test.outcome, getattr(group, test.outcome) + 1)
        group.seconds += test.seconds

    def to_json(self) -> dict[str, Any]:
        """Return the report in plain types."""
        counts = {outcome: self.count(outcome) for outcome in ("passed", "failed", "skipped")}
        return {
            "conforms": self.conforms,
            **asdict(self.subject),
            **counts,
            "planned": self.planned,
            "seconds": self.seconds,
            "ending": self.ending,
            "groups": [asdict(group) for group in self.groups.values()],
            "tests": [asdict(test) for test in self.tests],
        }


def run_kit(
    name: str,
    *,
    options: Mapping[str, Any],
    device: str = "auto",
    select: str | None = None,
    timeout: float = 600.0,
    progress: Callable[[int, int, str], None] = lambda done, planned, test: None,
    registry: BackendRegistry | None = None,
) -> ConformanceReport:
    """Run the conformance kit on an installed backend.

    Args:
        name: `"name"` or `"distribution:name"`.
        options: Its own options.
        device: Device by torch's name, or `"auto"` for the one its probe names.
        select: An expression that chooses tests, as pytest's `-k`.
        timeout: Seconds that one test may take.
        progress: Called with the tests done, the tests planned and the name of the one that begins.
        registry: Where to look; the registry of this process when None. The tests see only what is installed.

    Raises:
        BackendError: There is no such backend, it is broken, or it cannot run here.
        ConfigError: The options or the device do not go with it.
        KvCacheError: What the kit needs is not installed, it has nothing to try, or `select` selects nothing.
    """
    missing = missing_requirements()
    if missing:
        raise KvCacheError(missing)
    selection = choose(
        CacheConfig(backend=name, options=options, device=device), registry or get_registry(), load=False
    )
    report = ConformanceReport(Subject.of(selection, options))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kvcache-") as folder:
        errors = Path(folder, "stderr.txt")
        with errors.open("wb") as stderr:
            task = {"subject": asdict(report.subject), "select": select, "folder": folder}
            process = child.start(
                "kvcache_core.conformance_child", task, stdout=subprocess.PIPE, stderr=stderr, environ=_environment()
            )
            with process:
                try:
                    report.ending = _follow(process, report, timeout, progress)
                except BaseException:  # such as Ctrl-C, which the child does not get
                    child.kill(process)
                    raise
        report.seconds = time.monotonic() - started
        said = child.tail(errors)
    if report.ending == "USAGE_ERROR":
        raise KvCacheError(f"-k {select!r} is no expression for choosing tests", details=said)
    if report.ending is not None:
        report.ending = "; ".join([report.ending, *said])
    elif not report.planned:
        raise KvCacheError(f"no test of the kit is selected by -k {select!r}")
    return report


def _environment() -> dict[str, str]:
    """The environment without what would change pytest: the author's own settings are about his own tests."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    return {**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _follow(
    process: subprocess.Popen[bytes],
    report: ConformanceReport,
    timeout: float,
    progress: Callable[[int, int, str], None],
) -> str | None:
    """Note what the child says; return why it ended early, or None."""
    lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    stdout = process.stdout
    if stdout is None:
        return "its output cannot be read"
    reader = threading.Thread(target=_read, args=(stdout, lines), daemon=True)
    reader.start()
    running, status, limit = "importing it", None, max(timeout, _STARTING_SECONDS)
    while True:
        try:
            said = lines.get(timeout=limit)
        except queue.Empty:
            child.kill(process)
            return f"{running} took more than {limit:g} seconds"
        if said is None:
            break
        match said.pop("kind"):
            case "group":
                report.groups[said["name"]] = GroupResult(**said)
            case "planned":
                report.planned = said["count"]
            case "begins":
                running, limit = said["name"], timeout
                progress(len(report.tests), report.planned, running)
            case "test":
                report.add(Result(**said))
            case "failed":
                return str(said["reason"])
            case "ended":
                status = said["status"]
    if status is None:
        return f"the process {child.describe_ending(process.wait())} in {running}"
    return None if status in _ORDERLY else status


def _read(stdout: IO[bytes], lines: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    for line in stdout:
        lines.put(json.loads(line))
    lines.put(None)

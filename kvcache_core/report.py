"""What `kvcache doctor` finds out: every installed plugin tried in a process of its own, and what is wrong.

A plugin that hangs, exits or crashes while it is tried takes only that process with it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

from kvcache_core import _compat, child
from kvcache_core.disabling import Disabled
from kvcache_core.discovery import DiscoveryProblem, Entry
from kvcache_core.messages import REPORTED_VARIABLES
from kvcache_core.plugin import INTERFACE_VERSION
from kvcache_core.registry import BackendRegistry, get_registry

__all__ = ["BackendReport", "DoctorReport", "ObserverReport", "examine", "try_backend"]

TrialState = Literal["available", "unavailable", "broken", "incompatible", "disabled"]

_Report = TypeVar("_Report", "BackendReport", "ObserverReport")

_BAD_STATES = frozenset({"broken", "incompatible"})
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "SALT", "API_KEY")
_PARALLEL = 4


@dataclass(frozen=True)
class BackendReport:
    """One installed backend.

    Attributes:
        name: Its name.
        qualified: `"distribution:name"`.
        distribution: Who provides it, as METADATA spells it.
        version: That distribution's version.
        location: Where it is installed.
        editable: Whether it is an editable install.
        source: Where an editable install has its sources, or None.
        module: Its plugin module.
        state: `"available"`, `"unavailable"`, `"broken"`, `"incompatible"` or `"disabled"`.
        code: A short stable word for the reason, or None.
        reason: Why it is in this state, or what the probe found.
        hint: What would help, or None.
        interface: The interface version it is written for, such as `"1.0"`, or None when it could not be asked.
        device: The device it would use, or None.
        ambiguous: Whether another distribution provides a backend of this name.
    """

    name: str
    qualified: str
    distribution: str
    version: str
    location: str
    editable: bool
    source: str | None
    module: str
    state: TrialState
    code: str | None = None
    reason: str = ""
    hint: str | None = None
    interface: str | None = None
    device: str | None = None
    ambiguous: bool = False


@dataclass(frozen=True)
class ObserverReport:
    """One installed observer.

    Attributes:
        name: Its name.
        qualified: `"distribution:name"`.
        distribution: Who provides it, as METADATA spells it.
        version: That distribution's version.
        location: Where it is installed.
        editable: Whether it is an editable install.
        source: Where an editable install has its sources, or None.
        module: Its module.
        state: `"available"`, `"broken"` or `"disabled"`.
        code: A short stable word for the reason, or None.
        reason: Why it is in this state.
        ambiguous: Whether another distribution provides an observer of this name.
    """

    name: str
    qualified: str
    distribution: str
    version: str
    location: str
    editable: bool
    source: str | None
    module: str
    state: TrialState
    code: str | None = None
    reason: str = ""
    ambiguous: bool = False


@dataclass(frozen=True)
class DoctorReport:
    """The state of an installation; `to_json` is stable.

    Attributes:
        version: Version of kvcache-core.
        interface: Interface version of kvcache-core.
        python: Version of Python.
        executable: Path of the interpreter.
        platform: The operating system and machine.
        backends: Every installed backend.
        observers: Every installed observer.
        problems: What is wrong with the installed metadata.
        environment: The variables that matter and are set, with secrets hidden.
    """

    version: str
    interface: str
    python: str
    executable: str
    platform: str
    backends: tuple[BackendReport, ...] = ()
    observers: tuple[ObserverReport, ...] = ()
    problems: tuple[DiscoveryProblem, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def healthy(self) -> bool:
        """Whether nothing that is installed is broken, incompatible or unreadable."""
        states = {backend.state for backend in self.backends} | {observer.state for observer in self.observers}
        return not states & _BAD_STATES and not any(problem.breaks_plugin for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        """Return the report in plain types."""
        return {"healthy": self.healthy, **asdict(self)}


def examine(
    registry: BackendRegistry | None = None,
    *,
    timeout: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> DoctorReport:
    """Try every installed backend and observer, and gather what is wrong.

    Args:
        registry: Where to look; the registry of this process when None.
        timeout: Seconds each of them has.
        environ: The environment; that of the process when None.
    """
    registry = registry or get_registry()
    environ = os.environ if environ is None else environ
    switched_off = Disabled.read(environ=environ)

    def findings(entry: Entry, task: Callable[[Entry], dict[str, Any]]) -> dict[str, Any]:
        ban = switched_off.ban_on(entry)
        if ban is not None:
            return {"state": "disabled", "reason": f"by {ban.word!r} in {ban.origin}"}
        return task(entry)

    def backend(entry: Entry) -> BackendReport:
        found = findings(entry, partial(try_backend, timeout=timeout))
        return _report(BackendReport, entry, found, ambiguous=len(registry.claims(entry.name)) > 1)

    def observer(entry: Entry) -> ObserverReport:
        found = findings(entry, lambda entry: _try({"observer": entry.qualified}, timeout))
        rivals = [each for each in registry.observers() if each.name == entry.name]
        return _report(ObserverReport, entry, found, ambiguous=len(rivals) > 1)

    with ThreadPoolExecutor(_PARALLEL) as pool:
        backends, observers = pool.map(backend, registry.entries()), pool.map(observer, registry.observers())
    return DoctorReport(
        version=_compat.core_version(),
        interface=".".join(map(str, INTERFACE_VERSION)),
        python=platform.python_version(),
        executable=sys.executable,
        platform=platform.platform(),
        backends=tuple(backends),
        observers=tuple(observers),
        problems=registry.problems,
        environment=_relevant(environ),
    )


def _report(kind: type[_Report], entry: Entry, findings: Mapping[str, Any], *, ambiguous: bool) -> _Report:
    owner = entry.distribution
    return kind(
        name=entry.name,
        qualified=entry.qualified,
        distribution=owner.name,
        version=owner.version,
        location=owner.location,
        editable=owner.editable,
        source=owner.source,
        module=entry.module,
        ambiguous=ambiguous,
        **{key: value for key, value in findings.items() if key in kind.__dataclass_fields__},
    )


def _relevant(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "(hidden)" if any(word in name.upper() for word in _SECRET) else value
        for name, value in sorted(environ.items())
        if any(fnmatchcase(name, pattern) for pattern in REPORTED_VARIABLES)
    }


# -- one plugin in a process of its own ------------------------------------------------------------------


def try_backend(
    entry: Entry, *, timeout: float, load: bool = True, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Describe, probe and load a backend in a child process.

    Args:
        entry: The backend.
        timeout: Seconds it has.
        load: Whether to import its storage when its probe says yes.
        options: The options to try it with; its defaults when None.

    Returns:
        `state`, `reason` and what else was learned; the fields of `BackendReport`, and `detail` of the probe.
    """
    return _try({"backend": entry.qualified, "load": load, "options": dict(options or {})}, timeout)


def _try(task: Mapping[str, Any], timeout: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvcache-") as folder:
        answer, errors = Path(folder, "answer.json"), Path(folder, "stderr.txt")
        task = {**task, "answer": str(answer)}
        with errors.open("wb") as stderr:
            outcome = _run(task, stderr, timeout)
        if answer.exists():
            findings: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
            return findings
        said = child.tail(errors)
    if outcome is None:
        ending = f"it did not answer within {timeout:g} seconds"
    else:
        ending = f"the process that tried it {child.describe_ending(outcome)} before it could answer"
    return {
        "state": "broken",
        "code": "timeout" if outcome is None else "crashed",
        "reason": "; ".join([ending, *said]),
    }


def _run(task: Mapping[str, Any], stderr: IO[bytes], timeout: float) -> int | None:
    """Run a trial; return its exit status, or None when it was killed for taking too long."""
    try:
        process = child.start("kvcache_core.trial", task, stdout=subprocess.DEVNULL, stderr=stderr)
    except OSError as error:  # a frozen program has no interpreter to start
        stderr.write(f"cannot start {sys.executable!r}: {error}".encode())
        return -1
    with process:
        try:
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            child.kill(process)
            return None
        except BaseException:  # such as Ctrl-C, which the child does not get
            child.kill(process)
            raise

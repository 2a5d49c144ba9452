"""What runs in the child process in which `kvcache doctor` and `kvcache show` try a plugin."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache_core import messages
from kvcache_core.errors import BackendLoadError, ConfigError, IncompatibleBackendError, KvCacheError, OptionsError
from kvcache_core.frozen import FrozenMapping
from kvcache_core.loading import plugin_code
from kvcache_core.observers import load_observer
from kvcache_core.options import validate_options
from kvcache_core.plugin import Available, ProbeRequest
from kvcache_core.registry import Backend, BackendRegistry
from kvcache_core.selection import probe

__all__ = ["main", "trial", "try_observer"]

_DEFAULTS: Mapping[str, Any] = FrozenMapping()


def main(task: Mapping[str, Any]) -> None:
    """Try the backend or observer that `task` names and leave the findings in the file it names.

    The process ends at once, without the exit handlers and threads that a plugin may have left behind.
    """
    if "observer" in task:
        findings = try_observer(BackendRegistry(), task["observer"])
    else:
        findings = trial(BackendRegistry(), task["backend"], load=task["load"], options=task["options"])
    answer = Path(task["answer"])
    draft = answer.with_suffix(".part")
    draft.write_text(json.dumps(findings), encoding="utf-8")
    draft.replace(answer)  # all or nothing
    os._exit(0)


def trial(
    registry: BackendRegistry, name: str, *, load: bool, options: Mapping[str, Any] = _DEFAULTS
) -> dict[str, Any]:
    """Describe and probe a backend with these options, and load it when it is available.

    Returns:
        `state`, `code`, `reason`, `hint`, `interface`, `device` and `detail`, as far as they are known.
    """
    findings: dict[str, Any] = {}
    try:
        backend = registry.describe(name)
        findings["interface"] = ".".join(map(str, backend.descriptor.interface))
        registry.require_interface(backend)
        return {**findings, **_probed(registry, backend, options, load=load)}
    except IncompatibleBackendError as error:
        return {**findings, **_failure("incompatible", error)}
    except BackendLoadError as error:
        return {
            **findings,
            **_failure("broken", error),
            "reason": f"{_first_line(error)}: {messages.cause_line(error)}",
        }
    except KvCacheError as error:
        return {**findings, **_failure("broken", error)}


def try_observer(registry: BackendRegistry, qualified: str) -> dict[str, Any]:
    """Import an observer; returns `state`, `code` and `reason`."""
    (entry,) = [entry for entry in registry.observers() if entry.qualified == qualified]
    try:
        load_observer(entry, "kvcache doctor")
    except ConfigError as error:
        return {
            "state": "broken",
            "code": type(error.__cause__).__name__,
            "reason": str(error).splitlines()[-1].strip(),
        }
    return {"state": "available"}


def _probed(registry: BackendRegistry, backend: Backend, asked: Mapping[str, Any], *, load: bool) -> dict[str, Any]:
    model = registry.options_model(backend)
    try:
        with plugin_code(backend.name, backend.distribution, "validating its options", passing=(OptionsError,)):
            options = validate_options(backend.descriptor, asked, model=model)
    except OptionsError as error:
        if asked:
            return {"state": "unavailable", "code": "wrong-options", "reason": "; ".join(str(error).splitlines())}
        missing = ", ".join(path for path, _ in error.problems)
        return {"state": "unavailable", "code": "needs-options", "reason": f"it cannot be tried without {missing}"}
    result = probe(registry, backend, ProbeRequest(options=options, dtype=backend.descriptor.dtypes[0]))
    if not isinstance(result, Available):
        return {
            "state": "unavailable",
            "code": result.code,
            "reason": result.reason,
            "hint": result.hint or None,
        }
    if load:
        registry.load(backend)
    return {"state": "available", "device": result.device, "reason": result.detail, "detail": result.detail}


def _failure(state: str, error: KvCacheError) -> dict[str, Any]:
    return {
        "state": state,
        "code": type(error).__name__,
        "reason": _first_line(error),
        "hint": getattr(error, "hint", None),
    }


def _first_line(error: KvCacheError) -> str:
    return str(error).splitlines()[0]

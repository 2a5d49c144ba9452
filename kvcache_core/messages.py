"""The words users read when a backend cannot be had, and the few names core knows for the sake of messages.

Core's logic names no device and no backend; the tables of first-party backends, of what people call them, and of
the environment variables worth reporting are here. Every function returns an error that is ready to raise.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvcache_core.errors import (
    AmbiguousBackendError,
    BackendDisabledError,
    BackendLoadError,
    BackendUnavailableError,
    IncompatibleBackendError,
    NoBackendAvailableError,
    UnknownBackendError,
)
from kvcache_core.interface import ENTRY_POINT_GROUP, INTERFACE_VERSION
from kvcache_core.names import AUTO, canonical, parse_request

if TYPE_CHECKING:
    from kvcache_core.discovery import Distribution, Entry

__all__ = [
    "ALIASES",
    "DISABLE_VARIABLE",
    "FIRST_PARTY",
    "REPORTED_VARIABLES",
    "ambiguous",
    "cause_line",
    "disabled",
    "incompatible",
    "install_command",
    "interface_mismatch",
    "label",
    "lacking",
    "load_failed",
    "nothing_available",
    "shorten",
    "suggestion",
    "unavailable",
    "unknown",
]

#: Backends maintained with core, and the distributions that provide them. Each is also an extra of kvcache-core.
FIRST_PARTY: Mapping[str, str] = MappingProxyType(
    {"cpu": "kvcache-cpu", "cuda": "kvcache-cuda", "metal": "kvcache-metal"}
)

#: What people write for a backend -> the backends they may mean. Spelling distance would take gpu for cpu.
ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpu": ("cuda", "metal"),
        "nvidia": ("cuda",),
        "nvidia-gpu": ("cuda",),
        "cu": ("cuda",),
        "apple": ("metal",),
        "mac": ("metal",),
        "macos": ("metal",),
        "mlx": ("metal",),
        "mps": ("metal",),
        "host": ("cpu",),
        "ram": ("cpu",),
        "x86": ("cpu",),
        "any": (),
        "automatic": (),
        "best": (),
        "default": (),
    }
)

_MADE_BY = {"cuda": "NVIDIA", "metal": "Apple"}

DISABLE_VARIABLE = "KVCACHE_DISABLE"

#: Environment variables that change which backends are found, whether they can run, or how fast. A trailing `*`
#: stands for any ending.
REPORTED_VARIABLES: tuple[str, ...] = (
    "KVCACHE_*",
    "CUDA_*",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "PYTORCH_*",
    "TORCH_*",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "LD_LIBRARY_PATH",
    "DYLD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
)


# -- pieces ----------------------------------------------------------------------------------------------


def label(name: str, distribution: Distribution | None) -> str:
    """Return `'name' (distribution version)`."""
    return f"'{name}' ({distribution or 'registered by this program'})"


def install_command(name: str) -> str | None:
    """Return the command that installs a first-party backend, or None for a name core does not know."""
    return f'pip install "kvcache-core[{name}]"' if name in FIRST_PARTY else None


def suggestion(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `word` most likely is a misspelling of."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return close[0] if close else None


def shorten(value: object, limit: int = 80) -> str:
    """Return `repr(value)`, cut in the middle when it is long."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 20]} ... {text[-15:]}"


def cause_line(error: BaseException) -> str:
    """Return an exception's type and the first line of its text; for a failed load, those of what made it fail."""
    while isinstance(error, BackendLoadError) and error.__cause__ is not None:
        error = error.__cause__
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def either(choices: Sequence[str]) -> str:
    """Join choices as `a, b or c`."""
    return " or ".join([", ".join(choices[:-1]), choices[-1]] if len(choices) > 1 else choices)


def _requested_by(origin: str | None) -> str:
    return f" (requested by {origin})" if origin else ""


def _setting(backend: str) -> str:
    return f'backend="{backend}"'


def _version(interface: tuple[int, int]) -> str:
    return f"{interface[0]}.{interface[1]}"


# -- not found -------------------------------------------------------------------------------------------


def unknown(
    asked: str, installed: Sequence[tuple[str, Distribution | None]], origin: str | None = None
) -> UnknownBackendError:
    """No installed distribution provides what was asked for.

    Args:
        asked: The user's own words.
        installed: Name and distribution of every backend that is there.
        origin: Where the request came from, for the message.
    """
    request = parse_request(asked)
    if request.distribution is None and request.name in ALIASES:
        return _alias(asked, request.name, origin)
    details = _nearest(asked, installed)
    hint = details[-1].strip() if details else None
    shown = [f"{name} ({distribution or 'registered by this program'})" for name, distribution in installed]
    details.append(f"Installed: {', '.join(shown) or 'none'}")
    if hint is None:
        details += [
            f"Backends are looked up in the entry-point group '{ENTRY_POINT_GROUP}'; `kvcache doctor` shows the finds.",
            "A plugin in an editable install announces a new backend only after it has been installed again.",
        ]
    details.append(f"Environment: {sys.executable}")
    return UnknownBackendError(
        f"no KV-cache backend named {asked!r} is installed{_requested_by(origin)}",
        backend=asked,
        hint=hint,
        details=details,
    )


def _nearest(asked: str, installed: Sequence[tuple[str, Distribution | None]]) -> list[str]:
    """Say what was probably meant and how to get it; nothing when no guess is good."""
    request = parse_request(asked)
    names = {name for name, _ in installed}
    if request.distribution:
        others = [name for name, owner in installed if owner and owner.key == request.distribution]
        if others:
            return [f"{request.distribution!r} is installed and provides {either([repr(name) for name in others])}."]
        guess = suggestion(str(request), [f"{owner.key}:{name}" for name, owner in installed if owner])
        return [f"Did you mean {guess!r}?"] if guess else []
    guess = request.name if request.name in FIRST_PARTY else suggestion(request.name, sorted(names | set(FIRST_PARTY)))
    if guess is None:
        return []
    meant = "" if guess == request.name else f"Did you mean {guess!r}?"
    if guess in names:
        return [meant]
    missing = f"It is provided by {FIRST_PARTY[guess]}, which is not installed here:"
    return [f"{meant} {missing}".strip(), f"    {install_command(guess)}"]


def _alias(asked: str, name: str, origin: str | None) -> UnknownBackendError:
    targets = [f"{target!r} ({_MADE_BY[target]})" if target in _MADE_BY else repr(target) for target in ALIASES[name]]
    hint = f"use {either([*targets, repr(AUTO)])}"
    return UnknownBackendError(
        f"{asked!r} is not a backend name{_requested_by(origin)}; {hint}", backend=asked, hint=hint
    )


def ambiguous(asked: str, claims: Sequence[Entry]) -> AmbiguousBackendError:
    """Several distributions provide a backend of the name that was asked for."""
    widths = [
        max(len(column) for column in columns)
        for columns in zip(*((str(claim.distribution), claim.module) for claim in claims), strict=True)
    ]
    rows = [
        f"  {claim.distribution!s:<{widths[0]}}   {claim.module:<{widths[1]}}   {claim.distribution.location}"
        for claim in claims
    ]
    picks = [_setting(claim.qualified) for claim in claims]
    return AmbiguousBackendError(
        f"{len(claims)} installed distributions provide a backend named {canonical(asked)!r}",
        backend=asked,
        hint=picks[0],
        details=[
            *rows,
            f"Pick one:   {'   or   '.join(picks)}",
            f"Or hide one: {DISABLE_VARIABLE}={claims[-1].distribution.key}",
        ],
    )


def disabled(name: str, distribution: Distribution | None, token: str, origin: str) -> BackendDisabledError:
    """The backend that was asked for is on a list of what not to use.

    Args:
        name: The backend.
        distribution: Who provides it.
        token: The item of the list that names it.
        origin: The variable or config key that holds the list.
    """
    hint = f"take {token!r} out of {origin}, or choose another backend"
    return BackendDisabledError(
        f"backend {label(name, distribution)} is switched off by {origin}: {hint}",
        backend=name,
        distribution=distribution.name if distribution else None,
        hint=hint,
    )


# -- found, but unusable ---------------------------------------------------------------------------------


def load_failed(name: str, distribution: Distribution | None, doing: str, cause: BaseException) -> BackendLoadError:
    """The plugin's code raised; raise the result from `cause`."""
    details = [cause_line(cause)]
    if isinstance(cause, TypeError) and "BackendDescriptor" in str(cause):
        details.append("The plugin may be written for a newer kvcache-core; upgrade it or the plugin.")
    return BackendLoadError(
        f"backend {label(name, distribution)} failed while {doing}",
        backend=name,
        distribution=distribution.name if distribution else None,
        hint=f"{DISABLE_VARIABLE}={name}",
        details=[
            *details,
            "The original traceback follows as the direct cause. Other backends are not affected.",
            f"To hide this one: {DISABLE_VARIABLE}={name}",
        ],
    )


def interface_mismatch(
    interface: tuple[int, int], core: tuple[int, int] = INTERFACE_VERSION, *, limit: bool = False
) -> str | None:
    """Say how a backend's interface version differs from core's; None when the two work together."""
    if interface[0] == core[0] and interface[1] <= core[1]:
        return None
    upper = f" (up to {_version(core)})" if limit or interface[0] == core[0] else ""
    return f"implements interface {_version(interface)}, needs {core[0]}.x{upper}"


def incompatible(
    name: str,
    distribution: Distribution | None,
    interface: tuple[int, int],
    *,
    core: tuple[int, int] = INTERFACE_VERSION,
    core_version: str = "",
) -> IncompatibleBackendError:
    """The backend is written for another version of the interface."""
    this = f"this kvcache-core {core_version}".rstrip()
    older = interface < core
    hint = _upgrade(name, distribution) if older else "pip install -U kvcache-core"
    ways = {f"Upgrade the {'plugin' if older else 'core'}:": hint} if hint else {}
    if older and core_version:
        # Where package and interface share their major, the major says it; otherwise any earlier release may do.
        major = core_version.partition(".")[0]
        bound = major if major == str(core[0]) else core_version
        ways["Or keep the old core:"] = f'pip install "kvcache-core<{bound}"'
    if not older and distribution:
        ways["Or keep an older plugin:"] = f'pip install "{distribution.name}<{distribution.version}"'
    width = max(map(len, ways), default=0)
    return IncompatibleBackendError(
        f"backend {label(name, distribution)} implements interface {_version(interface)}, "
        f"{this} needs {core[0]}.x (up to {_version(core)})",
        backend=name,
        distribution=distribution.name if distribution else None,
        hint=hint,
        details=[f"{way:<{width}} {command}" for way, command in ways.items()],
    )


def lacking(
    name: str, distribution: Distribution | None, storage: str, faults: Sequence[str]
) -> IncompatibleBackendError:
    """The backend's storage class is not what the interface asks for; `faults` says where."""
    hint = _upgrade(name, distribution)
    return IncompatibleBackendError(
        f"backend {label(name, distribution)} does not implement interface {_version(INTERFACE_VERSION)}: {faults[0]}",
        backend=name,
        distribution=distribution.name if distribution else None,
        hint=hint,
        details=[*faults[1:], f"Class: {storage}", *([f"Upgrade the plugin: {hint}"] if hint else [])],
    )


def _upgrade(name: str, distribution: Distribution | None) -> str | None:
    if distribution is None:
        return None
    if distribution.key == FIRST_PARTY.get(name):
        return f'pip install -U "kvcache-core[{name}]"'
    return f"pip install -U {distribution.name}"


def unavailable(
    name: str,
    distribution: Distribution | None,
    code: str,
    reason: str,
    hint: str = "",
    others: Sequence[str] = (),
) -> BackendUnavailableError:
    """The probe of the backend that was asked for says no.

    Args:
        name: The backend.
        distribution: Who provides it.
        code: The probe's short word.
        reason: The probe's reason.
        hint: The probe's advice, or an empty string.
        others: Backends that could be named instead.
    """
    instead = f"choose {either([_setting(other) for other in [*others, AUTO]])}" if others else ""
    advice = ", or ".join(part for part in (hint, instead) if part)
    return BackendUnavailableError(
        f"backend {label(name, distribution)} is installed but cannot run on this machine",
        code=code,
        reason=reason,
        backend=name,
        distribution=distribution.name if distribution else None,
        hint=advice or None,
        details=[
            f"Reason [{code}]: {reason}",
            *([f"Fix: {advice}"] if advice else []),
            "No other backend was tried because this one was named explicitly.",
        ],
    )


def nothing_available(
    rejected: Sequence[tuple[str, str, str]], installed: Iterable[str], asked: str = ""
) -> NoBackendAvailableError:
    """`auto` found nothing.

    Args:
        rejected: Name, state and reason of each backend that was looked at.
        installed: Names of all backends that are installed.
        asked: What the backend was to be able to do, for the message.
    """
    present = {*installed, *(name for name, _, _ in rejected)}
    missing = [(name, "not installed", install_command(name) or "") for name in FIRST_PARTY if name not in present]
    rows = [*rejected, *missing]
    width = max(len(name) for name, _, _ in rows)
    span = max(len(state) for _, state, _ in rows)
    return NoBackendAvailableError(
        "no KV-cache backend can run on this machine",
        hint=missing[0][2] if missing and not rejected else None,
        details=[
            *(f"  {name:<{width}}  {state:<{span}}  {reason}" for name, state, reason in rows),
            *([f"Asked for: {asked}"] if asked else []),
        ],
    )

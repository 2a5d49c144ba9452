"""The choice of a backend.

A named backend is that one or an error. `auto` takes the first that can run here: those of `backend_order`, then the
others by priority, first-party before third-party, then by name. Every backend it passes over keeps its reason, and a
broken one causes a warning; a merely absent one does not.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pydantic import BaseModel

from kvcache_core import fit, messages
from kvcache_core._torch_autoload import ensure_torch_can_be_imported
from kvcache_core.disabling import Disabled
from kvcache_core.discovery import Entry
from kvcache_core.errors import (
    BackendError,
    BackendLoadError,
    BackendSkippedWarning,
    BackendUnavailableError,
    ConfigWarning,
    IncompatibleBackendError,
    KvCacheError,
    OptionsError,
)
from kvcache_core.fit import Wishes
from kvcache_core.loading import plugin_code
from kvcache_core.names import AUTO, canonical, device_fits
from kvcache_core.options import validate_options
from kvcache_core.plugin import Available, ProbeRequest, ProbeResult, Unavailable
from kvcache_core.registry import Backend, BackendRegistry, get_registry

__all__ = ["Rejected", "Selection", "State", "choose", "probe"]

logger = logging.getLogger(__name__)

State = Literal["unavailable", "unsuitable", "broken", "incompatible", "disabled", "not installed"]


@dataclass(frozen=True)
class Rejected:
    """A backend that `auto` looked at and did not take.

    Attributes:
        name: The backend.
        distribution: Name and version of who provides it, or None.
        state: `"unavailable"` (cannot run here), `"unsuitable"` (cannot do what is asked), `"broken"`,
            `"incompatible"`, `"disabled"` or `"not installed"`.
        reason: Why, as a phrase.
        error: What asking for it by name would raise, where it was found.
        priority: The priority it declares, where it could be described.
    """

    name: str
    distribution: str | None
    state: State
    reason: str
    error: KvCacheError | None = None
    priority: int | None = None


@dataclass(frozen=True)
class Selection:
    """The outcome of a choice, with all values concrete.

    Attributes:
        backend: The chosen backend.
        options: Its validated options.
        device: The device it will use, by torch's name.
        dtype: The dtype it will store, by torch's name.
        block_size: Tokens per block.
        reason: Why this one.
        rejected: What was passed over on the way, in order.
    """

    backend: Backend
    options: BaseModel
    device: str
    dtype: str
    block_size: int
    reason: str
    rejected: tuple[Rejected, ...] = ()


def choose(config: Wishes, registry: BackendRegistry | None = None, *, load: bool = True) -> Selection:
    """Choose the backend that a configuration asks for.

    Args:
        config: A `CacheConfig`, or anything with the same keys.
        registry: Where to look; the registry of this process when None.
        load: Import the storage, and torch with it, before settling on a backend, so that `auto` can pass over
            one whose storage turns out to be broken. A planner that only wants to know can do without.

    Raises:
        UnknownBackendError: Nothing of the name asked for is installed.
        AmbiguousBackendError: Several distributions provide it.
        BackendDisabledError: It is switched off.
        BackendLoadError: Its plugin is broken.
        IncompatibleBackendError: It is written for another version of the interface.
        BackendUnavailableError: It cannot run here.
        OptionsError: Its options are wrong.
        ConfigError: The device, dtype or block size does not go with it.
        UnsupportedError: The geometry needs a capability that it lacks.
        NoBackendAvailableError: `auto` found nothing.
    """
    registry = registry or get_registry()
    switched_off = Disabled.read(config)
    switched_off.warn_unknown(registry)
    if canonical(config.backend) == AUTO:
        selection = _choose_auto(config, registry, switched_off, load)
    else:
        selection = _choose_named(config, registry, switched_off, load)
    logger.info("kvcache backend %s on %s: %s", selection.backend.label, selection.device, selection.reason)
    return selection


# -- one backend -----------------------------------------------------------------------------------------


def _choose_named(config: Wishes, registry: BackendRegistry, switched_off: Disabled, load: bool) -> Selection:
    origin = _origin_for_message(config, "backend")
    found = _resolve(config.backend, registry, switched_off, origin)
    backend = registry.describe(found)
    return _examine(config, registry, backend, f"named explicitly{f' ({origin})' if origin else ''}", load)


def _resolve(name: str, registry: BackendRegistry, switched_off: Disabled, origin: str | None) -> Entry | Backend:
    """Return the one claim on a name that is not switched off, or raise."""
    claims = registry.claims(name)
    left = [claim for claim in claims if not switched_off.ban_on(claim)]
    error = switched_off.error(claims[0]) if claims and not left else None
    if error:
        raise error
    return registry.single(name, left, origin=origin)


def _origin_for_message(config: Wishes, key: str) -> str | None:
    origin = config.origin(key)
    return None if origin in ("argument", "default") else origin


def _examine(config: Wishes, registry: BackendRegistry, backend: Backend, reason: str, load: bool) -> Selection:
    """Return the selection of this backend, or raise what keeps it from being selected."""
    registry.require_interface(backend)
    fit.check_device(config, backend)
    dtype = fit.dtype_for(config, backend)
    block_size = fit.block_size_for(config, backend)
    fit.check_geometry(config, backend)
    options = _options(config, registry, backend)
    request = ProbeRequest(
        options=options,
        device=config.device,
        dtype=dtype,
        geometry=config.geometry,
        block_size=None if isinstance(config.block_size, str) else block_size,
    )
    found = _usable(registry, backend, request)
    if load:
        registry.load(backend)
    if request.block_size is None and found.block_size is not None:
        block_size = found.block_size
    return Selection(backend, options, found.device, dtype, block_size, reason)


def _options(config: Wishes, registry: BackendRegistry, backend: Backend) -> BaseModel:
    model = registry.options_model(backend)
    text_keys = {key for key in config.options if config.origin(f"options.{key}").startswith("environment")}
    with plugin_code(backend.name, backend.distribution, "validating its options", passing=(OptionsError,)):
        return validate_options(backend.descriptor, config.options, from_text=text_keys, model=model)


def _usable(registry: BackendRegistry, backend: Backend, request: ProbeRequest) -> Available:
    """Return what the backend's probe found, or raise why it cannot run."""
    result = probe(registry, backend, request)
    if isinstance(result, Available) and not device_fits(request.device, result.device):
        reason = f"it would use device {result.device!r}, not {request.device!r} as asked"
        result = Unavailable(code="other-device", reason=reason)
    if isinstance(result, Unavailable):
        raise _unavailable(registry, backend, result)
    return result


def probe(registry: BackendRegistry, backend: Backend, request: ProbeRequest) -> ProbeResult:
    """Ask a backend whether it can run here.

    Raises:
        BackendLoadError: Its probe raises, or returns neither `Available` nor `Unavailable`.
    """
    ensure_torch_can_be_imported()
    ask = registry.probe(backend)
    with plugin_code(backend.name, backend.distribution, "probing this machine"):
        result = ask(request)
        if isinstance(result, Available | Unavailable):
            return result
        raise TypeError(f"its probe must return Available or Unavailable, not {type(result).__name__}")


def _unavailable(registry: BackendRegistry, backend: Backend, result: Unavailable) -> BackendUnavailableError:
    others = [name for name in registry.names() if name != backend.name]
    return messages.unavailable(backend.name, backend.distribution, result.code, result.reason, result.hint, others)


# -- the first that can run ------------------------------------------------------------------------------


def _choose_auto(config: Wishes, registry: BackendRegistry, switched_off: Disabled, load: bool) -> Selection:
    rejected: list[Rejected] = []
    for candidate in candidates(config, registry, switched_off):
        if isinstance(candidate, Rejected):
            rejected.append(candidate)
            continue
        backend, why = candidate
        try:
            selection = _examine(config, registry, backend, why, load)
        except KvCacheError as error:
            rejected.append(_rejection(backend, error, backend.descriptor.priority))
            continue
        for passed_over in rejected:
            _warn_if_broken(passed_over, backend, registry)
        return replace(selection, rejected=tuple(rejected))
    raise _nothing(config, registry, rejected)


def candidates(
    config: Wishes, registry: BackendRegistry, switched_off: Disabled
) -> Iterator[tuple[Backend, str] | Rejected]:
    """Yield the backends that `auto` tries, each with the reason it would be taken, in order.

    The plugins that `backend_order` does not list are only imported when those it lists have been passed over.
    """
    seen: set[str] = set()
    for name in config.backend_order:
        listed = _listed(name, registry, switched_off)
        if isinstance(listed, Rejected):
            yield listed
        elif listed.qualified not in seen:
            seen.add(listed.qualified)
            described = _described(registry, listed)
            if isinstance(described, Rejected):
                yield described
            else:
                yield described, "first of backend_order that can run here"
    ranked: list[Backend] = []
    for item in _installed(registry):
        if item.qualified in seen:
            continue
        if switched_off.ban_on(item):
            yield _banned(item, switched_off)
            continue
        described = _described(registry, item)
        if isinstance(described, Rejected):
            yield described  # its priority is not known, so it may have been better than all that follow
        else:
            ranked.append(described)
    for backend, priority in in_order(ranked):
        yield backend, f"highest priority that can run here ({priority})"


def _listed(name: str, registry: BackendRegistry, switched_off: Disabled) -> Entry | Backend | Rejected:
    """Return what an item of `backend_order` names.

    Raises:
        AmbiguousBackendError: Several distributions provide it.
    """
    claims = registry.claims(name)
    left = [claim for claim in claims if not switched_off.ban_on(claim)]
    if left:
        return registry.single(name, left)
    if claims:
        return _banned(claims[0], switched_off)
    hint = messages.install_command(canonical(name))
    if hint is None and registry.first_time(("backend_order", name)):
        warnings.warn(
            f"backend_order names {name!r}, but no installed backend is called that", ConfigWarning, stacklevel=5
        )
    return Rejected(name, None, "not installed", hint or "listed in backend_order")


def in_order(backends: Iterable[Backend]) -> list[tuple[Backend, int]]:
    """Rank backends for `auto`, with the priorities that count.

    Priorities of third parties are capped at the highest of the first parties', which also win ties: installing a
    package does not change what a program runs on, unless the program lists it in `backend_order`.
    """
    backends = list(backends)
    cap = max((backend.descriptor.priority for backend in backends if backend.is_first_party), default=None)
    counted = [
        (backend, min(backend.descriptor.priority, backend.descriptor.priority if cap is None else cap))
        for backend in backends
    ]
    return sorted(counted, key=lambda pair: (-pair[1], not pair[0].is_first_party, pair[0].name, pair[0].qualified))


def _installed(registry: BackendRegistry) -> list[Entry | Backend]:
    registered = registry.registered()
    hidden = {backend.name for backend in registered}
    return [*registered, *(entry for entry in registry.entries() if entry.name not in hidden)]


def _described(registry: BackendRegistry, item: Entry | Backend) -> Backend | Rejected:
    try:
        return registry.describe(item)
    except BackendError as error:
        return _rejection(item, error)


def _banned(item: Entry | Backend, switched_off: Disabled) -> Rejected:
    ban = switched_off.ban_on(item)
    reason = f"by {ban.word!r} in {ban.origin}" if ban else ""
    return Rejected(item.name, _provider(item), "disabled", reason, switched_off.error(item))


def _provider(item: Entry | Backend) -> str | None:
    return str(item.distribution) if item.distribution else None


def _rejection(item: Entry | Backend, error: KvCacheError, priority: int | None = None) -> Rejected:
    state: State = "unsuitable"
    reason = str(error).splitlines()[0]
    if isinstance(error, BackendUnavailableError):
        state, reason = "unavailable", error.reason or reason
    elif isinstance(error, BackendLoadError):
        state = "broken"
        reason = messages.cause_line(error)
    elif isinstance(error, IncompatibleBackendError) and isinstance(item, Backend):
        state, reason = "incompatible", messages.interface_mismatch(item.descriptor.interface) or reason
    return Rejected(item.name, _provider(item), state, reason, error, priority)


def _warn_if_broken(rejected: Rejected, chosen: Backend, registry: BackendRegistry) -> None:
    """Say so when something that may be better was passed over for a fault that can be mended."""
    faults = {"broken": "is broken and was skipped", "incompatible": "is incompatible and was skipped"}
    fault = faults.get(rejected.state)
    if isinstance(rejected.error, OptionsError):
        fault = "was skipped"
    if fault is None or not registry.first_time(("skipped", rejected.name, rejected.distribution, rejected.reason)):
        return
    rank = "" if rejected.priority is None else f", priority {rejected.priority}"
    provider = rejected.distribution or "registered by this program"
    warnings.warn(
        f"{rejected.name!r} ({provider}{rank}) {fault}: {rejected.reason}; using {chosen.name!r}",
        BackendSkippedWarning,
        stacklevel=4,
    )


def _nothing(config: Wishes, registry: BackendRegistry, rejected: Sequence[Rejected]) -> KvCacheError:
    tried = [each for each in rejected if each.state not in ("disabled", "not installed")]
    if tried and all(isinstance(each.error, OptionsError) for each in tried):
        return tried[0].error or KvCacheError(tried[0].reason)  # no backend knows these options: a slip, most likely
    asked = [f"{key} {value!r}" for key, value in (("device", config.device), ("dtype", config.dtype)) if value != AUTO]
    error = messages.nothing_available(
        [(each.name, each.state, each.reason) for each in rejected], registry.names(), ", ".join(asked)
    )
    error.__cause__ = next((each.error for each in tried if each.state == "broken"), None)
    return error

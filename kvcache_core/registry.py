"""The backends there are: found in metadata or registered by the program, described and loaded on demand.

Three depths, each costlier than the one before: an *entry* is a line of metadata; *describing* imports a plugin's
light module; *loading* imports its storage, and torch with it. One name is resolved at a time, so a broken plugin
disturbs nobody else, and what failed is remembered until `refresh`. No lock is held while plugin code runs. What is
needed for the deeper two is imported there: listing entries needs neither pydantic nor pluggy.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvcache_core import _compat, messages
from kvcache_core._compat import MetadataFinder
from kvcache_core._torch_autoload import ensure_torch_can_be_imported
from kvcache_core.discovery import Catalogue, DiscoveryProblem, Distribution, Entry, scan
from kvcache_core.errors import BackendError
from kvcache_core.loading import import_module, import_target, plugin_code
from kvcache_core.memo import BusyError, Memo
from kvcache_core.names import parse_request

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvcache_core.plugin import BackendDescriptor, Storage

__all__ = ["Backend", "BackendRegistry", "get_registry"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Backend:
    """A described backend.

    Attributes:
        descriptor: What its plugin declares.
        distribution: The installed distribution that provides it; None when this program registered it.
    """

    descriptor: BackendDescriptor
    distribution: Distribution | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.descriptor.name

    @property
    def qualified(self) -> str:
        """`"distribution:name"`, or the bare name when this program registered it."""
        return f"{self.distribution.key}:{self.name}" if self.distribution else self.name

    @property
    def label(self) -> str:
        """Name and provider, as messages show them."""
        return messages.label(self.name, self.distribution)

    @property
    def is_first_party(self) -> bool:
        """Whether it comes from a distribution maintained with kvcache-core."""
        return self.distribution is not None and self.distribution.key in messages.FIRST_PARTY.values()


@dataclass
class _State:
    """All that a registry knows; swapped as a whole."""

    registered: dict[str, Backend] = field(default_factory=dict)
    notes: dict[Hashable, DiscoveryProblem] = field(default_factory=dict)
    warned: dict[Hashable, object] = field(default_factory=dict)
    memo: Memo = field(default_factory=Memo)

    def copy(self) -> _State:
        return _State(dict(self.registered), dict(self.notes), dict(self.warned), self.memo.copy())


class BackendRegistry:
    """Finds, describes and loads backends by name.

    Names may be written in any case and with `-`, `_` or `.`; `"distribution:name"` tells two distributions that
    provide the same name apart. A backend registered by the program stands before an installed one of its name.

    Args:
        finders: Where to look for distributions: objects with `find_distributions`, such as those on
            `sys.meta_path`, which are used when None. With `[]` only registered backends exist.
    """

    def __init__(self, finders: Sequence[MetadataFinder] | None = None) -> None:
        self._finders = None if finders is None else tuple(finders)
        self._state = _State()

    # -- what is there -----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Forget everything found, loaded and failed, and look again at the next question.

        Backends installed while the process runs are found afterwards. What the program registered stays.
        """
        importlib.invalidate_caches()
        self._state = _State(registered=self._state.registered)

    def _catalogue(self) -> Catalogue:
        return self._state.memo.get_once("catalogue", lambda: scan(self._finders))

    def names(self) -> tuple[str, ...]:
        """The names of all backends, sorted. Reads metadata only."""
        return tuple(sorted({*self._state.registered, *(entry.name for entry in self._catalogue().entries)}))

    def entries(self) -> tuple[Entry, ...]:
        """What installed distributions announce, by name. Reads metadata only."""
        return self._catalogue().entries

    def observers(self) -> tuple[Entry, ...]:
        """The observers that installed distributions announce, by name. Reads metadata only."""
        return self._catalogue().observers

    def registered(self) -> tuple[Backend, ...]:
        """What this program registered, by name."""
        return tuple(backend for _, backend in sorted(self._state.registered.items()))

    @property
    def problems(self) -> tuple[DiscoveryProblem, ...]:
        """What is wrong with the installed metadata, and what plugins described so far declare amiss."""
        return (*self._catalogue().problems, *self._state.notes.values())

    def claims(self, name: str) -> tuple[Entry | Backend, ...]:
        """Everything that goes by `name` or `distribution:name`; more than one when distributions collide."""
        request = parse_request(name)
        if request.distribution is None and request.name in self._state.registered:
            return (self._state.registered[request.name],)
        return tuple(
            entry
            for entry in self.entries()
            if entry.name == request.name and request.distribution in (None, entry.distribution.key)
        )

    def find(self, name: str, *, origin: str | None = None) -> Entry | Backend:
        """Return the one thing that goes by `name`.

        Args:
            name: `"name"` or `"distribution:name"`.
            origin: Where the name came from, for messages.

        Raises:
            UnknownBackendError: There is none.
            AmbiguousBackendError: Several distributions provide it.
        """
        return self.single(name, self.claims(name), origin=origin)

    def single(self, name: str, claims: Sequence[Entry | Backend], *, origin: str | None = None) -> Entry | Backend:
        """Return the only claim, or raise as `find` does."""
        if not claims:
            raise messages.unknown(name, self._shown(), origin)
        if len(claims) > 1:
            raise messages.ambiguous(name, [claim for claim in claims if isinstance(claim, Entry)])
        return claims[0]

    def _shown(self) -> list[tuple[str, Distribution | None]]:
        known: list[Backend | Entry] = [*self.registered(), *self.entries()]
        return sorted(((item.name, item.distribution) for item in known), key=lambda pair: (pair[0], str(pair[1])))

    # -- describing --------------------------------------------------------------------------------------

    def describe(self, name: str | Entry | Backend, *, origin: str | None = None) -> Backend:
        """Import a backend's light plugin module and return what it declares.

        Args:
            name: `"name"` or `"distribution:name"`, or what `find` returned for it.
            origin: Where the name came from, for messages.

        Raises:
            UnknownBackendError: There is no such backend.
            AmbiguousBackendError: Several distributions provide it.
            BackendLoadError: Its plugin raises, or does not declare it.
        """
        found = self.find(name, origin=origin) if isinstance(name, str) else name
        if isinstance(found, Backend):
            return found
        declared = self._declared(found)
        for descriptor in declared:
            if descriptor.name == found.name:
                return Backend(descriptor, found.distribution)
        from kvcache_core.hookspecs import HookError  # noqa: PLC0415 - see above

        names = ", ".join(descriptor.name for descriptor in declared) or "none"
        with plugin_code(found.name, found.distribution, f"declaring its backends in {found.module}"):
            raise HookError(f"{found.module} declares no backend of this name (declared: {names})")

    def _declared(self, entry: Entry) -> tuple[BackendDescriptor, ...]:
        state = self._state
        module = None
        if ("declared", entry.qualified) not in state.memo:
            # Outside the turn of `get_once`: Python's import lock already makes threads wait for one import, and
            # a thread that imports the module on its own account may ask us while it holds that lock.
            module = state.memo.get(("module", entry.qualified), lambda: self._import_plugin(entry))
            # So is what the turn needs: a child forked meanwhile would wait for ever for an import under way.
            from kvcache_core import hookspecs, plugin  # noqa: F401, PLC0415 - see above
        try:
            return state.memo.get_once(("declared", entry.qualified), lambda: self._query(state, entry, module))
        except BusyError as error:
            raise messages.load_failed(
                entry.name, entry.distribution, f"declaring its backends in {entry.module}", error
            ) from error

    @staticmethod
    def _import_plugin(entry: Entry) -> Any:
        with plugin_code(entry.name, entry.distribution, f"importing {entry.module}"):
            return import_module(entry.module)

    def _query(self, state: _State, entry: Entry, module: Any) -> tuple[BackendDescriptor, ...]:
        with plugin_code(entry.name, entry.distribution, f"declaring its backends in {entry.module}"):
            declared = _declarations(module)
        announced = {
            other.name
            for other in self.entries()
            if (other.distribution.key, other.module) == (entry.distribution.key, entry.module)
        }
        for descriptor in declared:
            if descriptor.name not in announced:
                state.notes[entry.module, descriptor.name] = DiscoveryProblem(
                    "unannounced",
                    f"{entry.module} declares the backend {descriptor.name!r}, for which its distribution has no "
                    f"entry point; add: {descriptor.name} = {entry.module!r}",
                    entry.distribution.metadata,
                    distribution=entry.distribution.name,
                )
        return declared

    # -- loading -----------------------------------------------------------------------------------------

    def load(self, name: str | Entry | Backend) -> type[Storage]:
        """Import a backend's storage class. This is where torch may be imported.

        Raises:
            UnknownBackendError: There is no such backend.
            AmbiguousBackendError: Several distributions provide it.
            IncompatibleBackendError: It is for another interface version, or lacks required methods.
            BackendLoadError: Its code raises.
        """
        from kvcache_core.conformity import storage_faults  # noqa: PLC0415 - see above

        backend = self.describe(name)
        self.require_interface(backend)
        ensure_torch_can_be_imported()
        storage = self._target(backend, "storage", backend.descriptor.storage)
        faults = storage_faults(storage, backend.descriptor)
        if faults:
            raise messages.lacking(backend.name, backend.distribution, backend.descriptor.storage, faults)
        return storage  # type: ignore[no-any-return]

    def require_interface(self, backend: Backend) -> None:
        """Raise `IncompatibleBackendError` unless the backend speaks core's interface version."""
        interface = backend.descriptor.interface
        if messages.interface_mismatch(interface):
            raise messages.incompatible(
                backend.name, backend.distribution, interface, core_version=_compat.core_version()
            )

    def options_model(self, backend: Backend) -> type[BaseModel]:
        """Return the model of a backend's options, importing it where the descriptor names a path."""
        from pydantic import BaseModel  # noqa: PLC0415 - see above

        model = self._target(backend, "options", backend.descriptor.options)
        if isinstance(model, type) and issubclass(model, BaseModel):
            return model
        with plugin_code(backend.name, backend.distribution, "building its options"):
            raise TypeError(f"{backend.descriptor.options!r} is not a pydantic model but {model!r}")

    def probe(self, backend: Backend) -> Any:
        """Return a backend's probe, importing it where the descriptor names a path."""
        return self._target(backend, "probe", backend.descriptor.probe)

    def _target(self, backend: Backend, role: str, target: Any) -> Any:
        if not isinstance(target, str):
            return target

        def resolve() -> Any:
            module = target.partition(":")[0]
            with plugin_code(backend.name, backend.distribution, f"importing {module}"):
                return import_target(target)

        return self._state.memo.get((backend.qualified, role, target), resolve)

    # -- registering -------------------------------------------------------------------------------------

    def register(self, descriptor: BackendDescriptor, *, replace: bool = False) -> Backend:
        """Add a backend that no installed distribution announces, for this process.

        Registering the same descriptor again changes nothing.

        Args:
            descriptor: What a plugin's hook would return.
            replace: Take the place of a different backend registered under this name.

        Raises:
            BackendError: A different backend is registered under this name.
        """
        from kvcache_core.plugin import BackendDescriptor  # noqa: PLC0415 - see above

        if not isinstance(descriptor, BackendDescriptor):
            raise BackendError(f"register takes a BackendDescriptor, not {type(descriptor).__name__}")
        backend = Backend(descriptor)
        registered = self._state.registered
        if replace:
            registered[backend.name] = backend
        elif registered.setdefault(backend.name, backend) != backend:
            raise BackendError(
                f"a different backend named {backend.name!r} is already registered; pass replace=True to replace it",
                backend=backend.name,
            )
        logger.debug("backend %s", backend.label)
        return backend

    def register_plugin(self, module: Any) -> tuple[Backend, ...]:
        """Register every backend that a plugin module declares, where its metadata is missing.

        A frozen program has the modules of its plugins but not their entry points.

        Raises:
            BackendLoadError: The module's hook raises or is wrong.
            BackendError: A different backend is registered under one of the names; none is added then.
        """
        name = getattr(module, "__name__", repr(module))

        def query() -> tuple[BackendDescriptor, ...]:
            with plugin_code(name, None, "declaring its backends"):
                return _declarations(module)

        # Asked once, so that registering a module again brings the very same descriptors and changes nothing.
        declared = self._state.memo.get(("registered", name, id(module)), query)
        for descriptor in declared:
            if self._state.registered.get(descriptor.name, Backend(descriptor)) != Backend(descriptor):
                raise BackendError(
                    f"a different backend named {descriptor.name!r} is already registered; unregister it first",
                    backend=descriptor.name,
                )
        return tuple(self.register(descriptor) for descriptor in declared)

    def unregister(self, name: str) -> None:
        """Remove a backend that was registered in this process.

        Raises:
            BackendError: It is an installed one, which can only be disabled.
            UnknownBackendError: There is none of this name.
        """
        found = self.find(name)
        if isinstance(found, Entry):
            raise BackendError(
                f"backend {messages.label(found.name, found.distribution)} is installed, not registered; "
                f"set {messages.DISABLE_VARIABLE}={found.name} to hide it",
                backend=found.name,
                distribution=found.distribution.name,
            )
        self._state.registered.pop(found.name, None)

    @contextmanager
    def isolated(self) -> Iterator[BackendRegistry]:
        """Undo, on leaving the block, everything registered, unregistered, found or remembered inside it."""
        before = self._state
        self._state = before.copy()
        try:
            yield self
        finally:
            self._state = before

    def first_time(self, occasion: Hashable) -> bool:
        """Whether `occasion` comes up for the first time since the last refresh; for warnings given once."""
        mark = object()
        return self._state.warned.setdefault(occasion, mark) is mark


def _declarations(module: Any) -> tuple[BackendDescriptor, ...]:
    from kvcache_core.hookspecs import query_backends  # noqa: PLC0415 - see above
    from kvcache_core.plugin import HostInfo  # noqa: PLC0415

    return query_backends(module, HostInfo(version=_compat.core_version()))


_default = BackendRegistry()


def get_registry() -> BackendRegistry:
    """Return the registry of this process."""
    return _default

"""Running a plugin's code: imports by path, every kind of failure turned into `BackendLoadError`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcache_core import messages
from kvcache_core.discovery import Distribution
from kvcache_core.memo import BusyError

__all__ = ["StillLoadingError", "import_module", "import_target", "plugin_code"]


class StillLoadingError(BusyError, ImportError):
    """A module is asked for by its own import, which has not finished; asking again later can succeed."""


@contextmanager
def plugin_code(
    name: str, distribution: Distribution | None, doing: str, *, passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Run plugin code; whatever it raises becomes a `BackendLoadError` that says what was being done.

    KeyboardInterrupt passes, as it is the user's, and so do the types in `passing`.
    """
    try:
        yield
    except passing:
        raise
    except (Exception, SystemExit) as error:  # plugins raise anything: OSError, AttributeError, exits
        raise messages.load_failed(name, distribution, doing, error) from error


def import_module(path: str) -> Any:
    """Import a module by its dotted path.

    Raises:
        StillLoadingError: This very import is running further up the stack.
    """
    module = importlib.import_module(path)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        raise StillLoadingError(f"{path} is still being imported and cannot be used before that has finished")
    return module


def import_target(path: str) -> Any:
    """Return what `"package.module:name"` points to.

    Raises:
        AttributeError: The module has no such name.
        StillLoadingError: The module's import is running further up the stack.
    """
    module_path, _, attributes = path.partition(":")
    target = import_module(module_path)
    for attribute in attributes.split("."):
        target = getattr(target, attribute)
    return target

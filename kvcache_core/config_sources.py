"""Where configuration values come from: sources laid over each other, and the environment as one of them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcache_core.errors import ConfigWarning
from kvcache_core.validation import FrozenModel, KeyPath, alternatives, annotation_at, did_you_mean, is_array, table_of

__all__ = ["CONFIG_FILE_VARIABLE", "Source", "from_arguments", "from_environment", "parse_text"]

#: Names the configuration file when the caller names none.
CONFIG_FILE_VARIABLE = "KVCACHE_CONFIG"
#: Variables with our prefix that are no configuration keys: the file above, and the folder for unpacked models.
_OTHER_VARIABLES = (CONFIG_FILE_VARIABLE, "KVCACHE_HOME")
_PREFIX = "KVCACHE_"
_NESTED = "__"
_SWITCH = {"1": True, "yes": True, "on": True, "0": False, "no": False, "off": False}


@dataclass(frozen=True)
class Source:
    """Nested values and, for each place in them, the words that say where it came from."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)

    def under(self, upper: Source) -> Source:
        """This source with `upper` laid over it: tables merge key by key, anything else is replaced."""
        values, replaced = _overlay(self.values, upper.values, ())
        kept = {
            path: words
            for path, words in self.origins.items()
            if not any(path[: len(gone)] == gone for gone in replaced)
        }
        return Source(values, kept | upper.origins)

    def origin(self, path: KeyPath) -> str | None:
        """Where the value at `path` came from, or what is in it, or else the closest table around it."""
        if path in self.origins:
            return self.origins[path]
        inside = self._inside(path)
        if inside:
            return ", ".join(dict.fromkeys(inside))
        for length in range(len(path) - 1, 0, -1):
            around = [self.origins[path[:length]]] if path[:length] in self.origins else self._inside(path[:length])
            if around:
                return around[0]
        return None

    def _inside(self, path: KeyPath) -> list[str]:
        return [words for place, words in self.origins.items() if path and place[: len(path)] == path]


def _overlay(lower: Mapping[str, Any], upper: Mapping[str, Any], path: KeyPath) -> tuple[dict[str, Any], list[KeyPath]]:
    merged = dict(lower)
    replaced: list[KeyPath] = []
    for key, value in upper.items():
        if isinstance(value, Mapping) and isinstance(lower.get(key), Mapping):
            merged[key], inside = _overlay(lower[key], value, (*path, key))
            replaced += inside
        else:
            merged[key] = value
            replaced.append((*path, key))
    return merged, replaced


def from_arguments(values: Mapping[str, Any]) -> Source:
    """Keyword arguments as a source."""
    origins: dict[KeyPath, str] = {}

    def mark(table: Mapping[str, Any], path: KeyPath) -> None:
        for key, value in table.items():
            place: KeyPath = (*path, key)
            if isinstance(value, Mapping) and value:
                mark(value, place)
            else:
                origins[place] = "argument"

    mark(values, ())
    return Source(dict(values), origins)


def from_environment(environ: Mapping[str, str], model: type[FrozenModel], *, stacklevel: int) -> Source:
    """Read the `KVCACHE_*` variables; `__` separates nested keys, and an empty variable counts as unset.

    A variable that belongs to no key is reported with a `ConfigWarning`.
    """
    source = Source()
    # Sorted, so that KVCACHE_OPTIONS (a JSON object) comes before KVCACHE_OPTIONS__X, which adds to it.
    for name in sorted(environ):
        text = environ[name].strip()
        if not name.startswith(_PREFIX) or name in _OTHER_VARIABLES or not text:
            continue
        path = tuple(part.lower() for part in name.removeprefix(_PREFIX).split(_NESTED))
        annotation = annotation_at(model, path) if all(path) else None
        if annotation is None:
            warnings.warn(_unknown_variable(name, model), ConfigWarning, stacklevel=stacklevel + 1)
            continue
        value: Any = parse_text(text, annotation)
        for part in reversed(path):
            value = {part: value}
        source = source.under(Source(value, {path: f"environment variable {name}"}))
    return source


def parse_text(text: str, annotation: Any = Any) -> Any:
    """What text from the environment or a command line means for a key of this annotation.

    Where the type leaves it open, text that reads as JSON is that value (`16`, `0.5`, `true`, `"16"`, `[1, 2]`)
    and anything else is itself. A wrong value is left as it is, for validation to refuse.
    """
    wanted = alternatives(annotation)
    if str in wanted:
        return text
    if bool in wanted and text.lower() in _SWITCH:
        return _SWITCH[text.lower()]
    if is_array(annotation) and not text.startswith("["):
        return [item.strip() for item in text.split(",") if item.strip()]
    try:
        return json.loads(text.lower() if bool in wanted else text)
    except (ValueError, RecursionError):  # not JSON, so the text is the value
        return text


def _unknown_variable(name: str, model: type[FrozenModel]) -> str:
    known = [other.removeprefix(_PREFIX) for other in _OTHER_VARIABLES]
    for key, annotation in model.key_types().items():
        known.append(str(key).upper())
        table = table_of(annotation)
        inner = table.key_types() if table else {}
        known += [f"{key}{_NESTED}{each}".upper() for each in inner]
    suggestion = did_you_mean(name.removeprefix(_PREFIX), known)
    hint = f"; did you mean {_PREFIX}{suggestion}?" if suggestion else ""
    return f"environment variable {name} has no effect: no configuration key is called that{hint}"

"""Frozen models whose refusals are `ConfigError`s: one sentence a problem, with the key and the user's value."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import UnionType
from typing import Any, NamedTuple, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from kvcache_core import _first_model  # noqa: F401 - before any other model; see there
from kvcache_core.errors import ConfigError

__all__ = [
    "FrozenModel",
    "KeyPath",
    "Problem",
    "alternatives",
    "annotation_at",
    "config_error",
    "did_you_mean",
    "is_array",
    "phrase",
    "refusals_as_config_errors",
    "show",
    "table_of",
    "unknown_key",
]

#: Where a value sits in a configuration: table keys, and numbers for the elements of arrays.
KeyPath = tuple[str | int, ...]

_SHOWN_CHARACTERS = 60
_LISTED_KEYS = 5
_Model = TypeVar("_Model", bound="FrozenModel")


class Problem(NamedTuple):
    """One thing that is wrong.

    Attributes:
        key: The dotted key.
        text: What is wrong with it, so that `key` followed by `text` is a sentence.
        origin: Where the value came from, or None when that is plain.
    """

    key: str
    text: str
    origin: str | None = None

    def __str__(self) -> str:
        joint = " " if self.text.startswith(("must ", "is ")) else ": "
        where = f" ({self.origin})" if self.origin else ""
        return f"{self.key}{joint}{self.text}{where}" if self.key else f"{self.text}{where}"


class FrozenModel(BaseModel):
    """Base of the configuration's models: frozen, unknown keys refused, every refusal a `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        with refusals_as_config_errors(type(self)):
            super().__init__(**values)

    # Without this mark pydantic would call `__init__` for nested models too, and the location of an error
    # inside them would be lost.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def model_validate(cls: type[_Model], obj: Any, **settings: Any) -> _Model:
        """Validate `obj` as pydantic does; a refusal is a `ConfigError`."""
        with refusals_as_config_errors(cls):
            return super().model_validate(obj, **settings)

    @classmethod
    def model_validate_json(cls: type[_Model], json_data: str | bytes | bytearray, **settings: Any) -> _Model:
        """Validate JSON text as pydantic does; a refusal is a `ConfigError`."""
        with refusals_as_config_errors(cls):
            return super().model_validate_json(json_data, **settings)

    @classmethod
    def key_types(cls) -> dict[str | int, Any]:
        """The keys that a table of this model may hold, with the annotations of their values."""
        return {name: field.annotation for name, field in cls.model_fields.items()}


def show(value: Any) -> str:
    """The user's own value as it appears in a message, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 8 * _SHOWN_CHARACTERS:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print very long ones
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # noqa: BLE001 - a value that cannot be printed is still the one to complain about
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def did_you_mean(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str | None:
    """The known name that `name` probably stands for.

    Args:
        name: What the user wrote.
        known: The names there are.
        aliases: Names used elsewhere -> ours; they come first, as spelling alone leads astray.
    """
    folded = name.lower().replace("-", "_")
    if aliases and folded in aliases:
        return aliases[folded]
    candidates = {candidate.lower().replace("-", "_"): candidate for candidate in known}
    close = difflib.get_close_matches(folded, candidates, n=1, cutoff=0.6)
    return candidates[close[0]] if close else None


#: What other systems call our keys.
_KEY_ALIASES: Mapping[str, str] = {
    "max_blocks": "budget",
    "num_blocks": "budget",
    "num_gpu_blocks": "budget",
    "max_memory": "budget",
    "gpu_memory_utilization": "budget",
    "max_model_len": "max_sequence_length",
    "max_seq_len": "max_sequence_length",
    "max_tokens": "max_sequence_length",
    "torch_dtype": "dtype",
    "kv_cache_dtype": "dtype",
    "page_size": "block_size",
    "sliding_window": "window",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_kv_heads",
    "num_heads": "num_kv_heads",
}


def unknown_key(name: str, table: type[FrozenModel]) -> str:
    """What to say about a key that does not exist in a table."""
    known = [str(key) for key in table.key_types()]
    suggestion = did_you_mean(name, known, {k: v for k, v in _KEY_ALIASES.items() if v in known})
    if suggestion:
        return f"is not a known key; did you mean {suggestion!r}?"
    return f"is not a known key; the keys are {', '.join(known)}"


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def table_of(annotation: Any) -> type[FrozenModel] | None:
    """The model whose keys a table of this annotation holds, or None where it is no table or a free one."""
    return next(
        (each for each in alternatives(annotation) if isinstance(each, type) and issubclass(each, FrozenModel)),
        None,
    )


def is_array(annotation: Any) -> bool:
    """Whether a value of this annotation is an array, whose elements have numbers instead of keys."""
    return any(get_origin(each) is tuple for each in alternatives(annotation))


def annotation_at(model: type[FrozenModel], path: KeyPath) -> Any:
    """The annotation of what sits at `path`: `Any` inside a free table, None where there is no such key."""
    current: Any = model
    for part in path:
        table = table_of(current)
        origins = {get_origin(each): get_args(each) for each in alternatives(current)}
        if table is not None:
            current = table.key_types().get(part)
        elif tuple in origins:
            current = origins[tuple][0] if isinstance(part, int) else None
        else:
            current = Any if Mapping in origins or current is Any else None
    return current


def phrase(error: Mapping[str, Any]) -> str:
    """One pydantic error as the rest of a sentence that begins with the key."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        return str(cause)
    if error["type"] == "missing":
        return "is missing"
    message: str = error["msg"]
    if message.startswith("Input should be "):
        return f"must be {message.removeprefix('Input should be ')}, not {show(error['input'])}"
    return f"{message[:1].lower()}{message[1:]}, not {show(error['input'])}"


def _problem(model: type[FrozenModel], error: Mapping[str, Any], origin: str | None) -> Problem:
    path: KeyPath = error["loc"]
    table = table_of(annotation_at(model, path[:-1])) if error["type"] == "extra_forbidden" else None
    text = unknown_key(str(path[-1]), table) if table else phrase(error)
    return Problem(".".join(map(str, path)), text, origin)


def config_error(problems: Sequence[Problem]) -> ConfigError:
    """One error for all problems of a configuration."""
    first = problems[0]
    if len(problems) == 1:
        return ConfigError(str(first), key=first.key or None, origin=first.origin)
    keys = list(dict.fromkeys(problem.key for problem in problems))
    listed = ", ".join(keys[:_LISTED_KEYS]) + (", ..." if len(keys) > _LISTED_KEYS else "")
    return ConfigError(
        f"{len(problems)} problems in the configuration; fix {listed}",
        key=first.key or None,
        origin=first.origin,
        details=map(str, problems),
    )


def _nowhere(path: KeyPath) -> str | None:
    return None


@contextmanager
def refusals_as_config_errors(
    model: type[FrozenModel], origin_of: Callable[[KeyPath], str | None] = _nowhere
) -> Iterator[None]:
    """Turn what pydantic refuses about `model` into a `ConfigError` that says where each value came from."""
    try:
        yield
    except ValidationError as error:
        problems = [_problem(model, each, origin_of(each["loc"])) for each in error.errors(include_url=False)]
        raise config_error(problems) from None

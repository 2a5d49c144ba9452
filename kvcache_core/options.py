"""The second stage of validation: a backend's own options against its own model.

Core's configuration keeps options as a plain mapping, since the set of backends is open. Values are taken
literally (`True` is not 1, `"16"` is not 16) except where they come from text, as in the environment.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pydantic import AliasChoices, AliasPath, BaseModel, PydanticUserError, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import to_json

from kvcache_core.errors import OptionsError
from kvcache_core.loading import import_target
from kvcache_core.plugin import BackendDescriptor
from kvcache_core.validation import KeyPath, alternatives, did_you_mean, phrase, show

__all__ = ["validate_options"]

_PREFIX = "options"


def validate_options(
    descriptor: BackendDescriptor,
    raw: Mapping[str, Any],
    *,
    from_text: bool | Collection[str] = False,
    model: type[BaseModel] | None = None,
) -> BaseModel:
    """Return a backend's options, validated by its own model.

    Args:
        descriptor: The backend.
        raw: What the user gave.
        from_text: Whether the values were written as text, where `"16"` may stand for 16; or the keys of those
            that were.
        model: The options model, where the caller has it; else it is imported as the descriptor says.

    Raises:
        OptionsError: The options do not fit; all problems are listed, each under a path that begins with `options.`.
        Exception: Whatever the plugin's own code raises.
    """
    if model is None:
        target = descriptor.options
        model = import_target(target) if isinstance(target, str) else target
    text_keys = set(raw) if from_text is True else set(from_text or ())
    given = {key: _read(model, key, value) if key in text_keys else value for key, value in raw.items()}
    try:
        # By way of JSON, whose strict mode takes what a file can say: a list for a tuple, text for an enum or a path.
        document = _to_json(given)
    except ValueError:
        raise _options_error(descriptor.name, dict(_not_plain(given))) from None
    problems = dict(_unknown_options(model, given, ()))
    try:
        validated = model.model_validate_json(document, strict=True)
    except ValidationError as error:
        for path, text in _refusals(error, given):
            problems.setdefault(path, text)
    if problems:
        raise _options_error(descriptor.name, problems)
    return validated


def _read(model: type[BaseModel], key: str, value: Any) -> Any:
    """What text means for a field: read by the field's type, then as JSON, else left for validation to refuse."""
    fields = model.model_fields.items()
    annotation = next((field.annotation for name, field in fields if key in _spellings(name, field, model)), None)
    if annotation is None:
        return value
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    except PydanticUserError:
        return value  # a type of the plugin's own that only makes sense inside its model
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    readings = (adapter.validate_strings, adapter.validate_json)
    for reading in readings:
        try:
            return reading(text)
        except ValidationError:
            continue
    return value


def _unknown_options(model: type[BaseModel], given: Mapping[str, Any], path: KeyPath) -> Iterator[tuple[str, str]]:
    """Find keys the model does not have, also where its author left out `extra="forbid"`."""
    known = {
        spelling: field.annotation
        for name, field in model.model_fields.items()
        for spelling in _spellings(name, field, model)
    }
    for key, value in given.items():
        if key not in known:
            yield _dotted((*path, key)), _unknown(str(key), known)
            continue
        tables = [each for each in alternatives(known[key]) if _is_model(each)]
        if len(tables) == 1 and isinstance(value, Mapping):
            yield from _unknown_options(tables[0], value, (*path, key))


def _spellings(name: str, field: FieldInfo, model: type[BaseModel]) -> Iterator[str]:
    """The keys under which a field is read."""
    alias = field.validation_alias or field.alias
    for choice in alias.choices if isinstance(alias, AliasChoices) else [alias]:
        yield str(choice.path[0]) if isinstance(choice, AliasPath) else choice or name
    config = model.model_config
    if config.get("populate_by_name") or config.get("validate_by_name"):
        yield name


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _unknown(key: str, known: Mapping[str, Any]) -> str:
    close = did_you_mean(key, known)
    if close:
        return f"unknown option; did you mean {close!r}?"
    return "unknown option" if known else "unknown option; this backend has none"


def _refusals(error: ValidationError, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The refusals of a model, those of a union's members joined, as they concern one value."""
    merged: dict[str, list[str]] = {}
    for each in error.errors(include_url=False):
        path = each["loc"] if each["type"] in ("missing", "extra_forbidden") else _existing(each["loc"], given)
        texts = merged.setdefault(_dotted(path), [])
        text = "unknown option" if each["type"] == "extra_forbidden" else _refusal(each)
        if text not in texts:
            texts.append(text)
    for path_text, texts in merged.items():
        yield path_text, "; ".join(texts)


def _existing(path: KeyPath, given: Any) -> KeyPath:
    """The part of an error's location that the user wrote; what follows names members of a union."""
    for depth, part in enumerate(path):
        try:
            given = given[part]
        except (KeyError, IndexError, TypeError):
            return path[:depth]
    return path


def _refusal(error: Any) -> str:
    choices = error.get("ctx", {}).get("expected") if error["type"] in ("literal_error", "enum") else None
    if choices:
        return f"{show(error['input'])} is not one of {str(choices).replace(' or ', ', ')}"
    return phrase(error)


def _to_json(given: Mapping[str, Any]) -> bytes:
    """Serialise options; ValueError where they hold something no file could hold, or themselves."""
    return to_json(given, inf_nan_mode="constants", fallback=_plain_table)


def _plain_table(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise ValueError(f"{type(value).__name__} is not plain data")


def _not_plain(given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in given.items():
        try:
            _to_json({key: value})
        except ValueError:
            yield (
                _dotted((key,)),
                f"{show(value)} is a {type(value).__name__}; options are numbers, text, flags, lists and tables",
            )


def _dotted(path: KeyPath) -> str:
    return ".".join([_PREFIX, *map(str, path)])


def _options_error(backend: str, problems: Mapping[str, str]) -> OptionsError:
    width = max(len(path) for path in problems)
    listed = [f"{path:<{width}} : {text}" for path, text in problems.items()]
    summary = f"{len(problems)} problems in the options of backend {backend!r}"
    if len(problems) == 1:
        ((path, text),) = problems.items()
        summary, listed = f"a problem in the options of backend {backend!r}: {path}: {text}", []
    return OptionsError(
        summary,
        backend=backend,
        problems=problems.items(),
        details=[*listed, f"All options: kvcache show {backend}"],
    )

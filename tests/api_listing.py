"""The public API as text, one line for each name, field and method: what `tests/public_api.txt` holds.

`python -m tests.api_listing` writes that file anew.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

__all__ = ["FROZEN", "MODULES", "listing"]

FROZEN = Path(__file__).with_name("public_api.txt")

#: Modules that others import from; nothing else is promised.
MODULES = (
    "kvcache_core",
    "kvcache_core.attention",
    "kvcache_core.errors",
    "kvcache_core.events",
    "kvcache_core.paged",
    "kvcache_core.plugin",
    "kvcache_core.testing",
)

#: What is nobody's to call: private names, pydantic's own, and the tests of the kit, whose number may grow.
_LEFT_OUT = ("_", "model_", "test_")


def listing(modules: Sequence[str] = MODULES) -> str:
    """The API of these modules, by default the whole."""
    return "\n".join(line for module in modules for line in _module(module)) + "\n"


def _module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    yield f"# {name}"
    for public in sorted(module.__all__):
        value = getattr(module, public)
        earlier = _listed_elsewhere(public, before=name)
        if earlier is not None and getattr(importlib.import_module(earlier), public) is value:
            yield f"{public}: as in {earlier}"
        else:
            yield from _value(public, value)
    yield ""


def _listed_elsewhere(public: str, *, before: str) -> str | None:
    """The earlier module of the list that offers the same name."""
    for name in MODULES[: MODULES.index(before)] if before in MODULES else ():
        if public in importlib.import_module(name).__all__:
            return name
    return None


def _value(name: str, value: Any) -> Iterator[str]:
    if inspect.isclass(value):
        yield from _class(name, value)
    elif inspect.isfunction(value):
        yield f"def {name}{_signature(value)}"
    elif isinstance(value, str | int | tuple | frozenset):
        yield f"{name} = {sorted(value) if isinstance(value, frozenset) else _default(value)}"
    else:
        yield f"{name}: {_annotation(value) if _is_alias(value) else type(value).__name__}"


def _is_alias(value: object) -> bool:
    return isinstance(value, types.UnionType | types.GenericAlias) or type(value).__module__ == "typing"


def _class(name: str, cls: type) -> Iterator[str]:
    bases = [base.__name__ for base in cls.__bases__ if base is not object]
    yield f"class {name}({', '.join(bases)})" if bases else f"class {name}"
    if issubclass(cls, Enum):
        yield from (f"    {member.name} = {member.value!r}" for member in cls)
        return
    is_record = is_dataclass(cls) or issubclass(cls, BaseModel) or hasattr(cls, "_fields")
    if is_record:
        yield from (f"    {line}" for line in _fields(cls))
    elif "__init__" in {name for base in _own(cls) for name in vars(base)}:
        yield f"    __init__{_signature(cls.__init__)}"
    for member in sorted({name for base in _own(cls) for name in vars(base) if not name.startswith(_LEFT_OUT)}):
        if not (is_record and member in _field_names(cls)):
            yield from _member(member, inspect.getattr_static(cls, member))


def _ours(cls: type) -> list[type]:
    """The classes that a class gets its members from, as far as they are of this project."""
    return [base for base in cls.__mro__ if base.__module__.startswith("kvcache_core")]


def _own(cls: type) -> list[type]:
    """A class and those of its bases that no module offers, and what these stand on."""
    bases = [base for base in _ours(cls)[1:] if _is_public(base)]
    inherited = {each for base in bases for each in base.__mro__}
    return [base for base in _ours(cls) if base not in inherited]


def _is_public(cls: type) -> bool:
    return any(getattr(importlib.import_module(name), cls.__name__, None) is cls for name in MODULES)


def _field_names(cls: Any) -> set[str]:
    if issubclass(cls, BaseModel):
        return set(cls.model_fields)
    return {each.name for each in fields(cls)} if is_dataclass(cls) else set(cls._fields)


def _fields(cls: Any) -> Iterator[str]:
    if issubclass(cls, BaseModel):
        stated = {name: text for base in reversed(_ours(cls)) for name, text in inspect.get_annotations(base).items()}
        for name, field in cls.model_fields.items():
            factory = field.default_factory
            yield f"{name}: {_annotation(stated[name])}{_given(... if factory else field.default, PydanticUndefined)}"
    elif is_dataclass(cls):
        for each in fields(cls):
            made = each.default if each.default_factory is MISSING else ...
            yield f"{each.name}: {_annotation(each.type)}{_given(made, MISSING)}"
    else:
        for name in cls._fields:
            default = cls._field_defaults.get(name, MISSING)
            yield f"{name}: {_annotation(cls.__annotations__[name])}{_given(default, MISSING)}"


def _given(default: object, nothing: object) -> str:
    return "" if default is nothing else f" = {_default(default)}"


def _member(name: str, member: Any) -> Iterator[str]:
    kind = "def"
    if isinstance(member, classmethod | staticmethod):
        kind, member = type(member).__name__, member.__func__
    if isinstance(member, cached_property):
        member = property(member.func)
    if isinstance(member, property):
        yield f"    {name}: {_annotation(inspect.get_annotations(member.fget).get('return', '?'))}"  # type: ignore[arg-type]
    elif inspect.isfunction(member):
        abstract = "abstract " if getattr(member, "__isabstractmethod__", False) else ""
        yield f"    {abstract}{kind} {name}{_signature(member)}"
    elif isinstance(member, str | int | float | tuple | frozenset | type(None)):
        yield f"    {name} = {sorted(member) if isinstance(member, frozenset) else _default(member)}"
    else:
        yield f"    {name}"


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parts: list[str] = []
    star = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        mark = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        stated = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        parts.append(f"{mark}{parameter.name}{stated}{_given(parameter.default, parameter.empty)}")
        if parameter.kind is parameter.POSITIONAL_ONLY:
            parts.append("/")
    result = "" if signature.return_annotation is signature.empty else f" -> {_annotation(signature.return_annotation)}"
    return f"({', '.join(parts)}){result}"


def _annotation(stated: Any) -> str:
    """An annotation as its source has it, whatever version of Python reads it."""
    if isinstance(stated, str):
        return stated
    if hasattr(stated, "__forward_arg__"):
        return str(stated.__forward_arg__)
    return stated.__name__ if inspect.isclass(stated) else str(stated)


def _default(value: object) -> str:
    """A value as the source of a program could have it; `...` for one that is made anew each time."""
    if type(value) is tuple:
        return f"({', '.join(map(_default, value))})"
    if value is ...:
        return "..."
    return str(value.__qualname__) if inspect.isclass(value) or inspect.isroutine(value) else repr(value)


if __name__ == "__main__":
    FROZEN.write_text(listing(), encoding="utf-8")

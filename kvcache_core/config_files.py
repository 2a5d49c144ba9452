"""Configuration files, TOML or JSON, read with the line of every key."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvcache_core.config_sources import Source
from kvcache_core.errors import ConfigError
from kvcache_core.validation import KeyPath, show

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

__all__ = ["SCHEMA_KEY", "from_file"]

#: Editors read the schema of a document from this key; it is no configuration.
SCHEMA_KEY = "$schema"
_TOML_LINE = re.compile(r"\(at line (\d+), column \d+\)")
_JSON_SYMBOL = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|\n|[^\s"{}\[\],:]+')


def from_file(path: str | os.PathLike[str], *, named_by: str | None = None) -> Source:
    """Read a `.toml` or `.json` file.

    Args:
        path: The file.
        named_by: What named it, where that is not the caller, for messages.

    Raises:
        ConfigError: It cannot be read, is neither TOML nor JSON, or holds no table.
    """
    name = os.fsdecode(path)
    by = f" (named by {named_by})" if named_by else ""
    suffix = Path(name).suffix.lower()
    if Path(name).is_dir():
        raise ConfigError(f"configuration file {name!r} is a directory{by}; name the file in it", origin=name)
    if suffix not in _READERS:
        raise ConfigError(f"configuration file {name!r} must end in .toml or .json{by}", origin=name)
    text = _read_text(name, by)
    try:
        values, lines = _READERS[suffix](text)
    except RecursionError:
        raise ConfigError(f"configuration file {name!r} is nested too deeply{by}", origin=name) from None
    except ValueError as error:
        line = _line_of(error, text)
        origin = f"{name}, line {line}" if line else name
        kind = suffix.removeprefix(".").upper()
        raise ConfigError(f"{origin}: not valid {kind}: {error}{by}", origin=origin) from None
    values.pop(SCHEMA_KEY, None)
    return Source(values, {path: f"{name}, line {line}" for path, line in lines.items()})


def _read_text(name: str, by: str) -> str:
    try:
        data = Path(name).read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"configuration file {name!r} does not exist{by}", origin=name) from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise ConfigError(f"configuration file {name!r} cannot be read{by}: {error}", origin=name) from None
    try:
        return data.decode("utf-8-sig")  # editors on Windows like to begin a file with a byte-order mark
    except UnicodeDecodeError as error:
        origin = f"{name}, line {data[: error.start].count(10) + 1}"
        raise ConfigError(
            f"{origin}: not UTF-8 text (byte 0x{data[error.start]:02x}){by}; save the file as UTF-8", origin=origin
        ) from None


def _line_of(error: ValueError, text: str) -> int | None:
    if "(at end of document)" in str(error):
        return len(text.splitlines()) or 1
    if isinstance(error, json.JSONDecodeError):
        return error.lineno
    match = _TOML_LINE.search(str(error))
    return int(match[1]) if match else None


def _read_toml(text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    return tomllib.loads(text), _toml_lines(text.replace("\r\n", "\n").split("\n"))


def _toml_lines(text: list[str]) -> dict[KeyPath, int]:
    """The line on which the statement that sets each key begins; the document is known to be valid.

    A statement ends at the first line up to which it is valid TOML by itself, so tomllib finds the ends.
    """
    lines: dict[KeyPath, int] = {}
    elements: dict[KeyPath, int] = {}
    table: KeyPath = ()
    statement: list[str] = []
    for number, line in enumerate(text, 1):
        statement.append(line)
        try:
            parsed = tomllib.loads("\n".join(statement))
        except tomllib.TOMLDecodeError:
            continue  # a value that goes on in the next line
        start = number - len(statement) + 1
        if statement[0].lstrip().startswith("["):
            table = _header(parsed, elements)
            lines.setdefault(table, start)
        else:
            _mark(parsed, table, start, lines)
        statement = []
    return lines


def _header(parsed: dict[str, Any], elements: dict[KeyPath, int]) -> KeyPath:
    """The path of a `[table]`, or of the new element of a `[[array of tables]]`."""
    path: KeyPath = ()
    node: Any = parsed
    while node:
        ((key, node),) = node.items()
        path = (*path, key)
        if isinstance(node, list):
            elements[path] = elements.get(path, -1) + 1
            node = node[0]
        if path in elements:
            path = (*path, elements[path])
    return path


def _mark(value: Any, path: KeyPath, line: int, lines: dict[KeyPath, int]) -> None:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        lines.setdefault((*path, key), line)
        _mark(inner, (*path, key), line, lines)


def _read_json(text: str) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    values = json.loads(text, object_pairs_hook=_without_duplicates)
    if not isinstance(values, dict):
        raise ValueError(f"the document must be an object, not {show(values)}")
    return values, _json_lines(text)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return values


def _json_lines(text: str) -> dict[KeyPath, int]:
    """The line of every key and array element; the document is known to be valid."""
    lines: dict[KeyPath, int] = {}
    line = 1
    path: list[str | int] = []  # of the value that comes next
    in_array: list[bool] = []
    expects_key = False
    for match in _JSON_SYMBOL.finditer(text):
        symbol = match[0]
        if symbol == "\n":
            line += 1
        elif symbol in "}]":
            in_array.pop()
            path.pop()
        elif symbol == ",":
            expects_key = not in_array[-1]
            if in_array[-1]:
                path[-1] = int(path[-1]) + 1
        elif expects_key:
            path[-1] = json.loads(symbol)
            lines[tuple(path)] = line
            expects_key = False
        elif symbol != ":":
            if path:
                lines.setdefault(tuple(path), line)
            if symbol in "{[":
                in_array.append(symbol == "[")
                path.append(0)
                expects_key = not in_array[-1]
    return lines


_READERS: Mapping[str, Callable[[str], tuple[dict[str, Any], dict[KeyPath, int]]]] = {
    ".toml": _read_toml,
    ".json": _read_json,
}

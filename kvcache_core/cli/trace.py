"""Writing down what happens in a cache, for `--trace`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcache_core.errors import ConfigError

if TYPE_CHECKING:
    from kvcache_core.events import CacheEvent

__all__ = ["Trace", "TraceFile"]

TraceFile = Annotated[
    Path | None,
    typer.Option("--trace", help="Write what happens in the cache to this file, a JSON object a line.", dir_okay=False),
]


class Trace:
    """An observer that writes each event as a line of JSON, at once, so that nothing is missing if the worst happens.

    Args:
        file: Where to; unbuffered, so that an error is the error of the line that caused it. Never closed here.
        name: The file's name, for messages.
    """

    def __init__(self, file: RawIOBase, name: str) -> None:
        self._file = file
        self._name = name

    @classmethod
    @contextmanager
    def into(cls, path: Path) -> Iterator[Trace]:
        """Write to a new file, in the place of one that is there.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            file = path.open("wb", buffering=0)
        except OSError as error:
            raise ConfigError(
                f"cannot write the trace {str(path)!r}: {error.strerror}; give --trace another file",
                key="trace",
                origin="command line",
            ) from None
        with file:
            yield cls(file, str(path))

    def __call__(self, event: CacheEvent) -> None:
        """Write one event."""
        self._file.write(json.dumps(event.as_dict()).encode() + b"\n")

    def __repr__(self) -> str:
        return f"the trace {self._name}"

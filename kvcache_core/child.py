"""Processes in which plugins are tried, so that one which hangs, exits or crashes takes nobody with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["describe_ending", "kill", "start", "tail"]

_TAIL_LINES = 4

# Isolated mode, and the parent's own path before anything of ours is imported: the child sees the same
# installation however the parent was started, and no module of the current directory.
_BOOTSTRAP = (
    "import sys, json; task = json.load(sys.stdin); sys.path[:] = task['path']; from {module} import main; main(task)"
)


def start(
    module: str,
    task: Mapping[str, Any],
    *,
    stdout: int | IO[bytes],
    stderr: IO[bytes],
    environ: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process that calls `main(task)` of a module of ours.

    It is in a session of its own, so that `kill` also ends what a plugin has started.

    Raises:
        OSError: The interpreter cannot be started, as in a frozen program.
    """
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps({**task, "path": [str(each) for each in sys.path]}).encode())
        given.seek(0)
        return subprocess.Popen(  # noqa: S603 - our own interpreter and a constant program
            [sys.executable, "-I", "-c", _BOOTSTRAP.format(module=module)],
            stdin=given,
            stdout=stdout,
            stderr=stderr,
            env=environ,
            start_new_session=True,
        )


def kill(child: subprocess.Popen[bytes]) -> None:
    """End a child at once, with everything it has started."""
    if hasattr(os, "killpg"):
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:  # it ended in the meantime
            return
    else:
        child.kill()


def describe_ending(status: int) -> str:
    """Say how a process ended: by a signal, or with an exit status."""
    if status < 0:
        try:
            return f"was killed by {signal.Signals(-status).name}"
        except ValueError:  # a number that no signal has here
            pass
    return f"ended with status {status}"


def tail(file: Path) -> list[str]:
    """The last lines of a child's stderr."""
    return file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_TAIL_LINES:]

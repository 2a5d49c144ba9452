"""Progress on stderr while there is something to wait for; nothing where stderr is not a terminal."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Waiting"]


class Waiting:
    """A line that says what is waited for, with a bar where the end is known.

    Shown within its `with` block until `done`, which may come earlier, when output begins.
    """

    def __init__(self) -> None:
        # The file is named, not looked up at each write: parts of what is waited for redirect sys.stderr.
        console = Console(file=sys.stderr)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Waiting:
        self._progress.start()
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.done()

    def phase(self, description: str, total: int | None = None) -> None:
        """Begin to wait for something else; `total` steps, if that is known."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(description, total=total, count="")

    def advance_to(self, completed: int, unit: str = "tokens") -> None:
        """Say how many of the steps are done."""
        if self._task is not None:
            total = self._progress.tasks[0].total
            of = f"/{total:,.0f}" if total else ""
            self._progress.update(self._task, completed=completed, count=f"{completed:,}{of} {unit}")

    def done(self) -> None:
        """Take the line away."""
        self._progress.stop()

"""One run of the benchmarks: interleaved timing, and whom there is to compare with."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvcache_core.bench.figures import Samples

__all__ = ["Bench"]

#: Rounds of a quick run, which shows that everything works and not how fast it is.
_QUICK_ROUNDS = 3


class Bench:
    """How to measure, for all suites.

    Args:
        quick: Few rounds and small sizes: the figures mean little.
        progress: Called with what is being measured, how many rounds are done, and how many there are.

    Attributes:
        quick: As given.
    """

    def __init__(self, *, quick: bool = False, progress: Callable[[str, int, int], None] | None = None) -> None:
        self.quick = quick
        self._progress = progress or _tell_nobody

    def tell(self, what: str, done: int, total: int) -> None:
        """Tell whoever watches that `done` of `total` rounds are over."""
        self._progress(what, done, total)

    def interleaved(
        self,
        cases: Mapping[str, Callable[[], Any]],
        *,
        rounds: int,
        warmup: int = 3,
        between: Callable[[], Any] | None = None,
    ) -> dict[str, Samples]:
        """Return the seconds of each case, all run in turn in every round.

        Args:
            cases: What to call, by name.
            rounds: Times each of them is measured; fewer in a quick run.
            warmup: Rounds before, which do not count.
            between: Called after each case, and not timed.
        """
        if self.quick:
            rounds, warmup = min(rounds, _QUICK_ROUNDS), min(warmup, 1)
        what = ", ".join(cases)
        times: dict[str, list[float]] = {name: [] for name in cases}
        gc.collect()
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            for done in range(warmup + rounds):
                self.tell(what, done, warmup + rounds)
                for name, case in cases.items():
                    start = time.perf_counter()
                    case()
                    taken = time.perf_counter() - start
                    if done >= warmup:
                        times[name].append(taken)
                    if between is not None:
                        between()
        finally:
            if was_enabled:
                gc.enable()
        return {name: Samples(tuple(values)) for name, values in times.items()}


def _tell_nobody(what: str, done: int, total: int) -> None:
    """Nobody watches."""

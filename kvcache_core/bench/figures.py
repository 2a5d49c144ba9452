"""What a benchmark gives: samples of a time, figures with their spread and target, and series for plots."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Figure", "Samples", "Series"]


@dataclass(frozen=True)
class Samples:
    """Repeated measurements of one thing, in the order of the rounds.

    Attributes:
        values: One number for each round.
    """

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle value."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """What a quarter of the values lies below, and what a quarter lies above."""
        if len(self.values) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def __mul__(self, factor: float) -> Samples:
        return Samples(tuple(value * factor for value in self.values))

    def __sub__(self, other: Samples) -> Samples:
        return Samples(tuple(mine - theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def __truediv__(self, other: Samples | float) -> Samples:
        """Divide round by round: cases of one round were disturbed alike."""
        if not isinstance(other, Samples):
            return self * (1 / other)
        return Samples(tuple(mine / theirs for mine, theirs in zip(self.values, other.values, strict=True)))

    def inverse(self, factor: float = 1.0) -> Samples:
        """`factor` divided by each value, such as a rate from a time."""
        return Samples(tuple(factor / value for value in self.values))


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One result.

    Attributes:
        name: What was measured.
        value: The number; the median where it was repeated.
        unit: Its unit; `"x"` for ratios.
        low: What a quarter of the rounds lies below, or None for what is no sample.
        high: What a quarter of the rounds lies above.
        peer: Whom it is compared with, or who was measured, if that is not this project.
        at_most: The number it should not exceed, or None.
        at_least: The number it should reach, or None.
    """

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    peer: str | None = None
    at_most: float | None = None
    at_least: float | None = None

    @classmethod
    def of(cls, name: str, samples: Samples, unit: str, **rest: Any) -> Figure:
        """The figure of repeated measurements."""
        low, high = samples.quartiles
        return cls(name=name, value=samples.median, unit=unit, low=low, high=high, **rest)

    @property
    def met(self) -> bool | None:
        """Whether the target was met; None without a target."""
        if self.at_most is None and self.at_least is None:
            return None
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def target(self) -> str:
        """The target in words, or an empty string."""
        if self.at_most is not None:
            return f"≤ {self.at_most:.3g} {self.unit}"
        return "" if self.at_least is None else f"≥ {self.at_least:.3g} {self.unit}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "met": self.met}


@dataclass(frozen=True, kw_only=True)
class Series:
    """Lines for one plot.

    Attributes:
        name: What it shows.
        x: What the x axis counts.
        y: What the y axis counts, with the unit.
        lines: Who was measured -> points `(x, y)`.
    """

    name: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def add(self, line: str, x: float, y: float) -> None:
        """Add a point to a line."""
        self.lines.setdefault(line, []).append((x, y))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

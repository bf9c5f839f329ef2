"""What counts as right: a percentage, an absolute difference, an interval, a cell of a grid, or the order of cases."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Protocol

COUNTED = 1e-3
"""Relative difference allowed for further values of a case whose tolerance is an interval: they are exact counts."""

_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


class Tolerance(Protocol):
    """Decides whether a prediction is right."""

    def comparable(self, predicted: float) -> float:
        """The prediction as the source would have printed it."""

    def holds(self, predicted: float, expected: float, *, first: bool) -> bool:
        """Whether a comparable prediction is near enough; ``first``: of the case's first expected value."""


@dataclass(frozen=True)
class Percentage:
    """``30%``: relative to the expected value."""

    fraction: float

    def comparable(self, predicted: float) -> float:
        return predicted

    def holds(self, predicted: float, expected: float, *, first: bool) -> bool:
        return abs(predicted - expected) <= self.fraction * abs(expected)


@dataclass(frozen=True)
class Absolute:
    """``0.005``: in the unit of the value."""

    difference: float

    def comparable(self, predicted: float) -> float:
        return predicted

    def holds(self, predicted: float, expected: float, *, first: bool) -> bool:
        return abs(predicted - expected) <= self.difference


@dataclass(frozen=True)
class Interval:
    """``[0.0161,0.02625]``: of the first expected value; the others are counts."""

    low: float
    high: float

    def comparable(self, predicted: float) -> float:
        return predicted

    def holds(self, predicted: float, expected: float, *, first: bool) -> bool:
        if first:
            return self.low <= predicted <= self.high
        return abs(predicted - expected) <= COUNTED * abs(expected)


@dataclass(frozen=True)
class Cells:
    """``1 cell of logspace(-1,3,50)``: the source tried only the points of a grid, and printed the first that did."""

    cells: int
    low_exponent: float
    high_exponent: float
    points: int

    def comparable(self, predicted: float) -> float:
        if predicted <= 0:
            return predicted
        # Bisection leaves a prediction a millionth above the grid point it means.
        index = max(0, math.ceil(self._index(predicted) - 1e-4))
        return self._point(index) if index < self.points else predicted

    def holds(self, predicted: float, expected: float, *, first: bool) -> bool:
        if predicted <= 0 or expected <= 0:
            return False
        return abs(round(self._index(predicted)) - round(self._index(expected))) <= self.cells

    def _index(self, value: float) -> float:
        span = self.high_exponent - self.low_exponent
        return (math.log10(value) - self.low_exponent) / span * (self.points - 1)

    def _point(self, index: int) -> float:
        span = self.high_exponent - self.low_exponent
        return float(10 ** (self.low_exponent + span * index / (self.points - 1)))


@dataclass(frozen=True)
class Ranking:
    """``ranking``: only the order among cases that share a prefix must hold; decided where all cases are known."""

    def comparable(self, predicted: float) -> float:
        return predicted

    def holds(self, predicted: float, expected: float, *, first: bool) -> bool:
        return True


def parse_tolerance(text: object) -> Tolerance:
    """The tolerance that a case file wrote: ``5%``, ``0.005``, ``[1,2]``, ``1 cell of logspace(-1,3,50)``, ``ranking``.

    Raises:
        ValueError: anything else, a negative number, an empty interval, a grid of fewer than two points.
    """
    plain = "".join(str(text).split())
    if plain == "ranking":
        return Ranking()
    if (match := re.fullmatch(rf"({_NUMBER})%", plain)) and float(match[1]) >= 0:
        return Percentage(float(match[1]) / 100)
    if re.fullmatch(_NUMBER, plain) and 0 <= float(plain) < math.inf:
        return Absolute(float(plain))
    if (match := re.fullmatch(rf"\[({_NUMBER}),({_NUMBER})\]", plain)) and float(match[1]) <= float(match[2]):
        return Interval(float(match[1]), float(match[2]))
    grid = re.fullmatch(rf"(\d+)cells?oflogspace\(({_NUMBER}),({_NUMBER}),(\d+)\)", plain)
    if grid and float(grid[2]) < float(grid[3]) and int(grid[4]) > 1:
        return Cells(int(grid[1]), float(grid[2]), float(grid[3]), int(grid[4]))
    raise ValueError(
        "expected a percentage '5%', a difference '0.005', an interval '[1,2]', "
        f"'1 cell of logspace(-1,3,50)' or 'ranking', got {text!r}"
    )

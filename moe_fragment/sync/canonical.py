"""One canonical vector: parameters in name order, end to end, fp32.

Clusters of different size and ZeRO stage lay the same parameters out differently. They meet on this vector: each rank
says which runs of it lie where in its flat buffers, and every transfer is about ranges of the vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A contiguous range of the canonical vector held in one flat buffer of this rank."""

    start: int
    """First element in the canonical vector."""
    size: int
    """Number of elements."""
    flat: int
    """Index of the flat buffer."""
    position: int
    """First element in the flat buffer."""


class CanonicalVector:
    """Where each parameter lies in the vector.

    Args:
        sizes: number of elements by name; the order given does not matter.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.starts: dict[str, int] = {}
        self.sizes = dict(sorted(sizes.items()))
        self.size = 0
        for name, size in self.sizes.items():
            self.starts[name] = self.size
            self.size += size


def merge(runs: Iterable[Run]) -> list[Run]:
    """Runs in canonical order, those that continue each other in vector and buffer made one."""
    merged: list[Run] = []
    for run in sorted(runs, key=lambda run: run.start):
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.flat == run.flat
            and last.start + last.size == run.start
            and last.position + last.size == run.position
        ):
            merged[-1] = Run(last.start, last.size + run.size, run.flat, last.position)
        else:
            merged.append(run)
    return merged


def interval(total: int, part: int, parts: int) -> tuple[int, int]:
    """Elements [low, high) of part `part` when a vector of `total` elements is cut into `parts`."""
    return total * part // parts, total * (part + 1) // parts

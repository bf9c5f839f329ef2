"""How a step ended, as the fleet decides it."""

from __future__ import annotations

from dataclasses import dataclass

OK, OVERFLOW, FAILED = 2, 1, 0
"""Outcome of a step: committed; discarded because of non-finite numbers; discarded and tried again."""


@dataclass(frozen=True)
class Verdict:
    """What the fleet decided about a step."""

    outcome: int
    values_CV: list[list[float]]
    """Per cluster the vector it contributed; zeros for a cluster that could not be heard."""

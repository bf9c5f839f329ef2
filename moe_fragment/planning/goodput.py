"""The share of time in which chips train, when they fail often and clusters fail apart."""

from __future__ import annotations

LOST_S = 22.5
"""Seconds a cluster loses to each interruption. Fitted on one row (1.2 million chips, one interruption per chip
and year, two clusters: goodput .70; Decoupled DiLoCo, arXiv:2604.21428); the row of eight clusters was not
used."""

YEAR_S = 365.25 * 86400


def goodput(chips: float, mtbi_s: float, clusters: int, lost_s: float = LOST_S) -> float:
    """Expected share of time spent training, 0 to 1.

    A cluster of ``chips / clusters`` is interrupted at the sum of its chips' rates and stands still for ``lost_s``
    each time, while the others go on: ``1 / (1 + chips lost_s / (clusters mtbi_s))`` (a renewal process whose clock
    stands still during repairs; "M learners behave as one with M times fewer chips", arXiv:2604.21428).

    Args:
        mtbi_s: seconds between two interruptions of one chip, on average.
    """
    return 1 / (1 + chips / clusters * lost_s / mtbi_s)

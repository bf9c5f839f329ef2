"""How far trunk copies have come apart, and what to do about it.

Copies that trained apart for long enough end in different basins, and their mean is worse than either. The guard
measures them before each merge, warns and shortens the round when they come too far apart, and refuses to merge past a
bound: the own trunk stays, and the run goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Divergence:
    """Of trunk copies at the end of a round.

    Attributes:
        distance: RMS distance of the copies from their mean, relative to the norm of the global copy.
        cosine: mean cosine between the pseudo-gradients of two clusters, weighted with their norms; 1 for equal ones, 0
            for unrelated ones.
    """

    distance: float
    cosine: float

    @staticmethod
    def of(
        weights: Mapping[int, float], squares: Sequence[float], mean_square: float, outer_square: float
    ) -> Divergence:
        """From squared norms alone.

        Args:
            weights: by cluster; clusters of weight 0 do not count.
            squares: squared norm of each cluster's pseudo-gradient.
            mean_square: of their weighted mean.
            outer_square: of the global copy.
        """
        total = sum(weights.values())
        shares = {cluster: weight / total for cluster, weight in weights.items() if weight}
        spread = sum(share * squares[cluster] for cluster, share in shares.items()) - mean_square
        distance = math.sqrt(max(spread, 0.0) / outer_square) if outer_square else 0.0
        norms = [share * math.sqrt(squares[cluster]) for cluster, share in shares.items()]
        own = sum(norm**2 for norm in norms)
        pairs = sum(norms) ** 2 - own
        cosine = (mean_square - own) / pairs if pairs > 0 else 1.0
        return Divergence(distance, max(-1.0, min(1.0, cosine)))


@dataclass(frozen=True)
class Judgement:
    """What follows: the round length from now on, whether to merge, and a sentence if there is something to say."""

    every: int
    refuses: bool
    reason: str = ""


@dataclass(frozen=True)
class Guard:
    """Bounds on `Divergence.distance`.

    Attributes:
        warn: above it, say so and halve the round.
        refuse: above it, do not merge.
        allowance: times both, for copies that come further apart without harm: those of experts.
    """

    warn: float
    refuse: float
    allowance: float = 1.0

    def judge(self, divergence: Divergence, every: int, shortest: int = 1) -> Judgement:
        """What to do about copies that are `divergence` apart after a round of `every` steps, `shortest` at least."""
        distance, cosine = divergence.distance, divergence.cosine
        if distance <= self.warn * self.allowance:
            return Judgement(every, False)
        shorter = min(every, max(shortest, every // 2))
        said = f"copies are {distance:.3g} of their norm apart (cosine of their updates {cosine:.2f})"
        rounds = f"rounds are {shorter} steps from now on"
        if distance > self.refuse * self.allowance:
            bound = f"more than {self._bound('refuse')}"
            return Judgement(shorter, True, f"{said}, {bound}: each cluster keeps its own; {rounds}")
        return Judgement(shorter, False, f"{said}, more than {self._bound('warn')}; {rounds}")

    def _bound(self, name: str) -> str:
        bound = getattr(self, name)
        if self.allowance == 1:
            return f"sync.guard.{name} = {bound:g}"
        return f"sync.guard.{name} x sync.guard.experts = {bound:g} x {self.allowance:g}"

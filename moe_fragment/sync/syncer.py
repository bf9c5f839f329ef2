"""The syncer of asynchronous strategies: merges what clusters push when enough of it is there, and waits for nobody
else.

One per rail, on the first cluster's gateway. Decoupled DiLoCo (arXiv 2604.21428): a fragment is merged once K clusters
have pushed it (the quorum) and a grace window is over, which is a part of what is left of the time that pushes may
take anyway; late ones go into the next merge. A contribution weighs tokens times tokens per step, less the more rounds
its base is behind. A parameter server is the case of K = 1 without grace, with a bound on how far ahead a cluster may
run.

Clusters that are missing from a merge count as if they had found no reason to move (the paper divides by those that are
there): so the pushes of a round move the global copy as far in merges of one as in one merge of all. With K = 1, four
clusters would otherwise move it four times as far.

No thread, no clock and no transport in here: `Syncer` is told the time, so that its decisions can be tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from moe_fragment.sync.merge import average, radial_directional_average
from moe_fragment.sync.outer import OuterSGD

Piece = tuple[str, int, int]
"""(parameter, first element in the interval, elements)"""


@dataclass(frozen=True)
class Policy:
    """How pushes become merges.

    Attributes:
        outer: moves the global copy.
        quorum: how many clusters must have pushed a fragment.
        grace: part of the remaining slack that others get on top, 0 for none.
        overlap: steps that a push may take; with the clusters' step time it gives the slack.
        merge: `rda` per tensor (embeddings and head averaged), or `average`.
        staleness: how many pushes a cluster may be ahead of the slowest before its answers are held back; None for any.
    """

    outer: OuterSGD
    quorum: int = 1
    grace: float = 0.5
    overlap: int = 1
    merge: Literal["average", "rda"] = "rda"
    staleness: int | None = None


@dataclass(frozen=True)
class Push:
    """A cluster's contribution to one fragment.

    Attributes:
        cluster: index.
        fragment: index.
        version: merges of this fragment that the cluster's base had seen.
        tokens, steps: trained on since its last push of this fragment.
        step_s: seconds per step there.
        delta: fp32, base minus own weights, of the syncer's interval.
    """

    cluster: int
    fragment: int
    version: int
    tokens: float
    steps: int
    step_s: float
    delta: torch.Tensor


@dataclass
class _Open:
    """A fragment that somebody has pushed."""

    since_s: float
    pushes: dict[int, Push] = field(default_factory=dict)
    deadline_s: float | None = None


class Syncer:
    """Global copies of one rail's interval of every fragment.

    Args:
        weights: fp32 per fragment.
        pieces: per fragment, which parameters lie where in it.
        policy: see `Policy`.
        clusters: indices of those that push.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        pieces: Sequence[Sequence[Piece]],
        policy: Policy,
        clusters: Sequence[int],
    ) -> None:
        self.weights = list(weights)
        self.velocities: list[torch.Tensor | None] = [None] * len(weights)
        self.versions = [0] * len(weights)
        self.stalest = 0
        """Largest number of merges a contribution's base was behind."""
        self._pieces = pieces
        self._policy = policy
        self._active = set(clusters)
        self._pushed = dict.fromkeys(clusters, 0)
        self._open: dict[int, _Open] = {}
        self._held: list[tuple[int, int]] = []
        self._weights: dict[int, float] = {}
        """What each cluster's last contribution would have weighed, had it not been late."""

    def offer(self, push: Push, now_s: float) -> None:
        """Take a contribution. A cluster has at most one in here at a time."""
        opened = self._open.setdefault(push.fragment, _Open(now_s))
        opened.pushes[push.cluster] = push
        self._pushed[push.cluster] += 1
        self._look(opened, now_s)

    def leave(self, cluster: int, now_s: float) -> None:
        """A cluster has nothing more to push: nobody waits for it any longer."""
        self._active.discard(cluster)
        for opened in self._open.values():
            self._look(opened, now_s)

    def _look(self, opened: _Open, now_s: float) -> None:
        """Set the deadline of a fragment that has reached its quorum."""
        if len(opened.pushes) < min(self._policy.quorum, max(1, len(self._active))):
            return
        if self._active <= opened.pushes.keys():
            opened.deadline_s = now_s
        elif opened.deadline_s is None:
            step_s = sorted(push.step_s for push in opened.pushes.values())[len(opened.pushes) // 2]
            slack_s = self._policy.overlap * step_s - (now_s - opened.since_s)
            opened.deadline_s = now_s + self._policy.grace * max(0.0, slack_s)

    @property
    def next_deadline_s(self) -> float | None:
        """When there will be something to merge if nothing more comes; None if there will not."""
        deadlines = [opened.deadline_s for opened in self._open.values() if opened.deadline_s is not None]
        return min(deadlines, default=None)

    def merge(self, now_s: float) -> list[tuple[int, int]]:
        """Merge what is due; (cluster, fragment) of every push that is answered with the fragment's global copy now."""
        due = [
            fragment
            for fragment, opened in self._open.items()
            if opened.deadline_s is not None and opened.deadline_s <= now_s
        ]
        for fragment in sorted(due):
            pushes = self._open.pop(fragment).pushes
            self._apply(fragment, [pushes[cluster] for cluster in sorted(pushes)])
            self._held += [(cluster, fragment) for cluster in sorted(pushes)]
        answered = [held for held in self._held if self._may_go_on(held[0])]
        self._held = [held for held in self._held if held not in answered]
        return answered

    def _may_go_on(self, cluster: int) -> bool:
        if self._policy.staleness is None:
            return True
        slowest = min((self._pushed[other] for other in self._active), default=0)
        return cluster not in self._active or self._pushed[cluster] - slowest <= self._policy.staleness

    def _apply(self, fragment: int, pushes: Sequence[Push]) -> None:
        behind = [self.versions[fragment] - push.version for push in pushes]
        self.stalest = max(self.stalest, *behind)
        fresh = [push.tokens * push.tokens / max(push.steps, 1) for push in pushes]
        if not sum(fresh):
            return
        rounds = [late // max(1, len(self._active)) for late in behind]
        weights = [weight / (1 + late) for weight, late in zip(fresh, rounds, strict=True)]
        self._weights |= {push.cluster: weight for push, weight in zip(pushes, fresh, strict=True)}
        usual = sum(fresh) / len(fresh)
        missing = sum(
            self._weights.get(cluster, usual) for cluster in self._active - {p.cluster for p in pushes}
        )
        mean = self._mean(fragment, [push.delta for push in pushes], weights)
        mean *= sum(weights) / (sum(fresh) + missing)
        self.weights[fragment], self.velocities[fragment] = self._policy.outer.step(
            self.weights[fragment], self.velocities[fragment], mean
        )
        self.versions[fragment] += 1

    def _mean(self, fragment: int, deltas: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
        if self._policy.merge == "average" or len(deltas) == 1:
            return average(deltas, weights)
        mean = torch.empty_like(deltas[0])
        for name, first, size in self._pieces[fragment]:
            parts = [delta[first : first + size] for delta in deltas]
            embedding = "embed" in name or "lm_head" in name
            merged = average(parts, weights) if embedding else radial_directional_average(parts, weights)
            mean[first : first + size] = merged
        return mean

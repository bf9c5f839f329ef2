"""Parameter strategies: clusters train apart for a round of H steps, then their trunks are merged.

Each gateway keeps the global copy of its interval. When a fragment is due, a cluster's pseudo-gradient (global copy
minus own fp32 weights) goes through the codec, the weighted mean comes back, and the outer optimizer moves the global
copy; the own weights become a mix of the two (`OuterSGD`; Streaming DiLoCo, arXiv 2501.18512, algorithm 2). Local SGD,
teleportation, DiLoCo and its streaming form differ in H, fragments, overlap, mix and the outer step only.

A sync is two meetings of the fleet. At the first, tokens, health and squared norms of all contributions are exchanged,
and everybody is known to be there; at the second, whether the transfer arrived everywhere, so that all merge or none.
With overlap, `overlap` steps lie between them and the transfer has a rail of its own. A failed sync keeps the own
trunk, leaves outer state and error feedback as they were, and is tried again after the next step. Which fragment is due
follows from the fleet's shared step alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_fragment.codecs import Codec, ErrorFeedback
from moe_fragment.fabric import FAILED, OK, Fabric, FleetError, Transfer
from moe_fragment.fabric.collectives import all_gather, all_reduce, butterfly
from moe_fragment.sync.feedback import loss_of, settle
from moe_fragment.sync.guard import Divergence, Guard
from moe_fragment.sync.merge import DivideBy, decoded_mean
from moe_fragment.sync.outer import OuterSGD
from moe_fragment.sync.report import SyncReport
from moe_fragment.sync.state import (
    FEEDBACK,
    IN_FLIGHT,
    LOST,
    OUTER,
    VELOCITY,
    Piece,
    Reader,
    checksum,
    pieces_of,
    read_interval,
)
from moe_fragment.sync.vector import RailVector


@dataclass(frozen=True)
class Rounds:
    """When a parameter strategy syncs what, and how it merges.

    Attributes:
        every: H, steps between two syncs of the same fragment.
        overlap: steps (tau) between capture and merge; smaller than H / fragments.
        mix: weight (alpha) of the own weights in the merge; 0 takes the global copy, 1 keeps the own.
        outer: moves the global copy.
        butterfly: exact means by recursive doubling.
        weights: `tokens` weighs clusters by the tokens they trained on since the last sync, `equal` does not.
        divide_by: what a sparse mean is over.
        check_every: compare the global copies of all clusters at every n-th merge; 0 never.
    """

    every: int
    outer: OuterSGD
    overlap: int = 0
    mix: float = 0.0
    butterfly: bool = False
    weights: str = "tokens"
    divide_by: DivideBy = "clusters"
    check_every: int = 10


class _Fragment:
    """A part of the trunk that is synced at once; tensors are this gateway's interval, empty on other ranks."""

    def __init__(self, vector: RailVector, masters: Sequence[torch.Tensor], decay: float | None) -> None:
        self.vector = vector
        self.outer = vector.collect(masters)
        self.velocity: torch.Tensor | None = None
        self.feedback = ErrorFeedback(vector.size, decay, torch.device("cpu")) if decay is not None else None
        self.tokens = 0.0
        self.failed_at = 0
        """Step at which its last sync failed, so that it is due after the next one; 0 if it did not."""


@dataclass
class _InFlight:
    """A sync between its two meetings; the same on all ranks but for the transfer."""

    fragment: int
    due: int
    captured: int
    tokens: float
    weights: dict[int, float]
    squares: list[float]
    outer_square: float
    poisoned: list[int]
    """Clusters whose contribution was refused."""
    transfer: Transfer[Any] | None = None
    mean: torch.Tensor | None = None
    lost: tuple[float, float] = (0.0, 0.0)


class ParameterSync:
    """Merges trunk copies; every method is collective over the fleet.

    Args:
        vectors: the fragments; together they are the trunk, or the experts of one replica set. Empty on clusters
            outside of it, which still meet with the others.
        rounds: when and how.
        masters: gives this rank's flat fp32 master weights.
        publish: hands changed master weights to the model.
        codec: how pseudo-gradients look on the wire; None for exact means.
        error_feedback: decay of what the codec lost, None for none.
        guard: watches how far copies are apart; None for no watch.
        among: indices of the clusters that hold copies; None for all.
    """

    def __init__(
        self,
        vectors: Sequence[RailVector],
        rounds: Rounds,
        *,
        masters: Callable[[], list[torch.Tensor]],
        publish: Callable[[], None],
        codec: Codec | None = None,
        error_feedback: float | None = None,
        guard: Guard | None = None,
        among: tuple[int, ...] | None = None,
    ) -> None:
        if rounds.overlap * len(vectors) >= rounds.every:
            raise ValueError(
                f"expected an overlap below every / fragments = {rounds.every / len(vectors):g} steps, got "
                f"{rounds.overlap}: one fragment is under way at a time"
            )
        self._fabric: Fabric = vectors[0].fabric
        self._rounds = rounds
        self._masters = masters
        self._publish = publish
        self._codec = None if codec is None or codec.lossless else codec
        self._guard = guard
        self.among = among if among is not None else self._fabric.everybody
        self.every = rounds.every
        """H as it is now: a guard may have shortened it."""
        decay = error_feedback if self._codec is not None else None
        self._fragments = [_Fragment(vector, masters(), decay) for vector in vectors]
        self._merges = 0
        self._flying: _InFlight | None = None

    # -- steps -------------------------------------------------------------------------------------------------

    def after_step(self, step: int, tokens: float, *, last: bool = False) -> list[SyncReport]:
        """Do what is due after fleet step `step`, counted from 1.

        Args:
            step: shared by all clusters.
            tokens: loss-bearing tokens this cluster trained on in this step; the same on all its ranks.
            last: the run ends here: merge whatever has been trained on since its last sync, without mixing.

        Raises:
            FleetError: the clusters could not meet, or their global copies differ.
        """
        for fragment in self._fragments:
            fragment.tokens += tokens
        reports = []
        if self._flying is not None and (step >= self._flying.due or last):
            reports.append(self._finish(step, last))
        for index in range(len(self._fragments)):
            if self._flying is None and self._is_due(index, step, last):
                reports += self._start(index, step, last)
        return reports

    def _is_due(self, index: int, step: int, last: bool) -> bool:
        fragment = self._fragments[index]
        if last:
            return True
        offset = (index + 1) * self.every // len(self._fragments) - self._rounds.overlap
        return 0 < fragment.failed_at < step or (step - offset) % self.every == 0

    def _start(self, index: int, step: int, last: bool) -> list[SyncReport]:
        """First meeting: capture the pseudo-gradient and send it off; finishes at once without overlap."""
        fragment, fabric = self._fragments[index], self._fabric
        fabric.begin_step(step)
        delta = fragment.outer - fragment.vector.collect(self._masters())
        sums = torch.tensor(
            [delta.double().square().sum(), fragment.outer.double().square().sum()], dtype=torch.float64
        )
        square, outer_square = fabric.cluster_sum(sums).tolist()
        healthy = math.isfinite(square)
        verdict = fabric.verdict(
            OK, [fragment.tokens, float(healthy), square if healthy else 0.0, outer_square]
        )
        if verdict.outcome == FAILED:
            return [self._failed(index, step, 0)]
        rows = verdict.values_CV
        weights = {
            cluster: (rows[cluster][0] if self._rounds.weights == "tokens" else 1.0) * rows[cluster][1]
            for cluster in self.among
        }
        if not any(weights.values()):
            fragment.failed_at = 0
            return [SyncReport(step, index, "empty", poisoned=_poisoned(rows))]
        flying = _InFlight(
            index,
            step + (0 if last else self._rounds.overlap),
            step,
            fragment.tokens,
            weights,
            [row[2] for row in rows],
            rows[self.among[0]][3],
            _poisoned(rows),
        )
        fragment.tokens = 0.0
        if fabric.is_gateway:
            fabric.begin_side(step)
            flying.transfer = self._send(fragment, delta, flying)
        self._flying = flying
        return [self._finish(step, last)] if flying.due <= step else []

    def _send(self, fragment: _Fragment, delta: torch.Tensor, flying: _InFlight) -> Transfer[Any]:
        fabric, side = self._fabric, self._rounds.overlap > 0
        weight = flying.weights.get(fabric.cluster, 0.0)
        if self._codec is None:
            share = weight / sum(flying.weights.values())
            flying.mean = delta * share if weight else torch.zeros_like(delta)
            act = butterfly if self._rounds.butterfly else all_reduce
            return fabric.collective(act, flying.mean, "trunk", self.among, side=side)
        payload = torch.empty(0, dtype=torch.uint8)
        if weight:
            payload = self._encode(fragment, delta, flying)
        return fabric.collective(all_gather, payload, "trunk", self.among, side=side)

    def _encode(self, fragment: _Fragment, delta: torch.Tensor, flying: _InFlight) -> torch.Tensor:
        codec, clusters = self._codec, self._fabric.clusters
        assert codec is not None
        seed = (flying.captured * len(self._fragments) + flying.fragment) * clusters + self._fabric.cluster
        if fragment.feedback is None:
            payload = codec.encode(delta, seed=seed)
        else:
            payload = fragment.feedback.encode(codec, delta, seed=seed)
        flying.lost = loss_of(codec, payload, delta, fragment.feedback)
        return payload

    def _finish(self, step: int, last: bool) -> SyncReport:
        """Second meeting: merge if the transfer arrived everywhere."""
        flying, fabric = self._flying, self._fabric
        assert flying is not None
        self._flying = None
        fragment = self._fragments[flying.fragment]
        arrived = self._arrive(fragment, flying)
        mean = flying.mean if arrived and flying.mean is not None else torch.zeros_like(fragment.outer)
        outer, velocity = self._rounds.outer.step(fragment.outer, fragment.velocity, mean)
        self._merges += 1
        checked = bool(self._rounds.check_every) and self._merges % self._rounds.check_every == 0
        digest = int(
            fabric.cluster_sum(torch.tensor([checksum(outer, fragment.vector.low) if checked else 0]))
        )
        sums = fabric.cluster_sum(
            torch.tensor([mean.double().square().sum(), *flying.lost], dtype=torch.float64)
        )
        if self._rounds.overlap:
            fabric.begin_step(step)
        verdict = fabric.verdict(
            OK if arrived else FAILED, [*sums.tolist(), float(digest >> 32), float(digest & 0xFFFFFFFF)]
        )
        if verdict.outcome == FAILED:
            return self._failed(flying.fragment, step, flying.tokens)
        rows = verdict.values_CV
        self._check_equal({cluster: rows[cluster][3:] for cluster in self.among}, step)
        mean_square = rows[self.among[0]][0]
        divergence = Divergence.of(flying.weights, flying.squares, mean_square, flying.outer_square)
        report = SyncReport(
            step,
            flying.fragment,
            "merged",
            distance=divergence.distance,
            cosine=divergence.cosine,
            codec_error=math.sqrt(sum(row[1] for row in rows) / max(sum(row[2] for row in rows), 1e-300)),
            poisoned=flying.poisoned,
        )
        if self._guard is not None:
            judged = self._guard.judge(divergence, self.every)
            self.every = judged.every
            report = report.judged(judged)
            if judged.refuses:
                self._settle(fragment, False)
                return report
        fragment.outer, fragment.velocity, fragment.failed_at = outer, velocity, 0
        self._settle(fragment, True)
        own = fabric.cluster not in flying.poisoned and not last
        self._merge(fragment, self._rounds.mix if own else 0.0)
        return report

    def _arrive(self, fragment: _Fragment, flying: _InFlight) -> bool:
        """Wait for the transfer and take the mean from it; whether it is there, True on ranks without one.

        What did not arrive is kept as NaN, in a checkpoint too.
        """
        if flying.transfer is not None:
            arrived, payloads = flying.transfer.wait()
            flying.transfer = None
            if arrived and self._codec is not None and self._fabric.cluster in self.among:
                contributing = {
                    cluster: payloads[cluster] for cluster, weight in flying.weights.items() if weight
                }
                flying.mean = decoded_mean(
                    self._codec, contributing, flying.weights, fragment.vector.size, self._rounds.divide_by
                )
            if not arrived:
                flying.mean = torch.full_like(fragment.outer, torch.nan)
        return flying.mean is None or bool(flying.mean.isfinite().all())

    def _merge(self, fragment: _Fragment, mix: float) -> None:
        masters = self._masters()
        merged = fragment.outer
        if mix:
            merged = torch.lerp(fragment.outer, fragment.vector.collect(masters), mix)
        fragment.vector.distribute(merged, masters)
        self._publish()

    def _failed(self, index: int, step: int, tokens: float) -> SyncReport:
        fragment = self._fragments[index]
        reason = str(self._fabric.failure or "another cluster's transfer failed")
        self._fabric.commit(False)  # the next quorum connects anew
        self._settle(fragment, False)
        fragment.tokens += tokens
        fragment.failed_at = step
        return SyncReport(step, index, "failed", reason=reason)

    @staticmethod
    def _settle(fragment: _Fragment, merged: bool) -> None:
        if fragment.feedback is not None:
            settle(fragment.feedback, merged)

    def _check_equal(self, digests: Mapping[int, list[float]], step: int) -> None:
        first, names = self.among[0], self._fabric.names
        for cluster, digest in digests.items():
            if digest != digests[first]:
                raise FleetError(
                    f"after step {step} clusters {names[first]} and {names[cluster]} hold different global copies; "
                    f"restart all clusters from their last common checkpoint"
                )

    # -- state -------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[Piece]:
        """What a checkpoint must hold of this gateway; waits for a transfer under way."""
        for index, fragment in enumerate(self._fragments):
            vector = fragment.vector
            yield from pieces_of(vector, OUTER, fragment.outer)
            if fragment.velocity is not None:
                yield from pieces_of(vector, VELOCITY, fragment.velocity)
            if fragment.feedback is not None:
                yield from pieces_of(vector, FEEDBACK, fragment.feedback.state)
            if self._flying is not None and self._flying.fragment == index:
                self._arrive(fragment, self._flying)
                if self._flying.mean is not None:
                    yield from pieces_of(vector, IN_FLIGHT, self._flying.mean)
                if fragment.feedback is not None and fragment.feedback.pending is not None:
                    yield from pieces_of(vector, LOST, fragment.feedback.pending)

    def numbers(self) -> dict[str, Any]:
        """The rest of the state, for JSON; the same on all ranks of a cluster."""
        flying = None
        if self._flying is not None:
            skipped = ("transfer", "mean", "lost")
            flying = {key: value for key, value in vars(self._flying).items() if key not in skipped}
        return {
            "every": self.every,
            "merges": self._merges,
            "fragments": [
                {
                    "tokens": fragment.tokens,
                    "failed_at": fragment.failed_at,
                    "moved": fragment.velocity is not None,
                }
                for fragment in self._fragments
            ],
            "in_flight": flying,
        }

    def restore(self, read: Reader, numbers: Mapping[str, Any]) -> None:
        """Inverse of `state` and `numbers`, from whatever layout wrote them. No collective.

        Raises:
            ValueError: it was written with another number of fragments.
        """
        if len(numbers["fragments"]) != len(self._fragments):
            raise ValueError(
                f"sync.fragments: the checkpoint has {len(numbers['fragments'])}, the recipe says "
                f"{len(self._fragments)}"
            )
        self.every, self._merges = numbers["every"], numbers["merges"]
        flying = numbers["in_flight"]
        if flying is not None:
            weights = {int(cluster): weight for cluster, weight in flying["weights"].items()}
            self._flying = _InFlight(**{**flying, "weights": weights})
        for index, (fragment, stored) in enumerate(zip(self._fragments, numbers["fragments"], strict=True)):
            vector = fragment.vector
            fragment.tokens, fragment.failed_at = stored["tokens"], stored["failed_at"]
            fragment.outer = read_interval(vector, OUTER, read)
            fragment.velocity = read_interval(vector, VELOCITY, read) if stored["moved"] else None
            if fragment.feedback is not None:
                fragment.feedback.load(read_interval(vector, FEEDBACK, read))
            if self._flying is not None and self._flying.fragment == index:
                self._flying.mean = read_interval(vector, IN_FLIGHT, read)
                if fragment.feedback is not None and self._flying.weights.get(self._fabric.cluster):
                    fragment.feedback.pending = read_interval(vector, LOST, read)

    def digest(self) -> int:
        """Checksum of this cluster's global copy; equal on clusters that agree."""
        total = sum(
            checksum(fragment.outer, fragment.vector.low) * (index + 1)
            for index, fragment in enumerate(self._fragments)
        )
        return int(self._fabric.cluster_sum(torch.tensor([_wrap(total)])))


def _wrap(value: int) -> int:
    """Into the range of int64, as its sums wrap."""
    return (value + 2**63) % 2**64 - 2**63


def _poisoned(rows: list[list[float]]) -> list[int]:
    return [cluster for cluster, row in enumerate(rows) if not row[1]]

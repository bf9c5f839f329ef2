"""Parameter strategies: clusters train apart for a round of H steps, then their trunks are merged.

Each gateway keeps the global copy of its interval. When a fragment is due, a cluster's pseudo-gradient (global copy
minus own fp32 weights) goes through the codec, the weighted mean comes back, and the outer optimizer moves the global
copy; the own weights become a mix of the two (`OuterSGD`; Streaming DiLoCo, arXiv 2501.18512, algorithm 2). Local SGD,
teleportation, DiLoCo and its streaming form differ in H, fragments, overlap, mix and the outer step only.

A sync is two meetings of the fleet. At the first, tokens, health and squared norms of all contributions are exchanged,
and everybody is known to be there; at the second, whether the transfer arrived everywhere, so that all merge or none.
With overlap, `overlap` steps lie between them and the transfer has a rail of its own. A failed sync keeps the own
trunk, leaves outer state and error feedback as they were, and is tried again after the next step. Which fragment is due
follows from the fleet's shared step alone; one that is due while another is under way is owed, and comes next. Every
meeting ends in torchft's vote: clusters that heard different verdicts are a step apart at the next quorum, and told so.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from moe_fragment.codecs import Codec, PoisonedError
from moe_fragment.fabric import FAILED, OK, Fabric, FleetError, Transfer
from moe_fragment.fabric.collectives import all_gather, all_reduce, butterfly
from moe_fragment.sync.feedback import loss_of, settle
from moe_fragment.sync.guard import Divergence, Guard
from moe_fragment.sync.merge import decoded_mean
from moe_fragment.sync.report import SyncReport
from moe_fragment.sync.rounds import Fragment, InFlight, Rounds
from moe_fragment.sync.state import Piece, Reader, checksum
from moe_fragment.sync.vector import RailVector

log = logging.getLogger(__name__)


class ParameterSync:
    """Merges copies; every method is collective over the fleet.

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
        if rounds.overlap and rounds.overlap * len(vectors) >= rounds.every:
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
        self._shortened_at = 0
        decay = error_feedback if self._codec is not None else None
        self._fragments = [Fragment(vector, masters(), decay) for vector in vectors]
        self._flying: InFlight | None = None
        self._moved = False

    # -- steps -------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether every fragment has had its last sync."""
        return all(fragment.ended for fragment in self._fragments)

    def after_step(self, step: int, tokens: float, *, last: bool = False) -> list[SyncReport]:
        """Do what is due after fleet step `step`, counted from 1.

        Args:
            step: shared by all clusters.
            tokens: loss-bearing tokens this cluster trained on in this step; the same on all its ranks.
            last: the run ends here: merge whatever has been trained on since its last sync, without mixing. Called
                again, it does what has failed.

        Raises:
            FleetError: the clusters could not meet, or their global copies differ.
        """
        for index, fragment in enumerate(self._fragments):
            fragment.tokens += tokens
            fragment.ended = fragment.ended and last
            offset = (index + 1) * self.every // len(self._fragments) - self._rounds.overlap
            if (step - offset) % self.every == 0 and not fragment.owed_since:
                fragment.owed_since = step
        reports = []
        if self._flying is not None and (step >= self._flying.due or last):
            reports.append(self._finish(step))
        while self._flying is None and not last and (owed := self._next(step)) is not None:
            reports += self._start(owed, step)
        if last:
            for index, fragment in enumerate(self._fragments):
                if not fragment.ended:
                    reports += self._start(index, step, last=True)
        if self._moved:
            self._publish()
            self._moved = False
        return reports

    def _next(self, step: int) -> int | None:
        """The fragment that has been owed for longest."""
        owed = [
            (fragment.owed_since, index)
            for index, fragment in enumerate(self._fragments)
            if fragment.owed_since and fragment.not_before <= step
        ]
        return min(owed)[1] if owed else None

    def _start(self, index: int, step: int, *, last: bool = False) -> list[SyncReport]:
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
            return [self._failed(index, step)]
        rows = verdict.values_CV
        by_tokens = self._rounds.weights == "tokens"
        weights = {
            cluster: (rows[cluster][0] if by_tokens else 1.0) * rows[cluster][1] for cluster in self.among
        }
        poisoned = [cluster for cluster, row in enumerate(rows) if not row[1]]
        partial = last and not fragment.owed_since
        if not any(weights.values()):
            fragment.owed_since, fragment.ended = 0, last
            fabric.commit(True)
            return [SyncReport(step, index, "empty", poisoned=poisoned)]
        flying = InFlight(
            index,
            captured=step,
            due=step + (0 if last else self._rounds.overlap),
            tokens=fragment.tokens,
            weights=weights,
            squares=[row[2] for row in rows],
            outer_square=rows[self.among[0]][3],
            poisoned=poisoned,
            last=last,
            partial=partial,
        )
        fragment.tokens, fragment.owed_since = 0.0, 0
        lost = [0.0, 0.0, 0.0]
        if fabric.is_gateway:
            flying.transfer, lost = self._send(fragment, delta, flying)
        flying.lost = tuple(fabric.cluster_sum(torch.tensor(lost, dtype=torch.float64)).tolist())
        self._flying = flying
        if flying.due <= step:
            return [self._finish(step)]
        fabric.commit(True)
        return []

    def _send(
        self, fragment: Fragment, delta: torch.Tensor, flying: InFlight
    ) -> tuple[Transfer[Any], list[float]]:
        fabric = self._fabric
        side_step = flying.captured if flying.due > flying.captured else None
        weight = flying.weights.get(fabric.cluster, 0.0)
        if self._codec is None:
            share = weight / sum(flying.weights.values())
            flying.mean = delta * share if weight else torch.zeros_like(delta)
            act = butterfly if self._rounds.butterfly else all_reduce
            arguments: tuple[Any, ...] = (act, flying.mean, "trunk", self.among)
            return fabric.collective(*arguments, side_step=side_step), [0.0, 0.0, 0.0]
        payload, lost = torch.empty(0, dtype=torch.uint8), [0.0, 0.0, 0.0]
        if weight:
            with contextlib.suppress(
                PoisonedError
            ):  # the residual overflows: nothing decodes an empty payload
                payload, lost = self._encode(fragment, delta, flying)
        arguments = (all_gather, payload, "trunk", self.among)
        return fabric.collective(*arguments, side_step=side_step), lost

    def _encode(
        self, fragment: Fragment, delta: torch.Tensor, flying: InFlight
    ) -> tuple[torch.Tensor, list[float]]:
        codec, clusters = self._codec, self._fabric.clusters
        assert codec is not None
        seed = (flying.captured * len(self._fragments) + flying.fragment) * clusters + self._fabric.cluster
        if fragment.feedback is None:
            payload = codec.encode(delta, seed=seed)
        else:
            payload = fragment.feedback.encode(codec, delta, seed=seed)
        return payload, list(loss_of(codec, payload, delta, fragment.feedback))

    def _finish(self, step: int) -> SyncReport:
        """Second meeting: merge if the transfer arrived everywhere."""
        flying, fabric = self._flying, self._fabric
        assert flying is not None
        fragment = self._fragments[flying.fragment]
        arrived = self._arrive(fragment, flying)
        if flying.due > flying.captured:
            fabric.begin_step(step)
        self._flying = None
        mean = flying.mean if arrived and flying.mean is not None else torch.zeros_like(fragment.outer)
        outer, velocity = fragment.outer - mean, fragment.velocity
        if not flying.partial:
            outer, velocity = self._rounds.outer.step(fragment.outer, fragment.velocity, mean)
        check_every = self._rounds.check_every
        checked = bool(check_every) and (fragment.merges + 1) % check_every == 0
        digest = torch.tensor([checksum(outer, fragment.vector.low) if checked else 0])
        square = torch.tensor([mean.double().square().sum()], dtype=torch.float64)
        whole = int(fabric.cluster_sum(digest))
        numbers = [*fabric.cluster_sum(square).tolist(), *flying.lost, whole >> 32, whole & 0xFFFFFFFF]
        verdict = fabric.verdict(OK if arrived else FAILED, [float(number) for number in numbers])
        if verdict.outcome == FAILED:
            fragment.tokens += flying.tokens
            if not flying.partial:
                fragment.owed_since = flying.captured
            return self._failed(flying.fragment, step)
        fabric.commit(True)
        rows = verdict.values_CV
        self._check_equal({cluster: rows[cluster][4:] for cluster in self.among}, step)
        return self._conclude(fragment, flying, rows, step, outer, velocity)

    def _conclude(
        self,
        fragment: Fragment,
        flying: InFlight,
        rows: list[list[float]],
        step: int,
        outer: torch.Tensor,
        velocity: torch.Tensor | None,
    ) -> SyncReport:
        """What the clusters have agreed on happens; unless the guard finds them too far apart."""
        fragment.ended = flying.last
        squares = flying.squares if self._codec is None else [row[3] for row in rows]
        divergence = Divergence.of(flying.weights, squares, rows[self.among[0]][0], flying.outer_square)
        lost, given = sum(row[1] for row in rows), sum(row[2] for row in rows)
        report = SyncReport(
            step,
            flying.fragment,
            "merged",
            distance=divergence.distance,
            cosine=divergence.cosine,
            codec_error=math.sqrt(lost / given) if given else None,
            poisoned=flying.poisoned,
        )
        if self._guard is not None:
            floor = self._rounds.overlap * len(self._fragments) + 1
            judged = self._guard.judge(divergence, self.every, floor)
            if judged.every < self.every and step - self._shortened_at >= self.every:
                self.every, self._shortened_at = judged.every, step
            report = report.judged(judged)
            if judged.refuses:
                fragment.tokens += flying.tokens
                settle(fragment.feedback, False)
                return report
        fragment.outer, fragment.velocity = outer, velocity
        fragment.merges += 1
        settle(fragment.feedback, True)
        if self._fabric.cluster in self.among:
            own = self._fabric.cluster not in flying.poisoned and not flying.last
            self._merge(fragment, self._rounds.mix if own else 0.0)
        return report

    def _arrive(self, fragment: Fragment, flying: InFlight) -> bool:
        """Wait for the transfer and take the mean from it; whether it is there, True on ranks without one.

        What did not arrive is kept as NaN, in a checkpoint too.
        """
        if flying.transfer is not None:
            arrived, payloads = flying.transfer.wait()
            flying.transfer = None
            if arrived and self._codec is not None and self._fabric.cluster in self.among:
                sent = {cluster: payloads[cluster] for cluster, weight in flying.weights.items() if weight}
                try:
                    flying.mean = decoded_mean(
                        self._codec, sent, flying.weights, fragment.vector.size, self._rounds.divide_by
                    )
                except ValueError as error:
                    log.warning("a contribution to the merge of step %s: %s", flying.captured, error)
                    arrived = False
            if not arrived:
                flying.mean = torch.full_like(fragment.outer, torch.nan)
        return flying.mean is None or bool(flying.mean.isfinite().all())

    def _merge(self, fragment: Fragment, mix: float) -> None:
        masters = self._masters()
        merged = fragment.outer
        if mix:
            merged = torch.lerp(fragment.outer, fragment.vector.collect(masters), mix)
        fragment.vector.distribute(merged, masters)
        self._moved = True

    def _failed(self, index: int, step: int) -> SyncReport:
        fragment = self._fragments[index]
        reason = str(self._fabric.failure or "a transfer did not arrive everywhere")
        self._fabric.commit(False)  # the next quorum connects anew
        settle(fragment.feedback, False)
        fragment.not_before = step + 1
        return SyncReport(step, index, "failed", reason=reason)

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
            flying = self._flying if self._flying is not None and self._flying.fragment == index else None
            if flying is not None:
                self._arrive(fragment, flying)
            yield from fragment.state(flying)

    def schedule(self) -> dict[str, Any]:
        """What decides when clusters meet; the same on all of them, or they must not go on together."""
        flying = self._flying
        return {
            "every": self.every,
            "shortened_at": self._shortened_at,
            "fragments": [fragment.schedule() for fragment in self._fragments],
            "in_flight": None if flying is None else [flying.fragment, flying.captured, flying.due],
        }

    def numbers(self) -> dict[str, Any]:
        """The rest of the state, for JSON; the same on all ranks of a cluster."""
        flying = None
        if self._flying is not None:
            flying = {
                key: value for key, value in vars(self._flying).items() if key not in ("transfer", "mean")
            }
        return {
            **self.schedule(),
            "configured": self._rounds.every,
            "own": [
                {"tokens": fragment.tokens, "moved": fragment.velocity is not None}
                for fragment in self._fragments
            ],
            "in_flight": flying,
        }

    def restore(self, read: Reader, numbers: Mapping[str, Any]) -> None:
        """Inverse of `state` and `numbers`, from whatever layout wrote them. No collective.

        Another `every` than the one the checkpoint was written under holds from here on.

        Raises:
            ValueError: it was written with another number of fragments.
        """
        if len(numbers["fragments"]) != len(self._fragments):
            raise ValueError(
                f"sync.fragments: the checkpoint has {len(numbers['fragments'])}, the recipe says "
                f"{len(self._fragments)}"
            )
        if numbers["configured"] == self._rounds.every:
            self.every, self._shortened_at = numbers["every"], numbers["shortened_at"]
        stored = numbers["in_flight"]
        if stored is not None:
            weights = {int(cluster): weight for cluster, weight in stored["weights"].items()}
            self._flying = InFlight(**{**stored, "weights": weights, "lost": tuple(stored["lost"])})
        for index, fragment in enumerate(self._fragments):
            flying = self._flying if self._flying is not None and self._flying.fragment == index else None
            owes = flying is not None and bool(flying.weights.get(self._fabric.cluster))
            fragment.restore(read, numbers["fragments"][index], numbers["own"][index], flying, owes=owes)

    def digest(self) -> int:
        """Checksum of this cluster's global copy; equal on clusters that agree."""
        total = torch.zeros(1, dtype=torch.int64)  # wraps, as checksums do
        for index, fragment in enumerate(self._fragments):
            total += torch.tensor(checksum(fragment.outer, fragment.vector.low)) * (index + 1)
        return int(self._fabric.cluster_sum(total))

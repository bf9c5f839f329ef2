"""Asynchronous strategies: clusters push when they are ready, and train on whatever the others do.

A cluster pushes a fragment every H of its own steps, and goes on; when the answer comes, its base becomes the new
global copy, and its weights that copy plus what it has trained since the push. Nothing waits for the slowest: a
cluster whose last push is not answered yet keeps training, and pushes as soon as it is (a parameter server with a
bound on staleness makes it wait then). See `Syncer` for what is merged when.

Clusters meet at the beginning, for evaluations, and at the end, where what has not been pushed is averaged exactly and
all copies are equal again. A run that resumes begins from the syncer's copy: pushes under way are in the clusters' own
weights still.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from moe_fragment.codecs import Codec, ErrorFeedback
from moe_fragment.fabric import FAILED, OK, Fabric, FleetError
from moe_fragment.fabric.collectives import all_reduce
from moe_fragment.fabric.mail import Mailbox
from moe_fragment.sync.feedback import settle
from moe_fragment.sync.host import Answer, SyncerHost, pack_push, unpack_answer
from moe_fragment.sync.report import SyncReport
from moe_fragment.sync.state import (
    FEEDBACK,
    OUTER,
    SERVED,
    SERVED_VELOCITY,
    Piece,
    Reader,
    pieces_of,
    read_interval,
)
from moe_fragment.sync.syncer import Policy, Push, Syncer
from moe_fragment.sync.vector import RailVector

HOST = 0
"""The cluster whose gateways host the syncer."""


class _Fragment:
    """One fragment; tensors are this gateway's interval, empty on other ranks."""

    def __init__(self, vector: RailVector, masters: Sequence[torch.Tensor], decay: float | None) -> None:
        self.vector = vector
        self.base = vector.collect(masters)
        self.version = 0
        self.feedback = ErrorFeedback(vector.size, decay) if decay is not None else None
        self.tokens = 0.0
        self.steps = 0


@dataclass
class _Pushed:
    """A push that is not answered yet."""

    fragment: int
    captured: torch.Tensor
    """Own weights at the push."""
    healthy: bool
    answer: Future[Answer] | None
    """None on ranks that are no gateway."""


class AsynchronousSync:
    """Merges copies without waiting; every method is collective over the cluster, `begin` and the last step over the
    fleet.

    Args:
        vectors: the fragments; together the trunk, and the experts that all clusters hold.
        policy: what is merged when.
        every: H, own steps between two pushes of a fragment.
        masters: gives this rank's flat fp32 master weights.
        publish: hands changed master weights to the model.
        codec: of pushes; answers are fp32.
        error_feedback: decay of what the codec lost, None for none.
    """

    def __init__(
        self,
        vectors: Sequence[RailVector],
        policy: Policy,
        *,
        every: int,
        masters: Callable[[], list[torch.Tensor]],
        publish: Callable[[], None],
        codec: Codec,
        error_feedback: float | None = None,
    ) -> None:
        self._fabric: Fabric = vectors[0].fabric
        self._policy = policy
        self._every = every
        self._masters = masters
        self._publish = publish
        self._codec = codec
        self._fragments = [_Fragment(vector, masters(), error_feedback) for vector in vectors]
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="push")
        self._mailbox: Mailbox | None = None
        self._host: SyncerHost | None = None
        self._restored: tuple[list[torch.Tensor], list[torch.Tensor | None]] | None = None
        self._pushed: _Pushed | None = None
        self._due: list[int] = []
        self._left = False
        self.ended = False
        """Whether the last merge of the run is done."""
        self._pushes = 0
        self._step_s, self._last_s = 0.0, time.monotonic()

    @property
    def _hosts(self) -> bool:
        return self._fabric.cluster == HOST and self._fabric.is_gateway

    def begin(self, step: int) -> None:
        """Meet the other clusters before the first step of a life, and take the syncer's copy as base.

        Raises:
            FleetError: the clusters could not meet.
        """
        fabric = self._fabric
        fabric.begin_step(step)
        if fabric.is_gateway:
            self._mailbox = fabric.mailbox()
        if self._hosts:
            assert self._mailbox is not None
            syncer = Syncer(
                [fragment.base for fragment in self._fragments],
                [[(name, at, size) for name, _, size, at in f.vector.pieces()] for f in self._fragments],
                self._policy,
                fabric.everybody,
            )
            if self._restored is not None:
                syncer.weights, syncer.velocities = self._restored
            peers = [cluster for cluster in fabric.everybody if cluster != HOST]
            self._host = SyncerHost(syncer, self._mailbox, self._codec, peers)
        for index, fragment in enumerate(self._fragments):
            fragment.base = self._served(index)
            fragment.version = 0
        if fabric.verdict(OK, []).outcome == FAILED:
            raise FleetError(f"the clusters could not begin together: {fabric.failure}")
        fabric.commit(True)
        self._last_s = time.monotonic()

    def _served(self, index: int) -> torch.Tensor:
        """The syncer's copy of a fragment on every gateway; collective over the fleet."""
        fragment = self._fragments[index]
        copy = (
            self._host.snapshot()[0][index].clone()
            if self._host is not None
            else torch.zeros_like(fragment.base)
        )
        if self._fabric.is_gateway:
            self._fabric.collective(all_reduce, copy, "trunk", self._fabric.everybody).wait()
        return copy

    # -- steps -------------------------------------------------------------------------------------------------

    def after_step(self, step: int, tokens: float, *, last: bool = False) -> list[SyncReport]:
        """Do what is due after this cluster's step `step`, counted from 1.

        Args:
            step: of this cluster; others may be elsewhere.
            tokens: loss-bearing tokens it trained on; the same on all its ranks.
            last: the run ends here.

        Raises:
            FleetError: the syncer is gone, or at the end the clusters could not meet.
        """
        now_s = time.monotonic()
        self._step_s += 0.2 * (now_s - self._last_s - self._step_s) if self._step_s else now_s - self._last_s
        self._last_s = now_s
        for index, fragment in enumerate(self._fragments):
            fragment.tokens += tokens
            fragment.steps += 1
            self.ended = self.ended and last
            offset = (index + 1) * self._every // len(self._fragments)
            if (step - offset) % self._every == 0 and index not in self._due:
                self._due.append(index)
        reports = []
        if self._pushed is not None:
            must = last or (self._policy.staleness is not None and bool(self._due))
            if must or self._is_answered():
                reports.append(self._take(step))
        if last:
            return [*reports, *self._finish(step)]
        if self._pushed is None and self._due:
            self._push(self._due.pop(0))
        return reports

    def _is_answered(self) -> bool:
        assert self._pushed is not None
        answer = self._pushed.answer
        return bool(self._fabric.cluster_min(int(answer is None or answer.done())))

    def _push(self, index: int) -> None:
        fragment, fabric = self._fragments[index], self._fabric
        captured = fragment.vector.collect(self._masters())
        delta = fragment.base - captured
        healthy = bool(fabric.cluster_min(int(delta.isfinite().all())))
        if not healthy:
            delta = torch.zeros_like(delta)
        tokens = fragment.tokens if healthy else 0.0
        answer = None
        if fabric.is_gateway:
            push = Push(fabric.cluster, index, fragment.version, tokens, fragment.steps, self._step_s, delta)
            answer = self._submit(push, fragment.feedback if healthy else None)
        self._pushed = _Pushed(index, captured, healthy, answer)
        self._pushes += 1
        fragment.tokens, fragment.steps = 0.0, 0

    def _submit(self, push: Push, feedback: ErrorFeedback | None) -> Future[Answer]:
        seed = self._pushes * self._fabric.clusters + self._fabric.cluster
        if feedback is not None:
            payload = feedback.encode(self._codec, push.delta, seed=seed)
        else:
            payload = self._codec.encode(push.delta, seed=seed)
        if self._host is not None:
            decoded = self._codec.decode(payload, push.delta.numel())
            return self._host.offer(Push(**{**vars(push), "delta": decoded}))
        return self._thread.submit(self._round_trip, pack_push(push, payload))

    def _round_trip(self, message: torch.Tensor) -> Answer:
        assert self._mailbox is not None
        self._mailbox.send(HOST, message)
        return unpack_answer(self._mailbox.receive(HOST))

    def _take(self, step: int) -> SyncReport:
        """Wait for the answer, and go on from it."""
        pushed = self._pushed
        assert pushed is not None
        self._pushed = None
        fragment, fabric = self._fragments[pushed.fragment], self._fabric
        started_s = time.monotonic()
        fabric.everyone(self._check_answer, pushed)
        fabric.clock.exposed_s += time.monotonic() - started_s
        masters = self._masters()
        own = fragment.vector.collect(masters)
        square = torch.zeros(2, dtype=torch.float64)
        if pushed.answer is not None:
            answer = pushed.answer.result()
            since = own - pushed.captured if pushed.healthy else torch.zeros_like(own)
            square[0] = (answer.weights - pushed.captured).double().nan_to_num().square().sum()
            square[1] = answer.weights.double().square().sum()
            fragment.base, fragment.version = answer.weights, answer.version
            own = answer.weights + since
        settle(fragment.feedback, pushed.healthy)
        fragment.vector.distribute(own, masters)
        self._publish()
        distance, norm = fabric.cluster_sum(square).tolist()
        poisoned = [] if pushed.healthy else [fabric.cluster]
        return SyncReport(
            step,
            pushed.fragment,
            "merged",
            distance=math.sqrt(distance / norm) if norm else 0.0,
            poisoned=poisoned,
        )

    @staticmethod
    def _check_answer(pushed: _Pushed) -> None:
        if pushed.answer is not None and (error := pushed.answer.exception()) is not None:
            raise FleetError(f"the syncer is gone: {error}")

    def _finish(self, step: int) -> list[SyncReport]:
        """Say goodbye to the syncer, wait for the others, and merge exactly what nobody has pushed."""
        fabric = self._fabric
        if not self._left:
            self._left = True
            if self._host is not None:
                self._host.leave(HOST)
            elif self._mailbox is not None:
                self._thread.submit(self._mailbox.send, HOST, torch.empty(0, dtype=torch.uint8))
            fabric.gather(f"end of step {step}", None)
        reports = [self._finish_fragment(index, step) for index in range(len(self._fragments))]
        self.ended = all(report.outcome != "failed" for report in reports)
        return reports

    def _finish_fragment(self, index: int, step: int) -> SyncReport:
        fragment, fabric = self._fragments[index], self._fabric
        fabric.begin_step(step)
        delta = fragment.base - fragment.vector.collect(self._masters())
        healthy = fabric.cluster_min(int(delta.isfinite().all()))
        tokens = fragment.tokens * healthy
        rows = fabric.verdict(OK, [tokens, float(healthy)]).values_CV
        total = sum(row[0] for row in rows)
        mean = delta * (tokens / total) if tokens else torch.zeros_like(delta)
        if fabric.is_gateway:
            fabric.collective(all_reduce, mean, "trunk", fabric.everybody).wait()
        weights = self._served(index) - mean
        if fabric.verdict(OK, []).outcome == FAILED:
            fabric.commit(False)  # the next quorum connects anew
            return SyncReport(
                step, index, "failed", reason=str(fabric.failure or "another cluster's transfer failed")
            )
        fabric.commit(True)
        fragment.base, fragment.tokens, fragment.steps = weights, 0.0, 0
        if self._host is not None:
            self._host.syncer.weights[index] = weights
        fragment.vector.distribute(weights, self._masters())
        self._publish()
        poisoned = [cluster for cluster, row in enumerate(rows) if not row[1]]
        return SyncReport(step, index, "merged", poisoned=poisoned)

    # -- state -------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[Piece]:
        """What a checkpoint must hold of this gateway."""
        served = self._host.snapshot() if self._host is not None else None
        for index, fragment in enumerate(self._fragments):
            yield from pieces_of(fragment.vector, OUTER, fragment.base)
            if fragment.feedback is not None:
                yield from pieces_of(fragment.vector, FEEDBACK, fragment.feedback.state)
            if served is not None:
                yield from pieces_of(fragment.vector, SERVED, served[0][index])
                if (velocity := served[1][index]) is not None:
                    yield from pieces_of(fragment.vector, SERVED_VELOCITY, velocity)

    def numbers(self) -> dict[str, Any]:
        """The rest of the state, for JSON; the same on all ranks of a cluster."""
        outstanding = self._pushed
        return {
            "pushes": self._pushes,
            "ended": self.ended,
            "fragments": [
                {"tokens": fragment.tokens, "steps": fragment.steps} for fragment in self._fragments
            ],
            "outstanding": None if outstanding is None else outstanding.fragment,
        }

    def restore(self, read: Reader, numbers: Mapping[str, Any], *, served: Callable[[str], bool]) -> None:
        """Inverse of `state` and `numbers`, from whatever layout wrote them; `begin` follows. No collective.

        Args:
            read: of this cluster's checkpoint.
            numbers: of it.
            served: whether the checkpoint holds a kind at all.
        """
        self._pushes, self.ended = numbers["pushes"], numbers["ended"]
        for fragment, stored in zip(self._fragments, numbers["fragments"], strict=True):
            fragment.tokens, fragment.steps = stored["tokens"], stored["steps"]
            fragment.base = read_interval(fragment.vector, OUTER, read)
            if fragment.feedback is not None:
                fragment.feedback.load(read_interval(fragment.vector, FEEDBACK, read))
        if self._hosts:
            vectors = [fragment.vector for fragment in self._fragments]
            self._restored = (
                [read_interval(vector, SERVED, read) for vector in vectors],
                [
                    read_interval(v, SERVED_VELOCITY, read) if served(SERVED_VELOCITY) else None
                    for v in vectors
                ],
            )

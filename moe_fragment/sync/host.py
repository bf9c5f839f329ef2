"""Runs a `Syncer` on the gateway that hosts it: a thread per peer that takes pushes, and one that merges in time."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from moe_fragment.codecs import Codec
from moe_fragment.fabric.mail import Mailbox
from moe_fragment.fabric.rails import ExchangeError
from moe_fragment.sync.syncer import Push, Syncer

log = logging.getLogger(__name__)

_HEADER = 5
"""Numbers before a push's payload: fragment, version, tokens, steps, seconds per step."""


@dataclass(frozen=True)
class Answer:
    """The global copy (fp32, of the rail's interval) of a fragment after a merge, and how many merges it has seen."""

    version: int
    weights: torch.Tensor


def pack_push(push: Push, payload: torch.Tensor) -> torch.Tensor:
    """A push whose delta is encoded as `payload`, as a message."""
    numbers = [push.fragment, push.version, push.tokens, push.steps, push.step_s]
    return torch.cat([torch.tensor(numbers, dtype=torch.float64).view(torch.uint8), payload])


def pack_answer(answer: Answer) -> torch.Tensor:
    """As a message."""
    version = torch.tensor([answer.version], dtype=torch.float64)
    return torch.cat([version.view(torch.uint8), answer.weights.view(torch.uint8)])


def unpack_answer(body: torch.Tensor) -> Answer:
    """Inverse of `pack_answer`."""
    return Answer(int(body[:8].clone().view(torch.float64)), body[8:].clone().view(torch.float32))


class SyncerHost:
    """A syncer and its threads; thread-safe.

    Args:
        syncer: not used by anybody else while this lives.
        mailbox: to the other clusters' gateways of the same rail.
        codec: of pushes.
        peers: indices of the other clusters.
    """

    def __init__(self, syncer: Syncer, mailbox: Mailbox, codec: Codec, peers: list[int]) -> None:
        self.syncer = syncer
        self._mailbox = mailbox
        self._codec = codec
        self._changed = threading.Condition()
        self._waiting: dict[int, Future[Answer]] = {}
        self._closed = False
        for peer in peers:
            threading.Thread(target=self._serve, args=(peer,), name=f"syncer-{peer}", daemon=True).start()
        threading.Thread(target=self._merge, name="syncer", daemon=True).start()

    def offer(self, push: Push) -> Future[Answer]:
        """Hand in a push; the future ends with the fragment's next global copy."""
        future: Future[Answer] = Future()
        with self._changed:
            self._waiting[push.cluster] = future
            self.syncer.offer(push, time.monotonic())
            self._changed.notify_all()
        return future

    def leave(self, cluster: int) -> None:
        """A cluster pushes no more."""
        with self._changed:
            self.syncer.leave(cluster, time.monotonic())
            self._changed.notify_all()

    def snapshot(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[int]]:
        """Global copies, velocities and versions as of now; merges replace these tensors and never change them."""
        with self._changed:
            return list(self.syncer.weights), list(self.syncer.velocities), list(self.syncer.versions)

    def close(self) -> None:
        """End the merging thread; those of peers end with their connections."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _merge(self) -> None:
        with self._changed:
            while not self._closed:
                for cluster, fragment in self.syncer.merge(time.monotonic()):
                    answer = Answer(self.syncer.versions[fragment], self.syncer.weights[fragment])
                    self._waiting.pop(cluster).set_result(answer)
                deadline_s = self.syncer.next_deadline_s
                self._changed.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))

    def _serve(self, peer: int) -> None:
        try:
            while (body := self._mailbox.receive(peer)).numel():
                fragment, version, tokens, steps, step_s = (
                    body[: 8 * _HEADER].clone().view(torch.float64).tolist()
                )
                size = self.syncer.weights[int(fragment)].numel()
                delta = self._codec.decode(body[8 * _HEADER :].clone(), size)
                push = Push(peer, int(fragment), int(version), tokens, int(steps), step_s, delta)
                self._mailbox.send(peer, pack_answer(self.offer(push).result()))
        except ExchangeError as error:
            log.warning("%s; the others go on without it", error)
        self.leave(peer)

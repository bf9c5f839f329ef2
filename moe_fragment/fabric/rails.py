"""A rail: one process group with exactly one gateway of each cluster, and one collective over it.

Everything that crosses between clusters is an all-to-all of byte buffers: dispatch and combine as they are, an
all-reduce as reduce-scatter plus all-gather (see `Fabric.all_reduce`). One primitive means one place that counts bytes,
holds messages back on emulated links, checks frames and turns errors into a result instead of an exception.

gloo sends only once the peer has posted the receive, which costs a round trip when both ends start an exchange
together. So every gateway keeps two receives per peer posted ahead, of `eager_bytes` each, and a message that fits goes
out at once, its size in its frame: one trip, and no exchange of counts before. What does not fit is announced by its
frame and follows when the peer has posted a receive of the right size, a round trip later.

How it does not deadlock: all gateways of a rail issue the same exchanges in the same order, and each waits for the
messages of all peers before it ends. A gateway is therefore at most one exchange ahead of a peer, for which the peer
has a receive posted. Each exchange is legal with zero bytes for any peer. After a failure a gateway drops its
connections; its peers see them closed, fail too, and everybody meets again at the next quorum.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from moe_fragment.fabric.emulation import LinkEmulator
from moe_fragment.fabric.meter import ByteMeter
from moe_fragment.fabric.wire import FRAME_BYTES, KINDS, Frame, kind_name

log = logging.getLogger(__name__)

_EAGER, _ANNOUNCED = 0, 1
"""Tags of the two kinds of messages."""
_POSTED = 2
"""Receives per peer that are posted ahead."""


class ExchangeError(RuntimeError):
    """A cross-cluster exchange that did not complete; the step it belongs to is discarded."""


@dataclass(frozen=True)
class Peers:
    """Who is on the rail right now: cluster index of each rank of the process group, and our own rank."""

    clusters: tuple[int, ...]
    rank: int


class RailGroup(Protocol):
    """What a rail needs of its process group: point-to-point messages, and who its ranks are."""

    @property
    def peers(self) -> Peers:
        """Who is there."""

    @property
    def generation(self) -> int:
        """Changes with every configuration."""

    def refresh(self) -> None:
        """Take the connections of the newest configuration, if these are not."""

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Any:
        """Start sending."""

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> Any:
        """Start receiving."""

    def drop(self) -> None:
        """Let go of the connections without waiting."""


class Rail:
    """Exchanges bytes with the gateways of the other clusters.

    Args:
        group: reconfigurable process group; a new `generation` means new connections.
        names: cluster names, for messages.
        meter: counts the bytes.
        timeout_s: longest wait for one exchange.
        eager_bytes: size of the receives posted ahead, frame included.
        emulator: holds messages back, or None for the links as they are.
    """

    def __init__(
        self,
        group: RailGroup,
        *,
        names: tuple[str, ...],
        meter: ByteMeter,
        timeout_s: float,
        eager_bytes: int,
        emulator: LinkEmulator | None = None,
    ) -> None:
        self.group = group
        self._names = names
        self._meter = meter
        self._timeout = timedelta(seconds=timeout_s)
        self._eager_bytes = eager_bytes
        self._emulator = emulator
        self._generation = -1
        self._posted: dict[int, deque[tuple[torch.Tensor, Any]]] = {}
        self._step = 0
        self._sequence = 0

    def begin_step(self, step: int) -> None:
        """Number the exchanges that follow as those of fleet step `step`; after a quorum, post receives anew."""
        self._step, self._sequence = step, 0
        self.group.refresh()
        if self.group.generation != self._generation:
            self._generation = self.group.generation
            self._posted = {rank: deque() for rank in self._ranks()}
            for rank in self._posted:
                for _ in range(_POSTED):
                    self._post(rank, torch.empty(self._eager_bytes, dtype=torch.uint8))

    @property
    def emulator(self) -> LinkEmulator | None:
        """Holds messages back, or None."""
        return self._emulator

    @property
    def emulated_round_trip_s(self) -> float:
        """To the peer that is farthest on the emulated links, what a quorum costs at least; 0 without emulation."""
        return self._emulator.slowest_round_trip_s if self._emulator else 0.0

    def drop(self) -> None:
        """Close the connections, so that peers need not wait for their time-out; the next quorum makes new ones.

        They close with the last reference to them, posted receives included.
        """
        self._posted = {}
        self.group.drop()

    def _ranks(self, clusters: Collection[int] | None = None) -> list[int]:
        """Ranks of the process group but our own; of these clusters only, if given."""
        peers = self.group.peers
        return [
            rank
            for rank, cluster in enumerate(peers.clusters)
            if rank != peers.rank and (clusters is None or cluster in clusters)
        ]

    def _post(self, rank: int, buffer: torch.Tensor) -> None:
        self._posted[rank].append((buffer, self.group.recv([buffer], rank, _EAGER)))

    def exchange(
        self,
        kind: str,
        send_C: list[torch.Tensor],
        channel: str,
        expect_C: list[int] | None = None,
        *,
        to: Collection[int] | None = None,
        source: Collection[int] | None = None,
    ) -> list[torch.Tensor]:
        """Send one byte buffer to every cluster and receive one from each; or to and from some of them.

        Every gateway of the rail calls it, also one that has nobody to talk to this time.

        Args:
            kind: one of `wire.KINDS`.
            send_C: uint8 [n] per cluster index (the own entry is ignored), contiguous, in host memory.
            channel: what the meter files it under.
            expect_C: bytes that must come from each cluster, where this side knows them.
            to, source: indices of the clusters to send to and to receive from; None for all. Whom one side names
                in `to` must name it in `source`.

        Returns:
            uint8 [n] per cluster index; empty for the own cluster and for clusters not on the rail.

        Raises:
            ExchangeError: a peer is gone, too late, or out of step, or it sent another size than expected.
        """
        self._sequence += 1
        mine = Frame(self._step, self._sequence, KINDS.index(kind))
        received = [torch.empty(0, dtype=torch.uint8) for _ in self._names]
        deliver_at_s = 0.0
        try:
            sends = []
            for rank in self._ranks(to):
                sends += self._send(rank, mine, send_C)
                cluster = self.group.peers.clusters[rank]
                self._meter.count(cluster, channel, sent=send_C[cluster].numel(), sent_framing=FRAME_BYTES)
            for rank in self._ranks(source):
                cluster = self.group.peers.clusters[rank]
                frame, data = self._receive(rank, mine)
                if expect_C is not None and frame.size != expect_C[cluster]:
                    raise ExchangeError(
                        f"cluster {self._names[cluster]} sent {frame.size} bytes in {self._place(mine)}, "
                        f"expected {expect_C[cluster]}"
                    )
                received[cluster] = data
                deliver_at_s = max(deliver_at_s, frame.deliver_at_s)
                self._meter.count(cluster, channel, received=frame.size, received_framing=FRAME_BYTES)
            for work, _ in sends:
                work.wait(self._timeout)
        except ExchangeError:
            raise
        except Exception as error:  # gloo raises RuntimeError, torchft its own; all of them mean: no exchange
            raise ExchangeError(f"{self._place(mine)} failed: {first_line(error)}") from error
        if self._emulator:
            self._hold(deliver_at_s - time.monotonic(), mine)
        return received

    def _hold(self, wait_s: float, mine: Frame) -> None:
        if wait_s > self._timeout.total_seconds():
            raise ExchangeError(f"{self._place(mine)} would take {wait_s:.0f} s on the emulated link")
        time.sleep(max(0.0, wait_s))

    def _send(self, rank: int, mine: Frame, send_C: list[torch.Tensor]) -> list[tuple[Any, torch.Tensor]]:
        """Start sending to one peer; returns works with the buffers they read from."""
        cluster = self.group.peers.clusters[rank]
        data = send_C[cluster]
        fits = data.numel() + FRAME_BYTES <= self._eager_bytes
        stamp = 0.0
        if self._emulator:
            stamp = self._emulator.reserve(cluster, data.numel() + FRAME_BYTES, announced=not fits)
        head = Frame(mine.step, mine.sequence, mine.kind, data.numel(), stamp).encode()
        if fits:
            message = torch.cat([head, data])
            return [(self.group.send([message], rank, _EAGER), message)]
        return [
            (self.group.send([head], rank, _EAGER), head),
            (self.group.send([data], rank, _ANNOUNCED), data),
        ]

    def _receive(self, rank: int, mine: Frame) -> tuple[Frame, torch.Tensor]:
        """The next message of one peer, which must belong to the exchange `mine`."""
        if not self._posted.get(rank):
            raise ExchangeError("the rail is not connected")
        buffer, work = self._posted[rank].popleft()
        work.wait(self._timeout)
        frame = self._checked_frame(buffer, self.group.peers.clusters[rank], mine)
        if frame.size + FRAME_BYTES <= self._eager_bytes:
            data = buffer[FRAME_BYTES : FRAME_BYTES + frame.size].clone()
            self._post(rank, buffer)
            return frame, data
        data = torch.empty(frame.size, dtype=torch.uint8)
        announced = self.group.recv([data], rank, _ANNOUNCED)
        self._post(rank, buffer)
        announced.wait(self._timeout)
        return frame, data

    def _checked_frame(self, data: torch.Tensor, cluster: int, mine: Frame) -> Frame:
        try:
            frame = Frame.decode(data)
        except ValueError as error:
            raise ExchangeError(f"cluster {self._names[cluster]} sent something else: {error}") from error
        if not frame.agrees(mine):
            raise ExchangeError(
                f"cluster {self._names[cluster]} is at {self._place(frame)}, this cluster at {self._place(mine)}"
            )
        return frame

    @staticmethod
    def _place(frame: Frame) -> str:
        return f"exchange {frame.sequence} ({kind_name(frame.kind)}) of step {frame.step}"


def first_line(error: object) -> str:
    """What an error says, without gloo's advice and without native stack traces."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split(". This is typically", 1)[0]

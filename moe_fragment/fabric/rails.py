"""A rail: one process group with exactly one gateway of each cluster, and one collective over it.

Everything that crosses between clusters is an all-to-all of byte buffers: dispatch and combine as they are, an
all-reduce as reduce-scatter plus all-gather (see `Fabric.all_reduce`). One primitive means one place that counts bytes,
holds messages back on emulated links, checks frames and turns errors into a result instead of an exception.

How it does not deadlock: all gateways of a rail issue the same exchanges in the same order; each is legal with zero
bytes for any peer; after a failure a gateway issues none until the next step, and its peers run into a closed
connection or their time-out, fail too, and everybody meets again at the next quorum.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import AllToAllOptions

from moe_fragment.fabric.emulation import LinkEmulator
from moe_fragment.fabric.meter import ByteMeter
from moe_fragment.fabric.wire import FRAME_BYTES, KINDS, Frame, kind_name

log = logging.getLogger(__name__)


class ExchangeError(RuntimeError):
    """A cross-cluster exchange that did not complete; the step it belongs to is discarded."""


@dataclass(frozen=True)
class Peers:
    """Who is on the rail right now: cluster index of each rank of the process group, and our own rank."""

    clusters: tuple[int, ...]
    rank: int


class Rail:
    """Exchanges bytes with the gateways of the other clusters.

    Args:
        group: a (reconfigurable) process group with `alltoall_base`; its ranks are described by `peers`.
        names: cluster names, for messages.
        meter: counts the bytes.
        timeout_s: longest wait for one exchange.
        emulator: holds messages back, or None for the links as they are.
    """

    def __init__(
        self,
        group: torch.distributed.ProcessGroup,
        *,
        names: tuple[str, ...],
        meter: ByteMeter,
        timeout_s: float,
        emulator: LinkEmulator | None = None,
    ) -> None:
        self.group = group
        self.peers = Peers((0,), 0)
        self._names = names
        self._meter = meter
        self._timeout = timedelta(seconds=timeout_s)
        self._emulator = emulator
        self._step = 0
        self._sequence = 0

    def begin_step(self, step: int) -> None:
        """Number the exchanges that follow as those of fleet step `step`."""
        self._step, self._sequence = step, 0

    def exchange_counts(self, counts_C: list[int], channel: str) -> list[int]:
        """Tell every cluster how many rows it will get from us; returns how many each will send us."""
        send = [torch.tensor([count], dtype=torch.int64).view(torch.uint8) for count in counts_C]
        received = self._all_to_all("counts", send, [8] * len(counts_C), channel, framing_only=True)
        return [int(data.view(torch.int64)) if data.numel() else 0 for data in received]

    def exchange(
        self, kind: str, send_C: list[torch.Tensor], expect_C: list[int], channel: str
    ) -> list[torch.Tensor]:
        """Send one byte buffer to every cluster and receive one from each.

        Args:
            kind: one of `wire.KINDS`.
            send_C: uint8 [n] per cluster index (the own entry is ignored), contiguous, in host memory.
            expect_C: bytes to come from each cluster index.
            channel: what the meter files it under.

        Returns:
            uint8 [expect_C[c]] per cluster index; empty for the own cluster and for clusters not on the rail.

        Raises:
            ExchangeError: a peer is gone, too late, out of step, or the group is not configured.
        """
        return self._all_to_all(kind, send_C, expect_C, channel, framing_only=False)

    def _all_to_all(
        self, kind: str, send_C: list[torch.Tensor], expect_C: list[int], channel: str, *, framing_only: bool
    ) -> list[torch.Tensor]:
        self._sequence += 1
        mine = Frame(self._step, self._sequence, KINDS.index(kind))
        clusters, me = self.peers.clusters, self.peers.rank
        parts, send_sizes, receive_sizes = [], [], []
        for rank, cluster in enumerate(clusters):
            if rank == me:
                send_sizes.append(0)
                receive_sizes.append(0)
                continue
            size = send_C[cluster].numel() + FRAME_BYTES
            stamp = self._emulator.reserve(cluster, size) if self._emulator else 0.0
            parts += [Frame(mine.step, mine.sequence, mine.kind, stamp).encode(), send_C[cluster]]
            send_sizes.append(size)
            receive_sizes.append(expect_C[cluster] + FRAME_BYTES)
        outgoing = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        incoming = torch.empty(sum(receive_sizes), dtype=torch.uint8)
        self._run(outgoing, incoming, send_sizes, receive_sizes, mine)

        received = [torch.empty(0, dtype=torch.uint8) for _ in self._names]
        deliver_at_s = 0.0
        offset = 0
        for rank, cluster in enumerate(clusters):
            if rank == me:
                continue
            frame = self._checked_frame(incoming[offset : offset + FRAME_BYTES], cluster, mine)
            deliver_at_s = max(deliver_at_s, frame.deliver_at_s)
            received[cluster] = incoming[offset + FRAME_BYTES : offset + receive_sizes[rank]]
            offset += receive_sizes[rank]
            sent = 0 if framing_only else send_sizes[rank] - FRAME_BYTES
            got = 0 if framing_only else receive_sizes[rank] - FRAME_BYTES
            framing = send_sizes[rank] if framing_only else FRAME_BYTES
            self._meter.count(cluster, channel, sent=sent, received=got, framing=framing)
        if self._emulator:
            time.sleep(max(0.0, deliver_at_s - time.monotonic()))
        return received

    def _run(
        self,
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        send_sizes: list[int],
        receive_sizes: list[int],
        mine: Frame,
    ) -> None:
        if len(send_sizes) == 1:
            return
        options = AllToAllOptions()
        options.timeout = self._timeout
        try:
            work = self.group.alltoall_base(incoming, outgoing, receive_sizes, send_sizes, options)
            completed = work.wait(self._timeout)
        except Exception as error:  # gloo raises RuntimeError, torchft its own; all of them mean: no exchange
            raise ExchangeError(
                f"{kind_name(mine.kind)} exchange {mine.sequence} of step {mine.step} failed: {first_line(error)}"
            ) from error
        if completed is False:
            raise ExchangeError(
                f"{kind_name(mine.kind)} exchange {mine.sequence} of step {mine.step} timed out"
            )

    def _checked_frame(self, data: torch.Tensor, cluster: int, mine: Frame) -> Frame:
        try:
            frame = Frame.decode(data)
        except ValueError as error:
            raise ExchangeError(f"cluster {self._names[cluster]} sent something else: {error}") from error
        if not frame.agrees(mine):
            raise ExchangeError(
                f"cluster {self._names[cluster]} is at exchange {frame.sequence} ({kind_name(frame.kind)}) of step "
                f"{frame.step}, this cluster at exchange {mine.sequence} ({kind_name(mine.kind)}) of step {mine.step}"
            )
        return frame


def first_line(error: object) -> str:
    """What an error says, without gloo's advice and without native stack traces."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return line.split(". This is typically", 1)[0]

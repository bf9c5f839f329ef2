"""Messages between two gateways, each in its own time: what asynchronous strategies need instead of collectives.

They use a rail's side connections, so that tokens and verdicts never wait behind them. A message is a frame that says
its size, then the body. One thread at a time may send to a cluster, and one receive from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch

from moe_fragment.fabric.emulation import LinkEmulator
from moe_fragment.fabric.meter import ByteMeter
from moe_fragment.fabric.rails import ExchangeError, RailGroup, first_line
from moe_fragment.fabric.wire import FRAME_BYTES, KINDS, Frame

_HEAD, _BODY = 2, 3
"""Tags of the two parts of a message; a rail uses others."""
_PATIENCE = timedelta(days=7)
"""A round may take long, and gloo closes a connection on which a wait has timed out."""


class Mailbox:
    """Sends and receives messages; see the module docstring.

    Args:
        group: side connections of a rail, configured.
        names: cluster names, for messages.
        meter: counts the bytes, on channel `trunk`.
        emulator: holds messages back, or None for the links as they are.
    """

    def __init__(
        self,
        group: RailGroup,
        *,
        names: Sequence[str],
        meter: ByteMeter,
        emulator: LinkEmulator | None = None,
    ) -> None:
        self._group = group
        self._names = names
        self._meter = meter
        self._emulator = emulator

    def send(self, cluster: int, body: torch.Tensor) -> None:
        """Send `body` (uint8 1-D, host memory) and wait until it is taken.

        Raises:
            ExchangeError: the cluster is gone.
        """
        stamp = 0.0
        if self._emulator:
            stamp = self._emulator.reserve(cluster, body.numel() + FRAME_BYTES)
        head = Frame(0, 0, KINDS.index("trunk"), body.numel(), stamp).encode()
        try:
            works = [self._group.send([head], self._rank(cluster), _HEAD)]
            if body.numel():
                works.append(self._group.send([body], self._rank(cluster), _BODY))
            for work in works:
                work.wait(_PATIENCE)
        except Exception as error:  # gloo raises RuntimeError, torchft its own
            raise ExchangeError(f"no message to {self._names[cluster]}: {first_line(error)}") from None
        self._meter.count(cluster, "trunk", sent=body.numel(), sent_framing=FRAME_BYTES)

    def receive(self, cluster: int) -> torch.Tensor:
        """The next message of a cluster, however long it takes: uint8 1-D.

        Raises:
            ExchangeError: the cluster is gone.
        """
        head = torch.empty(FRAME_BYTES, dtype=torch.uint8)
        try:
            self._group.recv([head], self._rank(cluster), _HEAD).wait(_PATIENCE)
            frame = Frame.decode(head)
            body = torch.empty(frame.size, dtype=torch.uint8)
            if frame.size:
                self._group.recv([body], self._rank(cluster), _BODY).wait(_PATIENCE)
        except Exception as error:
            raise ExchangeError(f"no message from {self._names[cluster]}: {first_line(error)}") from None
        if self._emulator:
            time.sleep(max(0.0, frame.deliver_at_s - time.monotonic()))
        self._meter.count(cluster, "trunk", received=frame.size, received_framing=FRAME_BYTES)
        return body

    def _rank(self, cluster: int) -> int:
        return self._group.peers.clusters.index(cluster)

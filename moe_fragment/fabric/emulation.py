"""Emulated links: each message is held back for as long as the topology's link would take.

A directed link is a FIFO queue with a rate and a delay (and a second queue for the side rail, with which it shares
the rate). A sender reserves `bytes / rate` behind what is already
queued on that link (all processes of this machine share one memory-mapped table of queue ends), adds the one-way
delay and jitter, and stamps the message with the moment it may be seen; the receiver waits until then. The bytes
themselves move at the machine's own speed, so emulated time passes while the receiver computes: overlap works as on a
real link. Clocks are `time.monotonic()`, which all processes of one machine share; hence one machine only.

Packet loss does not lose data on a reliable transport, it lowers its rate: the rate is capped at Mathis et al.,
"The macroscopic behavior of the TCP congestion avoidance algorithm" (1997), MSS / RTT * sqrt(3/2) / sqrt(loss).
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import random
import struct
import tempfile
import threading
import time
from pathlib import Path

from moe_fragment.topology import Topology

MSS_BYTES = 1460
_SLOT = struct.Struct("d")
_THREADS = threading.Lock()
"""File locks exclude other processes only."""


class LinkEmulator:
    """Delivery times for messages between the clusters of `topology`, shared by all processes of one machine.

    Args:
        topology: the fleet, whose links give rate (bytes/s), one-way delay (s), jitter (s) and loss per direction.
        cluster: index of the cluster this process belongs to (the sender).
        key: what the processes of one fleet have in common, names the shared table.
        seed: of the jitter; drawn per message, so it is repeatable for one process.
        side: for the side rail, whose messages have a queue of their own.
    """

    def __init__(
        self, topology: Topology, cluster: int, *, key: str, seed: int = 0, side: bool = False
    ) -> None:
        self._clusters = len(topology.names)
        self._cluster = cluster
        self._side = side
        self._random = random.Random(f"{seed}-{cluster}-{os.environ.get('RANK', 0)}{'-side' * side}")
        self._rate: dict[int, float] = {}
        self._delay: dict[int, float] = {}
        self._jitter: dict[int, float] = {}
        self._round_trip: dict[int, float] = {}
        for peer, name in enumerate(topology.names):
            if peer == cluster:
                continue
            link = topology.link(topology.names[cluster], name)
            back = topology.link(name, topology.names[cluster])
            self._round_trip[peer] = link.one_way_s + back.one_way_s
            lossy = lossy_rate(link.loss, max(self._round_trip[peer], 1e-6))
            self._rate[peer] = min(link.bandwidth_bytes_per_s, lossy)
            self._delay[peer] = link.one_way_s
            self._jitter[peer] = link.jitter_s
        self.path = table_path(key)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(self._file, 2 * self._clusters**2 * _SLOT.size)
        self._table = mmap.mmap(self._file, 2 * self._clusters**2 * _SLOT.size)

    @property
    def slowest_round_trip_s(self) -> float:
        """Round trip (s) to the farthest peer, without jitter."""
        return max(self._round_trip.values(), default=0.0)

    def reserve(self, peer: int, size_bytes: int, *, announced: bool = False) -> float:
        """Queue a message to cluster `peer`; returns the monotonic time (s) at which it arrives there.

        An announced message starts when the peer has answered its announcement, a round trip later.
        """
        slots = [((2 * self._cluster + side) * self._clusters + peer) * _SLOT.size for side in (False, True)]
        own, other = slots[self._side], slots[not self._side]
        with _THREADS:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                begins = max(_SLOT.unpack_from(self._table, own)[0], time.monotonic())
                leaves = begins + size_bytes / self._rate[peer]
                # What the other queue still has to send shares the link: each gets half until one is empty.
                leaves += min(leaves - begins, max(0.0, _SLOT.unpack_from(self._table, other)[0] - begins))
                _SLOT.pack_into(self._table, own, leaves)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
        delay = self._delay[peer] + (self._round_trip[peer] if announced else 0.0)
        return leaves + delay + self._random.uniform(0.0, self._jitter[peer])

    def close(self) -> None:
        """Release the shared table; the last process to leave finds it already unlinked, which is fine."""
        self._table.close()
        os.close(self._file)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()


def table_path(key: str) -> Path:
    """Where the processes of one machine share the ends of a fleet's queues."""
    return Path(tempfile.gettempdir()) / f"moe_fragment-links-{key}"


def lossy_rate(loss: float, round_trip_s: float) -> float:
    """Highest rate (bytes/s) of one TCP flow at packet loss `loss` (fraction), Mathis et al. (1997), eq. 3."""
    if loss <= 0.0:
        return math.inf
    return MSS_BYTES / round_trip_s * math.sqrt(1.5 / loss)

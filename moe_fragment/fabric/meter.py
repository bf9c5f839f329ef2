"""Counts every byte that crosses between clusters, by peer and channel.

Payload (rows, ids, routing weights, gradients) and framing (frame headers, row counts) are kept apart, so that
payload can be held against its closed form to the byte and framing against its share. What TCP adds is not seen.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass

CHANNELS = ("dispatch", "combine", "trunk", "control", "heal")
"""`dispatch` and `combine` include their backward; `control` is votes and membership."""


@dataclass
class Traffic:
    """Bytes between this cluster and one peer on one channel."""

    sent: int = 0
    received: int = 0
    sent_framing: int = 0
    received_framing: int = 0
    messages: int = 0
    """Sent ones."""


class ByteMeter:
    """Thread-safe counters; `drain()` hands over what was counted since the last call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[int, str], Traffic] = defaultdict(Traffic)

    def count(
        self,
        peer: int,
        channel: str,
        *,
        sent: int = 0,
        received: int = 0,
        sent_framing: int = 0,
        received_framing: int = 0,
    ) -> None:
        """Count one message to or from cluster `peer`: payload and framing bytes."""
        with self._lock:
            traffic = self._counts[peer, channel]
            traffic.sent += sent
            traffic.received += received
            traffic.sent_framing += sent_framing
            traffic.received_framing += received_framing
            traffic.messages += sent_framing > 0

    def drain(self, without: str = "") -> dict[tuple[int, str], Traffic]:
        """The counters since the last drain, by (peer cluster index, channel); one channel may stay where it is."""
        with self._lock:
            counts = {key: traffic for key, traffic in self._counts.items() if key[1] != without}
            for key in counts:
                del self._counts[key]
        return counts

"""What one TCP path carries: header overhead, window-limited streams, slow start. One direction, no sharing.

The constants are fitted on one row each; every collective is built on them.
"""

from __future__ import annotations

import math

WIRE_OVERHEAD = 1.0077
"""Bytes on the wire per byte of payload. Fitted on one row (NCCL, 64 MiB, 1 Gbit/s, no delay: .541 s;
tc_cluster_setting, p2p.md); headers of 9001-byte frames alone would be 1.006."""

WINDOW_BYTES = 2.7e6
"""Payload one TCP stream has under way. Fitted on one row (US to EU, 103.1 ms, one stream: .21 Gbit/s;
hivemind-multi-cloud, arXiv:2306.03163)."""

RAMP_S = 0.94
"""Seconds: a path's streams together reach ``nic / (1 + rtt / RAMP_S)``. Fitted on one row (US to EU, 103.1 ms,
80 streams: 6.22 of 6.9 Gbit/s); the size of what slow start costs a ten-second measurement."""

GLOO_CEILING_BYTES_PER_S = 5e9 / 8
"""What gloo's one thread and stream move at most. Fitted on one row (64 MiB on an unshaped 10 Gbit/s path: .107
s)."""


def stream_rate(rtt_s: float, streams: int, nic_bytes_per_s: float) -> float:
    """Payload bytes per second over parallel TCP streams: each moves a window per round trip, up to the card.

    Args:
        rtt_s: round trip, seconds; 0 leaves only the card.
        streams: parallel connections.
        nic_bytes_per_s: what the path carries with the shortest round trip.

    Source: window over round trip (RFC 7323, section 1.1); figures of arXiv:2306.03163. Loss is not modelled.
    """
    windows = streams * WINDOW_BYTES / rtt_s if rtt_s else math.inf
    return min(windows, nic_bytes_per_s / (1 + rtt_s / RAMP_S))


def nccl_send_time(size_bytes: float, bandwidth_bytes_per_s: float, one_way_s: float) -> float:
    """Seconds from the first byte sent to the last received, over NCCL's several sockets.

    Serialisation, one delay, and slow start: the windows begin at ``WINDOW_BYTES`` together and double every round
    trip until the path is full, and the sender idles for the rest of each of these round trips.
    """
    rate, rtt = bandwidth_bytes_per_s / WIRE_OVERHEAD, 2 * one_way_s
    idle, window, left = 0.0, WINDOW_BYTES, size_bytes
    while window < rate * rtt and window < left:
        idle += rtt - window / rate
        left -= window
        window *= 2
    return one_way_s + size_bytes / rate + idle


def gloo_send_time(size_bytes: float, bandwidth_bytes_per_s: float, one_way_s: float) -> float:
    """Seconds for one message over gloo's single TCP stream.

    Serialisation and waiting for the window overlap but for where they meet, which a norm of order 4 of the two
    describes; the order is fitted on one row (64 MiB, 10 ms, 1 Gbit/s: .620 s; tc_cluster_setting, p2p.md).
    """
    serial = WIRE_OVERHEAD * size_bytes / min(bandwidth_bytes_per_s, GLOO_CEILING_BYTES_PER_S)
    windows = size_bytes * 2 * one_way_s / WINDOW_BYTES
    return one_way_s + (serial**4 + windows**4) ** 0.25

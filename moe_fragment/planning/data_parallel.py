"""Seconds of one synchronisation of data-parallel copies, by method, between equal links.

Good for the order of the methods, not for seconds: the published measurements include a training loop's own
overhead (they are 1.1 to 1.4 times these), and at 50 ms they order the methods differently.
"""

from __future__ import annotations

from typing import Literal

from moe_fragment.planning.all_reduce import NCCL_DELAYS, ring_bytes, ring_time
from moe_fragment.planning.network import WIRE_OVERHEAD

Method = Literal["allreduce", "central_ps", "sharded_ps"]


def sync_time(
    method: Method, size_bytes: float, nodes: int, bandwidth_bytes_per_s: float, one_way_s: float
) -> float:
    """Seconds to give every node the sum of all copies.

    ``allreduce`` is one ring. ``sharded_ps`` (all-to-all, then all-gather) moves the same bytes in two collectives,
    each with its own delays. ``central_ps`` (reduce, then broadcast, both chained) moves the whole vector through
    every link twice. Source of the methods: tc_cluster_setting, Simulate_DP.md.
    """
    if nodes == 1:
        return 0.0
    if method == "allreduce":
        return ring_time("nccl", size_bytes, nodes, bandwidth_bytes_per_s, one_way_s)
    moved = ring_bytes(size_bytes, nodes) if method == "sharded_ps" else 2 * size_bytes
    return WIRE_OVERHEAD * moved / bandwidth_bytes_per_s + 2 * NCCL_DELAYS * one_way_s

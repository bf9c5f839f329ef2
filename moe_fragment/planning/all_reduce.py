"""Seconds and bytes of an all-reduce: a ring over NCCL or gloo, and a hierarchy of rings.

A ring moves ``2 (n - 1) / n`` of the vector through every node, each way (Patarasuk and Yuan 2009). What differs is
what a round trip costs: NCCL keeps many pieces under way, gloo waits for a window at a time.
"""

from __future__ import annotations

from typing import Literal

from moe_fragment.planning.network import GLOO_CEILING_BYTES_PER_S, WINDOW_BYTES, WIRE_OVERHEAD

Backend = Literal["nccl", "gloo"]

NCCL_DELAYS = 4.5
"""One-way delays that an NCCL all-reduce takes beyond serialisation, for any number of nodes. Fitted on one row
(4 nodes, 128 MiB, 10 ms, 1 Gbit/s: 1.669 s; tc_cluster_setting, allreduce.md); the rows of 8 and 16 nodes and
of 5 and 1 ms were not used and show 4.2 to 5.6."""

FABRIC_LATENCY_S = 0.38e-3
"""Fixed seconds of a hierarchical all-reduce inside a data centre. Fitted on the 1, 2 and 4 MiB rows of the
NCCL sweep over 4 nodes of 8 B200 (378, 391 and 430 us)."""


def ring_bytes(size_bytes: float, nodes: int) -> float:
    """Payload bytes each node sends (and receives) to all-reduce ``size_bytes`` over ``nodes``."""
    return 2 * (nodes - 1) / nodes * size_bytes


def ring_time(
    backend: Backend, size_bytes: float, nodes: int, bandwidth_bytes_per_s: float, one_way_s: float
) -> float:
    """Seconds of a ring all-reduce between nodes with one link each way.

    NCCL: serialisation plus ``NCCL_DELAYS`` delays. gloo: serialisation plus a round trip per window, because a
    piece is reduced before it is sent on and nothing else is under way. One node takes no time.

    Args:
        bandwidth_bytes_per_s: of each node's link, one direction.
        one_way_s: delay between any two neighbours, one way.
    """
    if nodes == 1:
        return 0.0
    moved = ring_bytes(size_bytes, nodes)
    if backend == "nccl":
        return WIRE_OVERHEAD * moved / bandwidth_bytes_per_s + NCCL_DELAYS * one_way_s
    rate = min(bandwidth_bytes_per_s, GLOO_CEILING_BYTES_PER_S)
    return WIRE_OVERHEAD * moved / rate + moved * 2 * one_way_s / WINDOW_BYTES


def hierarchical_wan_bytes(size_bytes: float, nodes: int, gpus_per_node: int) -> float:
    """Payload bytes each accelerator sends to other nodes: a ring of ``nodes`` over its share of the vector."""
    return ring_bytes(size_bytes / gpus_per_node, nodes)


def hierarchical_time(
    size_bytes: float,
    nodes: int,
    gpus_per_node: int,
    intra_bytes_per_s: float,
    inter_bytes_per_s: float,
) -> float:
    """Seconds of reduce-scatter inside each node, all-reduce across, all-gather inside, one after another.

    Args:
        intra_bytes_per_s: of each accelerator inside its node, one direction.
        inter_bytes_per_s: of each accelerator to other nodes, one direction.

    Phases are not overlapped, so that this is an upper bound for a library that pipelines them (NCCL's sweep from
    512 MiB to 16 GiB takes 7 to 12 % less). ``FABRIC_LATENCY_S`` fits a data centre; longer links add their delays.
    """
    if nodes * gpus_per_node == 1:
        return 0.0
    inside = ring_bytes(size_bytes, gpus_per_node) / intra_bytes_per_s
    across = hierarchical_wan_bytes(size_bytes, nodes, gpus_per_node) / inter_bytes_per_s
    return inside + across + FABRIC_LATENCY_S

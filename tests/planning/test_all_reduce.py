"""Collectives: measured figures that no constant was fitted on, and what must hold for any."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.planning.all_reduce import (
    hierarchical_time,
    hierarchical_wan_bytes,
    ring_bytes,
    ring_time,
)
from moe_fragment.planning.data_parallel import sync_time

GBPS = 1e9 / 8
rates = st.floats(1e3, 1e12)
nodes = st.integers(1, 1000)
sizes = st.floats(1, 1e12)
delays = st.floats(0, 1)
more = st.floats(1, 100)

MEASURED_MS = [
    # BinhangYuan/tc_cluster_setting, results/allreduce.md: nodes, MiB, ms one way, Gbit/s, gloo, NCCL.
    (4, 128, 1, 5, 485, 329),
    (4, 128, 5, 2, 1517, 835),
    (4, 256, 10, 1, 5909, 3298),
    (8, 128, 1, 5, 537, 383),
    (8, 128, 5, 2, 1814, 970),
    (8, 128, 10, 1, 3582, 1940),
    (8, 256, 10, 1, 6999, 3841),
    (16, 128, 1, 5, 612, 410),
    (16, 128, 10, 1, 3873, 2076),
    (16, 256, 5, 2, 3861, 2057),
]


@pytest.mark.parametrize(("count", "mib", "delay_ms", "gbps", "gloo_ms", "nccl_ms"), MEASURED_MS)
def test_rings_over_delayed_links(
    count: int, mib: int, delay_ms: float, gbps: float, gloo_ms: float, nccl_ms: float
) -> None:
    link = mib * 2**20, count, gbps * GBPS, delay_ms / 1e3
    assert ring_time("nccl", *link) * 1e3 == pytest.approx(nccl_ms, rel=0.01)
    assert ring_time("gloo", *link) * 1e3 == pytest.approx(gloo_ms, rel=0.06)


def test_ring_bytes_by_hand() -> None:
    assert ring_bytes(123_386_880, 4) == 185_080_320  # Adnan082/diloco-measured, counted there
    assert ring_bytes(100, 1) == 0


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@given(size=sizes, count=nodes, rate=rates, delay=delays, factor=more)
def test_rings_are_monotone(
    backend: str, size: float, count: int, rate: float, delay: float, factor: float
) -> None:
    assert backend in ("nccl", "gloo")
    time = ring_time(backend, size, count, rate, delay)
    assert time >= ring_bytes(size, count) / rate
    assert ring_time(backend, size * factor, count, rate, delay) >= time
    assert ring_time(backend, size, count + 1, rate, delay) >= time
    assert ring_time(backend, size, count, rate, delay * factor) >= time
    assert ring_time(backend, size, count, rate * factor, delay) <= time


@pytest.mark.parametrize(
    ("mib", "bus_gb_per_s"),
    # A published NCCL sweep over 4 nodes of 8 B200, as bus bandwidth; the latency was fitted on 1 to 4 MiB.
    [(16, 64.43), (64, 156.74), (512, 326.9), (4096, 377.34), (16384, 381.8)],
)
def test_hierarchy_of_b200(mib: int, bus_gb_per_s: float) -> None:
    measured = ring_bytes(mib * 2**20, 32) / (bus_gb_per_s * 1e9)
    assert hierarchical_time(mib * 2**20, 4, 8, 900e9, 50e9) == pytest.approx(measured, rel=0.15)


def test_what_crosses_sites_does_not_depend_on_the_accelerators_of_a_site() -> None:
    for gpus in (1, 4, 8):
        assert gpus * hierarchical_wan_bytes(2**32, 4, gpus) == pytest.approx(ring_bytes(2**32, 4))
    assert hierarchical_time(2**32, 1, 1, 1e9, 1e9) == 0


@pytest.mark.parametrize(
    ("count", "gbps", "delay_ms"), [(4, 5, 1), (4, 2, 5), (4, 1, 10), (8, 5, 1), (8, 2, 5), (8, 1, 10)]
)
def test_order_of_the_ways_to_sync_copies(count: int, gbps: float, delay_ms: float) -> None:
    # tc_cluster_setting, results/Simulate_DP.md, 256 MB: in all six settings all-reduce, sharded, central.
    link = 256e6, count, gbps * GBPS, delay_ms / 1e3
    ring, sharded, central = (
        sync_time(method, *link) for method in ("allreduce", "sharded_ps", "central_ps")
    )
    assert ring < sharded < central


def test_a_single_node_syncs_for_free() -> None:
    assert sync_time("central_ps", 1e9, 1, 1e9, 0.1) == 0

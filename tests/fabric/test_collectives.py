"""Collectives of whole vectors: sums among all or some clusters, to the bit and to the byte."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fragment.fabric import Fabric
from moe_fragment.fabric.collectives import all_gather, all_reduce, butterfly, mixing_round
from tests.fabric.pair import EAGER_BYTES, fabrics, together


def sent(fabric: Fabric) -> int:
    """Payload bytes since the last call."""
    return sum(traffic.sent for traffic in fabric.meter.drain().values())


@settings(max_examples=40, deadline=None)
@given(
    clusters=st.integers(1, 8),
    out=st.sets(st.integers(0, 7), max_size=7),
    size=st.sampled_from([0, 1, 7, 64, EAGER_BYTES]),
    act=st.sampled_from([all_reduce, butterfly]),
)
def test_sums_among_some(clusters: int, out: set[int], size: int, act: Any) -> None:
    among = tuple(cluster for cluster in range(clusters) if cluster not in out) or (0,)
    vectors = [torch.randn(size, generator=torch.Generator().manual_seed(at)) for at in range(clusters)]
    expected = torch.stack([vectors[cluster].double() for cluster in among]).sum(0)

    def run(fabric: Fabric) -> Any:
        vector = vectors[fabric.cluster].clone()
        fabric.begin_step(0)
        for _ in range(2):  # the numbering of exchanges stays in step for those who take no part
            vector = vectors[fabric.cluster].clone()
            ok, _ = fabric.collective(act, vector, "trunk", among).wait()
            assert ok
        return vector

    results = together(fabrics(clusters), run)
    for cluster, result in enumerate(results):
        if cluster in among:
            assert torch.equal(result, results[among[0]])
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(result, vectors[cluster])


@pytest.mark.parametrize("clusters", [2, 3, 4, 8])
def test_bytes(clusters: int) -> None:
    """Ring-equivalent all-reduce 2 (C - 1) / C S, all-gather (C - 1) S, butterfly log2 C S, mixing S."""
    size = 840  # divisible by all of them

    def run(fabric: Fabric) -> Any:
        fabric.begin_step(0)
        found = []
        everybody = fabric.everybody
        for act, more in ((all_reduce, ()), (butterfly, ()), (mixing_round, (0,))):
            fabric.collective(act, torch.ones(size), "trunk", everybody, *more).wait()
            found.append(sent(fabric) / (4 * size))
        fabric.collective(all_gather, torch.ones(100, dtype=torch.uint8), "trunk", everybody).wait()
        return [*found, sent(fabric) / 100]

    for found in together(fabrics(clusters), run):
        rounds = {2: 1, 4: 2, 8: 3}.get(clusters)
        assert found[0] == pytest.approx(2 * (clusters - 1) / clusters)
        assert found[1] == rounds if rounds else found[1] <= 2
        assert found[2:] == [1, clusters - 1]


@pytest.mark.parametrize("clusters", range(1, 9))
def test_mixing_keeps_the_mean_and_comes_together(clusters: int) -> None:
    """With 2^m clusters m rounds are an exact average; with others copies come closer and the mean stays."""
    values = torch.arange(1.0, clusters + 1)

    def run(fabric: Fabric) -> Any:
        vector = values[fabric.cluster].repeat(5)
        seen = []
        for number in range(12):
            fabric.begin_step(number)
            fabric.collective(mixing_round, vector, "trunk", fabric.everybody, number).wait()
            seen.append(float(vector[0]))
        return seen

    results = torch.tensor(together(fabrics(clusters), run)).view(clusters, 12)
    torch.testing.assert_close(results.mean(0), values.mean().expand(12))
    assert (results[:, -1] - values.mean()).abs().max() < 0.02
    if clusters in (1, 2, 4, 8):
        rounds = clusters.bit_length() - 1
        assert torch.equal(results[:, max(rounds, 1) - 1], values.mean().expand(clusters))


def test_gathers_payloads_of_any_size() -> None:
    payloads = [torch.full((size,), size % 251, dtype=torch.uint8) for size in (0, 3, 2 * EAGER_BYTES)]

    def run(fabric: Fabric) -> Any:
        fabric.begin_step(0)
        return fabric.collective(all_gather, payloads[fabric.cluster], "trunk", (0, 1, 2)).wait()

    for ok, heard in together(fabrics(3), run):
        assert ok
        assert all(torch.equal(one, other) for one, other in zip(heard, payloads, strict=True))


def test_side_rail_outlasts_steps_and_fails_by_itself() -> None:
    """A transfer on the side rail flies while steps go on; its failure fails no step."""

    barrier = threading.Barrier(2)

    def run(fabric: Fabric) -> Any:
        fabric.begin_step(0)
        vector = torch.ones(10) * (fabric.cluster + 1)
        transfer = fabric.collective(all_reduce, vector, "trunk", fabric.everybody, side_step=0)
        for step in (1, 2):
            fabric.begin_step(step)
            fabric.collective(all_reduce, torch.ones(3), "trunk", fabric.everybody).wait()
        ok, _ = transfer.wait()
        assert ok
        assert vector[0] == 3.0
        if fabric.cluster:
            assert fabric._side is not None
            fabric._side.drop()
        fabric.begin_step(3)
        transfer = fabric.collective(all_reduce, vector, "trunk", fabric.everybody, side_step=3)
        ok, _ = transfer.wait()
        barrier.wait()  # a quorum, which waits longer than a message may take
        return ok, fabric.verdict(2, []).outcome

    assert together(fabrics(2, timeout_s=1.0), run) == [(False, 2), (False, 2)]

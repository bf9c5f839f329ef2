"""Rounds and merges: published trajectories, equality to the bit, failures, poison, state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fragment.codecs import parse_codec
from moe_fragment.fabric import Fabric, FleetError
from moe_fragment.sync import OuterSGD, Rounds
from tests.fabric.pair import fabrics, together
from tests.fleet.harness import topology_of
from tests.sync.copies import AVERAGE, SIZES, Copy, synced

TRAJECTORIES: dict[tuple[int, float], tuple[list[float], list[float]]] = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (0, 1.0): ([1 - 2.0 * step for step in range(16)],) * 2,
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
    (1, 1.0): ([1 - 2.0 * step for step in range(16)],) * 2,
}
"""torchft's fixtures of streaming DiLoCo (pytorch/torchft, DiLoCoMockedUpdateTest): gradient 2, inner rate 1, outer
plain SGD with rate 2, a sync of each of two one-layer fragments every 6 steps, by (delay, alpha)."""


@pytest.mark.parametrize(("delay", "alpha"), TRAJECTORIES)
def test_streaming_trajectories(delay: int, alpha: float) -> None:
    def run(fabric: Fabric) -> Any:
        copy = Copy({"layers.0.w": 2, "layers.1.w": 2})
        rounds = Rounds(every=6, outer=OuterSGD(2.0, 0.0), overlap=delay, mix=alpha)
        sync = synced(fabric, copy, rounds, fragments=2)
        seen: tuple[list[float], list[float]] = ([], [])
        for step in range(16):
            for layer in (0, 1):
                first, second = copy[f"layers.{layer}.w"].tolist()
                assert first == second
                seen[layer].append(first)
            copy.flat -= 2.0
            sync.after_step(step + 1, 10)
        return seen

    for seen in together(fabrics(2), run):
        assert seen == TRAJECTORIES[delay, alpha]


CODECS: list[Any] = [None, "int8", "int4", "fp4", "bf16", [{"topk": {"k": 3, "block": 8}}, "int8"], "sign"]


@settings(max_examples=25, deadline=None)
@given(
    clusters=st.integers(1, 8),
    fragments=st.integers(1, 4),
    codec=st.sampled_from(CODECS),
    overlap=st.integers(0, 1),
    equal=st.booleans(),
    contributors=st.booleans(),
    butterfly=st.booleans(),
    seed=st.integers(0, 99),
)
def test_global_copies_stay_equal_to_the_bit(
    clusters: int,
    fragments: int,
    codec: Any,
    overlap: int,
    equal: bool,
    contributors: bool,
    butterfly: bool,
    seed: int,
) -> None:
    """Whatever the codec, and whatever tokens the clusters trained on; the run's own check looks at every merge."""
    rounds = Rounds(
        every=8,
        outer=OuterSGD(0.7, 0.9),
        overlap=overlap,
        weights="equal" if equal else "tokens",
        divide_by="contributors" if contributors else "clusters",
        butterfly=butterfly and codec is None,
        check_every=1,
    )

    def run(fabric: Fabric) -> Any:
        generator = torch.Generator().manual_seed(1000 * seed + fabric.cluster)
        copy = Copy(SIZES, torch.linspace(-1, 1, 32))
        sync = synced(
            fabric, copy, rounds, fragments=fragments, codec=codec, error_feedback=0.9 if codec else None
        )
        merges = 0
        for step in range(1, 18):
            copy.flat += 0.1 * torch.randn(32, generator=generator)
            merges += sum(r.outcome == "merged" for r in sync.after_step(step, 5 + fabric.cluster))
        merges += sum(r.outcome == "merged" for r in sync.after_step(18, 5, last=True))
        return copy.flat, sync.digest(), merges

    results = together(fabrics(clusters), run)
    assert results[0][2] >= 3 * fragments
    for flat, digest, _ in results:
        assert torch.equal(flat, results[0][0])
        assert digest == results[0][1]


def test_average_of_one_step_is_exact() -> None:
    """H = 1, outer rate 1, no momentum: one cluster is its inner optimizer, several average their parameters."""

    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES)
        sync = synced(fabric, copy, Rounds(every=1, outer=AVERAGE))
        copy.flat += torch.arange(32.0) * (fabric.cluster + 1)
        sync.after_step(1, 10)
        return copy.flat

    (alone,) = together(fabrics(1), run)
    torch.testing.assert_close(alone, 1 + torch.arange(32.0))
    for flat in together(fabrics(4), run):
        torch.testing.assert_close(flat, 1 + 2.5 * torch.arange(32.0))


def test_identical_clusters_equal_one() -> None:
    def run(fabric: Fabric) -> Any:
        generator = torch.Generator().manual_seed(0)
        copy = Copy(SIZES)
        sync = synced(fabric, copy, Rounds(every=3, outer=OuterSGD(0.7, 0.9), overlap=1, mix=0.25))
        for step in range(1, 10):
            copy.flat += torch.randn(32, generator=generator)
            sync.after_step(step, 7)
        return copy.flat

    (alone,) = together(fabrics(1), run)
    for flat in together(fabrics(4), run):
        assert torch.equal(flat, alone)


def test_clusters_weigh_what_they_trained_on() -> None:
    def run(fabric: Fabric) -> Any:
        found = []
        for weights in ("tokens", "equal"):
            copy = Copy(SIZES, 0.0)
            sync = synced(fabric, copy, Rounds(every=2, outer=AVERAGE, weights=weights))
            for step in (1, 2):
                copy.flat += fabric.cluster + 1.0
                sync.after_step(step, 30.0 if fabric.cluster else 10.0)
            found.append(float(copy.flat[0]))
        return found

    assert together(fabrics(2), run) == [[3.5, 3.0]] * 2


def test_domain_of_some_clusters() -> None:
    """Experts on clusters 0 and 2 of 3: they merge, cluster 1 meets them and holds nothing."""

    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, 0.0)
        sync = synced(
            fabric,
            copy,
            Rounds(every=2, outer=AVERAGE, check_every=1),
            codec="int8",
            error_feedback=0.5,
            among=(0, 2),
        )
        for step in range(1, 5):
            copy.flat += fabric.cluster
            sync.after_step(step, 10)
        return float(copy.flat[0]), [report.outcome for report in sync.after_step(6, 10)]

    (first, a), (outside, b), (third, c) = together(fabrics(3), run)
    assert first == third == pytest.approx(4.0, rel=0.02)
    assert outside == 4.0
    assert a == b == c == ["merged"]


@pytest.mark.parametrize("clusters", [2, 3, 4])
@pytest.mark.parametrize(
    "codec", [None, "int8", [{"topk": {"k": 64, "block": 4096}}, {"sigma": {"bits": 2}}]]
)
def test_bytes_follow_the_closed_form(clusters: int, codec: Any) -> None:
    """Exact: 2 (C - 1) / C of the vector leave each cluster; encoded: C - 1 payloads."""
    sizes = {"w": 40960}

    def run(fabric: Fabric) -> Any:
        copy = Copy(sizes, 0.0)
        sync = synced(
            fabric, copy, Rounds(every=1, outer=AVERAGE), codec=codec, error_feedback=0.9 if codec else None
        )
        copy.flat += torch.randn(40960)
        fabric.meter.drain()
        sync.after_step(1, 10)
        counted = fabric.meter.drain()
        sent = sum(traffic.sent for (_, channel), traffic in counted.items() if channel == "trunk")
        other = sum(t.sent + t.sent_framing for (_, channel), t in counted.items() if channel != "trunk")
        return sent, other

    for sent, other in together(fabrics(clusters), run):
        if codec is None:
            assert sent == pytest.approx(2 * (clusters - 1) / clusters * 4 * 40960, rel=1e-3)
        else:
            assert sent == (clusters - 1) * parse_codec(codec).payload_bytes(40960)
        assert other < 1000


def test_overlap_must_fit_between_fragments() -> None:
    def run(fabric: Fabric) -> Any:
        with pytest.raises(ValueError, match="expected an overlap below every / fragments = 3 steps, got 3"):
            synced(fabric, Copy(SIZES), Rounds(every=6, outer=AVERAGE, overlap=3), fragments=2)

    together(fabrics(1), run)


def test_distance_of_identical_copies_is_nothing_whatever_the_codec() -> None:
    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, torch.linspace(1, 2, 32))
        sync = synced(fabric, copy, Rounds(every=1, outer=AVERAGE), codec="int4", error_feedback=1.0)
        found = []
        for step in range(1, 5):
            copy.flat += torch.linspace(0, 1, 32).square() * step
            found += sync.after_step(step, 10)
        return [(report.distance, report.cosine, report.codec_error) for report in found]

    for reports in together(fabrics(2), run):
        for distance, cosine, error in reports:
            assert distance == pytest.approx(0.0, abs=1e-3)
            assert cosine == pytest.approx(1.0, abs=1e-3)
            assert 0.0 < error < 0.5


def test_trunk_and_experts_share_the_side_rail(tmp_path: Path) -> None:
    """Two syncs that are due together, over a link on which a transfer takes longer than a meeting: both merge."""
    topology = topology_of((1, 1), bandwidth="4 Mbit/s", rtt="2 ms")

    def run(fabric: Fabric) -> Any:
        found = []
        sizes = {"w": 20000}
        copies = [Copy(sizes, 0.0), Copy(sizes, 0.0)]
        rounds = Rounds(every=2, outer=AVERAGE, overlap=1)
        syncs = [synced(fabric, copy, rounds) for copy in copies]
        for step in range(1, 6):
            for copy, sync in zip(copies, syncs, strict=True):
                copy.flat += 1.0
                found += [report.outcome for report in sync.after_step(step, 10)]
        return found

    results = together(fabrics(2, topology=topology, key=tmp_path.name), run)
    assert results == [["merged"] * 4] * 2


def test_every_fragment_is_checked() -> None:
    """Each at its own tenth merge, not at the fleet's."""

    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, 0.0)
        sync = synced(fabric, copy, Rounds(every=2, outer=AVERAGE, check_every=3), fragments=2)
        if fabric.cluster:
            sync._fragments[0].outer += 1.0
        try:
            for step in range(1, 9):
                sync.after_step(step, 10)
        except FleetError as error:
            return str(error)
        return "never noticed"

    for said in together(fabrics(2), run):
        assert said.startswith("after step 5 clusters ada and bob hold different global copies")

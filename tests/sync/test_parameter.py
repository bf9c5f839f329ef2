"""Rounds and merges: published trajectories, equality to the bit, failures, poison, state."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fragment.codecs import parse_codec
from moe_fragment.fabric import Fabric, FleetError
from moe_fragment.fabric.wire import Frame, kind_name
from moe_fragment.sync import Guard, OuterSGD, ParameterSync, Rounds
from tests.fabric.pair import fabrics, group_of, together
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


def swallow_trunk(message: torch.Tensor) -> torch.Tensor | None:
    """A link that loses what belongs to the trunk."""
    return None if kind_name(Frame.decode(message).kind) == "trunk" else message


@pytest.mark.parametrize("overlap", [0, 1])
def test_failed_sync_keeps_the_own_trunk_and_is_tried_again(overlap: int) -> None:
    """Outer state and error feedback are as they were, no token is forgotten, and the merge comes a step later."""

    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, 0.0)
        rounds = Rounds(every=4, outer=AVERAGE, overlap=overlap)
        sync = synced(fabric, copy, rounds, codec="int8", error_feedback=1.0)
        found: list[Any] = []
        for step in range(1, 10):
            copy.flat += torch.linspace(0, 1, 32) * (1 + fabric.cluster)
            own, before = copy.flat.clone(), stored(sync)
            if step == 8 - overlap and fabric.cluster == 1:
                group_of(fabric, side=overlap > 0).intercept = swallow_trunk
            for report in sync.after_step(step, 10):
                found.append((report.step, report.outcome))
                if report.outcome == "failed":
                    assert report.reason
                    assert torch.equal(copy.flat, own)
                    after = stored(sync)
                    for kind in ("outer_weight", "error_feedback"):
                        assert torch.equal(after[kind], before[kind])
                        assert after[kind].abs().sum() > 0
                    assert sync.numbers()["own"][0]["tokens"] == 40.0 + 10.0 * overlap
        return found, copy.flat

    expected = [(4, "merged"), (8, "failed"), (9 + overlap, "merged")]
    for outcomes, flat in together(fabrics(2, timeout_s=1.0), run):
        assert outcomes == expected[: 3 - overlap]
        assert flat.isfinite().all()


def stored(sync: ParameterSync) -> dict[str, torch.Tensor]:
    """State by kind, the pieces in a row."""
    found: dict[str, list[torch.Tensor]] = {}
    for kind, _, _, values in sync.state():
        found.setdefault(kind, []).append(values.clone())
    return {kind: torch.cat(pieces) for kind, pieces in found.items()}


def read_piece(
    pieces: dict[tuple[str, str], torch.Tensor], kind: str, name: str, offset: int, size: int
) -> torch.Tensor:
    """A `Reader` of whole parameters."""
    return pieces[kind, name][offset : offset + size]


def test_poisoned_cluster_is_left_out() -> None:
    """NaN in one copy: refused and counted, its error feedback untouched, and it gets the others' merge."""

    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, 0.0)
        sync = synced(fabric, copy, Rounds(every=2, outer=AVERAGE, mix=0.5), codec="int8", error_feedback=1.0)
        reports = []
        for step in range(1, 7):
            copy.flat += 1.0 + fabric.cluster
            if step == 4 and fabric.cluster == 2:
                copy.flat[3] = torch.nan
            before = stored(sync)["error_feedback"]
            reports += sync.after_step(step, 10)
            if step == 4 and fabric.cluster == 2:
                assert torch.equal(stored(sync)["error_feedback"], before)
        return [report.poisoned for report in reports], copy.flat

    for poisoned, flat in together(fabrics(3), run):
        assert poisoned == [[], [2], []]
        assert flat.isfinite().all()


def test_all_poisoned_is_an_empty_round() -> None:
    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, 0.0)
        sync = synced(fabric, copy, Rounds(every=1, outer=AVERAGE))
        copy.flat += torch.inf
        reports = sync.after_step(1, 10)
        return [report.outcome for report in reports], copy.published

    assert together(fabrics(2), run) == [(["empty"], 0)] * 2


@pytest.mark.parametrize("cut", [3, 4, 5, 9])
@pytest.mark.parametrize("codec", [None, "int4"])
def test_state_continues_to_the_bit(cut: int, codec: Any) -> None:
    """Also while a fragment is under way: outer weights, momentum, error feedback, what flies and what it will owe."""
    rounds = Rounds(every=6, outer=OuterSGD(0.7, 0.9), overlap=2, mix=0.5)

    def run(fabric: Fabric) -> Any:
        def build(values: torch.Tensor | float) -> tuple[Copy, ParameterSync]:
            copy = Copy(SIZES, values)
            feedback = 0.9 if codec else None
            return copy, synced(fabric, copy, rounds, fragments=2, codec=codec, error_feedback=feedback)

        def steps(copy: Copy, sync: ParameterSync, first: int, last: int) -> None:
            for step in range(first, last + 1):
                generator = torch.Generator().manual_seed(100 * step + fabric.cluster)
                copy.flat += torch.randn(32, generator=generator)
                sync.after_step(step, 10 + fabric.cluster)
            list(sync.state())  # waits for what is under way, before another sync uses the rail

        whole = build(1.0)
        steps(*whole, 1, 16)
        part = build(1.0)
        steps(*part, 1, cut)
        pieces = {(kind, name): values.clone() for kind, name, _, values in part[1].state()}
        numbers = json.loads(json.dumps(part[1].numbers()))
        assert (numbers["in_flight"] is not None) == (cut in (4, 5))
        steps(*part, cut + 1, 16)  # saving it has not changed it
        assert torch.equal(part[0].flat, whole[0].flat)

        saved = build(1.0)
        steps(*saved, 1, cut)
        fresh = build(saved[0].flat.clone())
        fresh[1].restore(partial(read_piece, pieces), numbers)
        steps(*fresh, cut + 1, 16)
        return torch.equal(fresh[0].flat, whole[0].flat), fresh[1].digest() == whole[1].digest()

    assert together(fabrics(2), run) == [(True, True)] * 2


@pytest.mark.parametrize("cut", range(1, 7))
def test_fragment_follows_from_the_shared_step(cut: int) -> None:
    """torchft#206: a cluster that begins anew in the middle of a cycle, from its stored state, syncs what the others
    do."""
    rounds = Rounds(every=6, outer=OuterSGD(0.7, 0.9), overlap=1)

    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES)
        sync = synced(fabric, copy, rounds, fragments=2)
        seen = []
        for step in range(1, 15):
            copy.flat += 0.1 * (1 + fabric.cluster)
            seen += [(report.step, report.fragment, report.outcome) for report in sync.after_step(step, 10)]
            if step == cut and fabric.cluster == 1:
                pieces = {(kind, name): values.clone() for kind, name, _, values in sync.state()}
                fresh = synced(fabric, copy, rounds, fragments=2)
                fresh.restore(partial(read_piece, pieces), sync.numbers())
                sync = fresh
        return seen, sync.digest()

    (first, one), (second, other) = together(fabrics(2), run)
    assert first == second
    assert [fragment for _, fragment, _ in first] == [0, 1, 0, 1]
    assert one == other


def test_guard_warns_shortens_and_refuses() -> None:
    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, 1.0)
        sync = synced(fabric, copy, Rounds(every=8, outer=AVERAGE), guard=Guard(warn=0.5, refuse=3.0))
        found = []
        for step in range(1, 17):
            sign = -1.0 if fabric.cluster else 1.0
            copy.flat += sign * (0.1 if step <= 8 else 5.0)
            for report in sync.after_step(step, 10):
                measured = round(report.distance, 3), round(report.cosine, 3)
                found += [(step, report.outcome, sync.every, *measured)]
        return found, float(copy.flat[0])

    (found, first), (other, second) = together(fabrics(2), run)
    assert found == other
    assert found[0] == (8, "merged", 4, 0.8, -1.0)
    assert found[1][:3] == (12, "refused", 2)
    assert first == -second + 2.0 != 1.0


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


def test_the_end_merges_what_is_left_once() -> None:
    """A fragment under way is merged as ever, and what was trained since is averaged: no outer step is taken twice."""

    def run(fabric: Fabric) -> Any:
        found = []
        for outer in (AVERAGE, OuterSGD(0.7, 0.9)):
            copy = Copy(SIZES, 0.0)
            sync = synced(fabric, copy, Rounds(every=4, outer=outer, overlap=1, mix=0.5))
            for step in range(1, 9):
                copy.flat += 100.0 if step == 8 else 1.0
                sync.after_step(step, 10, last=step == 8)
            assert sync.ended
            found.append(copy.flat.unique().tolist())
        return found

    # Captured after 3 and 7 steps; merged, with half of the own weights, one step later.
    for outer, found in zip((AVERAGE, OuterSGD(0.7, 0.9)), together(fabrics(2), run)[0], strict=True):
        own, weights, velocity = torch.zeros(1), torch.zeros(1), None
        for step in (1.0, 100.0):
            captured = own + 3.0
            own = captured + step
            weights, velocity = outer.step(weights, velocity, weights - captured)
            own = torch.lerp(weights, own, 0.5)
        assert found == pytest.approx(own.tolist(), rel=1e-6)


@pytest.mark.parametrize("weights", ["tokens", "equal"])
def test_last_merge_is_tried_again_for_what_failed_only(weights: str) -> None:
    def run(fabric: Fabric) -> Any:
        found = []
        for fails in (False, True):
            copy = Copy(SIZES, 0.0)
            rounds = Rounds(every=6, outer=OuterSGD(0.7, 0.9), weights=weights)
            sync = synced(fabric, copy, rounds, fragments=2)
            outcomes = []
            for step in range(1, 9):
                copy.flat += 1.0 + fabric.cluster
                if fails and step == 8 and fabric.cluster:
                    group_of(fabric).intercept = Swallow(after=2)
                outcomes += [report.outcome for report in sync.after_step(step, 10, last=step == 8)]
            if fails:
                assert outcomes == ["merged", "merged", "merged", "failed"]
                assert not sync.ended
                outcomes = [report.outcome for report in sync.after_step(8, 0, last=True)]
                assert outcomes == ["merged"]
            assert sync.ended
            found.append(copy.flat.clone())
        return found

    for smooth, rough in together(fabrics(2, timeout_s=1.0), run):
        assert torch.equal(smooth, rough)


class Swallow:
    """A link that loses what belongs to the trunk after so many messages of it have come through."""

    def __init__(self, after: int) -> None:
        self._left = after

    def __call__(self, message: torch.Tensor) -> torch.Tensor | None:
        if kind_name(Frame.decode(message).kind) != "trunk":
            return message
        self._left -= 1
        return message if self._left >= 0 else None


def test_a_verdict_that_one_side_missed_is_noticed() -> None:
    """Merged here, failed there: the next meeting says so instead of merging what is a round apart."""

    def lose_second_verdict(fabric: Fabric) -> Any:
        seen = 0

        def intercept(message: torch.Tensor) -> torch.Tensor | None:
            nonlocal seen
            seen += kind_name(Frame.decode(message).kind) == "verdict"
            return None if seen == 2 else message

        group_of(fabric).intercept = intercept

    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, 0.0)
        sync = synced(fabric, copy, Rounds(every=2, outer=AVERAGE))
        seen: list[str] = []
        try:
            for step in range(1, 9):
                copy.flat += 1.0
                if step == 2 and fabric.cluster:
                    lose_second_verdict(fabric)
                seen += [report.outcome for report in sync.after_step(step, 10)]
        except FleetError as error:
            seen.append(str(error))
        return seen

    first, second = together(fabrics(2, timeout_s=1.0), run)
    assert first == ["failed", "the clusters are a step apart"]
    assert second == ["merged", "the clusters are a step apart"]


def test_shortened_rounds_starve_no_fragment() -> None:
    """The guard leaves room for all fragments, and who is owed for longest comes first."""

    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, 1.0)
        rounds = Rounds(every=16, outer=AVERAGE, overlap=3)
        sync = synced(fabric, copy, rounds, fragments=2, guard=Guard(warn=1e-6, refuse=1e6))
        merged = []
        for step in range(1, 61):
            copy.flat += 1.0 if fabric.cluster else -1.0
            merged += [(report.step, report.fragment) for report in sync.after_step(step, 10)]
        return sync.every, merged

    for every, merged in together(fabrics(2), run):
        assert every == 7
        late = [fragment for step, fragment in merged if step > 40]
        assert late.count(0) >= 2
        assert late.count(1) >= 2


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

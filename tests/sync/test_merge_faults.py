"""What goes wrong with merges: failed transfers, poison, copies too far apart, the end of a run; and what is stored."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch

from moe_fragment.fabric import Fabric, FleetError
from moe_fragment.fabric.wire import Frame, kind_name
from moe_fragment.sync import Guard, OuterSGD, ParameterSync, Rounds
from moe_fragment.sync.guard import Divergence
from tests.fabric.pair import fabrics, group_of, together
from tests.sync.copies import AVERAGE, SIZES, Copy, read_piece, stored, swallow_trunk, synced


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


def test_guard_allows_copies_of_experts_more() -> None:
    apart = Divergence(distance=1.2, cosine=0.1)
    judged = Guard(0.1, 0.4, allowance=4.0).judge(apart, 64)
    assert (judged.every, judged.refuses) == (32, False)
    assert "sync.guard.warn x sync.guard.experts = 0.1 x 4" in judged.reason
    assert Guard(0.1, 0.4).judge(apart, 64).refuses

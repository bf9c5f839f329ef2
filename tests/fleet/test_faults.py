"""A step that goes wrong is discarded on every rank of every cluster, and the run goes on as if it had not been."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moe_fragment.fabric import FAILED, OK, OVERFLOW
from tests.fleet.faults import Drop, Event, Poison, Script, Silence, Trail, run_script
from tests.fleet.harness import Fleets
from tests.fleet.training import Scenario

LAYERS = 2


def kinds_of(accumulation: int) -> list[str]:
    """Exchanges of a step of a stock model without recomputation, in order."""
    forward = ["dispatch", "combine"] * LAYERS
    backward = ["dispatch", "combine"] * LAYERS
    return (forward + backward) * accumulation + ["trunk", "trunk", "verdict"]


def positions(accumulation: int) -> Sequence[int]:
    """Which exchange to break: every one of a short step; of a long one the first, some, and the last three."""
    count = len(kinds_of(accumulation))
    if accumulation == 1:
        return range(count)
    per_micro = 4 * LAYERS
    return [0, per_micro - 1, per_micro + 3, 2 * per_micro + 2 * LAYERS + 1, count - 3, count - 2, count - 1]


def trails_of(fleets: Fleets, scenario: Scenario, script: Script) -> Trail:
    """Run the script; all ranks must tell the same story."""
    by_cluster = fleets(*scenario.sizes, stages=scenario.stages).run(run_script, scenario, script)
    first = by_cluster[0][0]
    for ranks in by_cluster:
        for trail in ranks:
            assert trail.outcomes == first.outcomes
            assert repr(trail.losses) == repr(first.losses)  # NaN is equal to NaN here
            assert trail.states == ranks[0].states
    return first


def check_as_if_not(fleets: Fleets, scenario: Scenario, events: Sequence[Event]) -> Trail:
    """Every event fails its step, and losses and state are those of a run without events, to the bit."""
    steps = range(len(events) + 1)
    broken = trails_of(fleets, scenario, tuple(zip(steps, [*events, None], strict=True)))
    clean = trails_of(fleets, scenario, tuple((step, None) for step in steps))
    assert broken.outcomes == [FAILED, OK] * len(events) + [OK], broken.reasons
    assert clean.outcomes == [OK] * len(steps)
    assert broken.committed() == clean.committed()
    initial = broken.states[0]
    assert initial not in [state for _, state in clean.committed()]
    return broken


@pytest.mark.parametrize(
    ("sizes", "zero", "accumulation"),
    [
        ((1, 1), "zero1-fp32", 1),
        ((1, 1), "zero3-fp32", 1),
        ((2, 1), "zero1-fp32", 3),
        ((2, 1), "zero2-fp32", 3),
        ((2, 1), "zero3-fp32", 3),
    ],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_any_broken_exchange_discards_the_step(
    fleets: Fleets, sizes: tuple[int, ...], zero: str, accumulation: int
) -> None:
    """In forward, in backward, in the trunk's all-reduce and in the verdict; no exception leaves autograd."""
    scenario = Scenario(sizes=sizes, zero=zero, accumulation=accumulation)
    events = [Drop(index, cluster=index % 2) for index in positions(accumulation)]
    trail = check_as_if_not(fleets, scenario, events)
    assert trail.kinds == kinds_of(accumulation)
    assert all(
        reason for outcome, reason in zip(trail.outcomes, trail.reasons, strict=True) if outcome == FAILED
    )


def test_one_broken_rail_of_two(fleets: Fleets) -> None:
    """The other rail's gateways go through all their exchanges; the step is lost for them as well."""
    scenario = Scenario(sizes=(2, 2), zero="zero3-fp32")
    check_as_if_not(fleets, scenario, [Drop(index, cluster=1, rank=1) for index in (1, 5, 8, 10)])


def test_three_clusters(fleets: Fleets) -> None:
    """The two clusters that still hear each other discard the step with the third."""
    scenario = Scenario(sizes=(1, 1, 1), layout="thirds")
    check_as_if_not(fleets, scenario, [Drop(index, cluster=2) for index in (0, 6, 9, 10)])


@pytest.mark.parametrize("zero", ["zero1-bf16", "zero2-bf16", "zero3-bf16"])
def test_bf16_with_router_bias_and_recomputation(fleets: Fleets, zero: str) -> None:
    """What a step has counted and accumulated beside gradients is forgotten with it."""
    scenario = Scenario(sizes=(2, 1), zero=zero, model="fragment", accumulation=3, checkpointing=True)
    # The second breaks when a layer is about to be run again, for which its rows do not arrive any more.
    check_as_if_not(fleets, scenario, [Drop(0), Drop(4, cluster=1), Drop(16), Drop(32, cluster=1)])


@pytest.mark.parametrize(
    ("zero", "place"),
    [
        ("zero1-fp32", (0, 1)),
        ("zero2-fp32", (0, 1)),
        ("zero3-fp32", (1, 0)),
        ("zero1-bf16", (1, 0)),
        ("zero3-bf16", (0, 1)),
    ],
)
def test_nan_on_one_rank_changes_nothing_anywhere(fleets: Fleets, zero: str, place: tuple[int, int]) -> None:
    """The fleet, not DeepSpeed's check per cluster, decides; the step is given up, the next one is as always."""
    scenario = Scenario(sizes=(2, 1), zero=zero, model="fragment", accumulation=2)
    poisoned = trails_of(fleets, scenario, ((0, None), (1, Poison(*place)), (2, None), (3, None)))
    clean = trails_of(fleets, scenario, ((0, None), (2, None), (3, None)))
    assert poisoned.outcomes == [OK, OVERFLOW, OK, OK], poisoned.reasons
    assert poisoned.reasons[1] == "non-finite loss or gradient"
    assert poisoned.states[1] == poisoned.states[0]
    assert poisoned.committed() == clean.committed()


@pytest.mark.parametrize("zero", ["zero1-fp32", "zero3-fp32"])
def test_a_step_without_loss_bearing_tokens_is_skipped(fleets: Fleets, zero: str) -> None:
    """Weights, moments and router biases stay as they are; it is not tried again."""
    scenario = Scenario(sizes=(2, 1), zero=zero, model="fragment")
    silent = trails_of(fleets, scenario, ((0, None), (1, Silence()), (2, None)))
    clean = trails_of(fleets, scenario, ((0, None), (2, None)))
    assert silent.outcomes == [OK, OVERFLOW, OK]
    assert silent.reasons[1] == "no token bears a loss"
    assert silent.states[1] == silent.states[0]
    assert silent.committed() == clean.committed()


PIPED = {
    0: ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
    1: ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
}
"""What each of two stages does with four micro-batches, two exchanges each (1F1B)."""


@pytest.mark.parametrize("stage", [0, 1])
def test_any_micro_batch_of_a_pipeline(fleets: Fleets, stage: int) -> None:
    """First, middle and last, forward and backward, at the trunk and the verdict; the error says where it was."""
    scenario = Scenario(sizes=(2, 2), model="fragment", accumulation=4, partition=(2, 3))
    events, places = [], []
    for number, work in enumerate(PIPED[stage]):
        if work in ("F0", "B0", "F2", "B2", "F3", "B3"):
            events.append(Drop(2 * number + number % 2, cluster=number % 2, rank=stage))
            places.append(f"stage {stage}, layer {stage}, micro-batch {work[1]}: ")
    events += [Drop(16, rank=stage), Drop(18, cluster=1, rank=stage)]
    trail = check_as_if_not(fleets, scenario, events)
    reasons = [
        reason for outcome, reason in zip(trail.outcomes, trail.reasons, strict=True) if outcome == FAILED
    ]
    for reason, place in zip(reasons, places, strict=False):
        assert reason.startswith(place), reason


def test_recomputed_layers_of_a_pipeline(fleets: Fleets) -> None:
    """In bf16, when a layer is about to be run again, and when it is not."""
    scenario = Scenario(
        sizes=(2, 2),
        zero="zero1-bf16",
        model="fragment",
        options={"tie_word_embeddings": True},
        accumulation=4,
        partition=(2, 3),
        checkpointing=True,
    )
    check_as_if_not(
        fleets, scenario, [Drop(0), Drop(2, cluster=1, rank=1), Drop(4), Drop(7, rank=1), Drop(21, cluster=1)]
    )


def test_nan_on_one_stage(fleets: Fleets) -> None:
    """Only the last stage has a loss, and other stages' gradients are poisoned with it; nothing of it stays."""
    scenario = Scenario(sizes=(4, 2), model="fragment", accumulation=2, partition=(2, 3))
    poisoned = trails_of(fleets, scenario, ((0, None), (1, Poison(0, 3)), (2, None)))
    clean = trails_of(fleets, scenario, ((0, None), (2, None)))
    assert poisoned.outcomes == [OK, OVERFLOW, OK], poisoned.reasons
    assert poisoned.states[1] == poisoned.states[0]
    assert poisoned.committed() == clean.committed()

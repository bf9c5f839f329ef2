"""The step graph: published bandwidths, its limits by hand, and monotonicity."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fragment.planning.check.tolerance import Cells
from moe_fragment.planning.overlap import (
    WIRE_BITS_PER_BIT,
    Plan,
    bandwidth_for,
    outer_utilisation,
    utilisation,
)

BILLION = Plan(strategy="dp", layers=24, parameters=1e9, step_s=0.1, sync_every=1, bits=16)
HUNDRED = Plan(
    strategy="streaming_overlap",
    layers=108,
    parameters=1e11,
    step_s=4.9,
    sync_every=100,
    bits=4,
    fragment_layers=3,
)
GRID = Cells(1, -1, 3, 50)

plans = st.builds(
    Plan,
    strategy=st.sampled_from(["dp", "diloco", "streaming", "streaming_overlap"]),
    layers=st.integers(1, 40),
    parameters=st.floats(1e6, 1e12),
    step_s=st.floats(1e-3, 100),
    sync_every=st.integers(1, 60),
    bits=st.sampled_from([1, 4, 16, 32]),
    fragment_layers=st.integers(1, 40),
)


@pytest.mark.parametrize(
    ("plan", "published_gbps"),
    # Streaming DiLoCo (arXiv:2501.18512), Table 4, at 50, 80, 90, 95 and 99 %; rows that were not fitted on.
    [
        (BILLION, [86.8, 152.6, 184.2, 222.3, 569.0]),
        (replace(BILLION, strategy="diloco", sync_every=100), [1.4, 6.2, 13.3, 23.3, 86.8]),
        (HUNDRED, [0.5, 0.9, 1.1, 1.1, 1.4]),
        (replace(HUNDRED, bits=16, strategy="streaming"), [2.4, 6.2, 9.1, 11.0, 19.3]),
    ],
)
def test_streaming_diloco_table_4(plan: Plan, published_gbps: list[float]) -> None:
    for target, published in zip((0.5, 0.8, 0.9, 0.95, 0.99), published_gbps, strict=True):
        predicted = GRID.comparable(bandwidth_for(plan, target) / 1e9)
        assert GRID.holds(predicted, published, first=True), (target, predicted, published)


def test_one_layer_by_hand() -> None:
    # Compute 1 s, reduction 3 s, nothing to hide behind: a quarter.
    plan = Plan(strategy="dp", layers=1, parameters=3, step_s=1, sync_every=1, bits=1 / WIRE_BITS_PER_BIT)
    assert utilisation(plan, 1) == pytest.approx(0.25)
    # Every fourth step: 4 of 7.
    assert utilisation(replace(plan, strategy="diloco", sync_every=4), 1) == pytest.approx(4 / 7)
    # With a step to arrive, two of the three seconds still show: 4 of 6.
    late = replace(plan, strategy="streaming_overlap", sync_every=4)
    assert utilisation(late, 1) == pytest.approx(4 / 6)


def test_overlap_hides_nothing_for_ever() -> None:
    # Synchronised in every step with a step of grace: the link, not the grace, sets the pace.
    plan = Plan(
        strategy="streaming_overlap",
        layers=1,
        parameters=3,
        step_s=1,
        sync_every=1,
        bits=1 / WIRE_BITS_PER_BIT,
    )
    assert utilisation(plan, 1) == pytest.approx(1 / 3)


@settings(deadline=None, max_examples=60)
@given(plan=plans, rate=st.floats(1e6, 1e13), factor=st.floats(1, 100))
def test_more_bandwidth_fewer_bits_never_hurt(plan: Plan, rate: float, factor: float) -> None:
    busy = utilisation(plan, rate)
    assert 0 < busy <= 1 + 1e-9
    assert utilisation(plan, rate * factor) >= busy - 1e-9
    assert utilisation(replace(plan, bits=plan.bits / factor), rate) >= busy - 1e-9


@settings(deadline=None, max_examples=30)
@given(plan=plans, target=st.floats(0.05, 0.95))
def test_bandwidth_is_the_inverse_of_utilisation(plan: Plan, target: float) -> None:
    rate = bandwidth_for(plan, target)
    assert utilisation(plan, rate) >= target
    assert rate <= 2 or utilisation(plan, rate / 1.01) <= target + 1e-6


def test_a_bandwidth_that_does_not_exist() -> None:
    assert bandwidth_for(replace(BILLION, parameters=1e300), 0.5) == math.inf


def test_fragments_cover_every_layer_once() -> None:
    due = HUNDRED.due()
    assert sorted(layer for layers in due.values() for layer in layers) == list(range(108))
    assert set(due) <= set(range(100))
    assert len(due) == 36


def test_intellect_1_and_covenant() -> None:
    # arXiv:2412.01152, Table 2 (38 min of compute); arXiv:2603.08163 (20 min).
    for compute, exchange, published in ((2280, 103, 0.957), (2280, 469, 0.83), (1200, 70, 0.945)):
        assert outer_utilisation(compute, exchange) == pytest.approx(published, abs=0.002)

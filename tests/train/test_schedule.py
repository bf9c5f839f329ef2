"""The learning rate is a function of the optimizer step alone: nothing to count, nothing to restore."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.train.recipe import TrainConfig
from moe_fragment.train.schedule import learning_rate


def rates(steps: int, **fields: Any) -> list[float]:
    config = TrainConfig(steps=steps, batch=1, learning_rate=1.0, **fields)
    return [learning_rate(config, step) for step in range(steps)]


def test_warm_up_peak_and_end() -> None:
    """accelerate#2926, LTX-Video-Trainer#67: the end is reached at the last step, not at a fraction of it."""
    found = rates(11, warmup_steps=4, min_learning_rate=0.25, schedule="linear")
    assert found[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert found[-1] == 0.25
    assert found[4:] == pytest.approx([1.0 - 0.125 * step for step in range(7)])
    cosine = rates(11, warmup_steps=4, min_learning_rate=0.25)
    assert (cosine[4], cosine[7], cosine[-1]) == pytest.approx((1.0, 0.625, 0.25))
    assert rates(5, schedule="constant", min_learning_rate=0.5) == [1.0] * 5


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (2, 0), (1, 1), (3, 3), (3, 9)])
def test_short_runs(schedule: str, steps: int, warmup: int) -> None:
    found = rates(steps, warmup_steps=warmup, schedule=schedule)
    assert all(0 <= rate <= 1 for rate in found)
    assert found[0] == (1.0 if not warmup else 1 / warmup)


@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 50),
    low=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "linear"]),
)
def test_rises_then_falls(steps: int, warmup: int, low: float, schedule: str) -> None:
    found = rates(steps, warmup_steps=warmup, min_learning_rate=low, schedule=schedule)
    up, down = found[:warmup], found[warmup:]
    assert up == sorted(up)
    assert all(one >= other - 1e-12 for one, other in itertools.pairwise(down))
    assert all(low - 1e-12 <= rate <= 1 + 1e-12 for rate in down)
    assert not down or down[0] == 1.0
    assert len(down) < 2 or down[-1] == low


def test_ranks_and_accumulation_do_not_enter() -> None:
    """One call per optimizer step, with its number: the loop's own count, which checkpoints carry."""
    assert rates(9, accumulation=1) == rates(9, accumulation=4)

"""Exactness below what fp32 can show, and ZeRO's gradients against DeepSpeed's own access to them."""

from __future__ import annotations

import pytest
import torch

from tests.fleet.exact import (
    logits_before_and_after,
    reference_in_fp64,
    train_in_fp64,
    whole,
    worst_zero_gradient,
)
from tests.fleet.harness import Fleets
from tests.fleet.training import Pieces, Scenario


@pytest.mark.parametrize(
    ("sizes", "model"), [((1, 1), "qwen3"), ((2, 1), "mixtral"), ((2, 1), "fragment")], ids=str
)
def test_logits_stay_when_a_model_is_fragmented(fleets: Fleets, sizes: tuple[int, ...], model: str) -> None:
    """To 1e-6, whatever each rank's batch is."""
    for ranks in fleets(*sizes).run(logits_before_and_after, Scenario(sizes=sizes, model=model)):
        for before, after in ranks:
            assert float((before - after).abs().max()) <= 1e-6


def test_fp64_outside_zero(fleets: Fleets) -> None:
    """Five steps of plain torch in double precision: losses and every gradient to 1e-10.

    Router arithmetic is fp32 at least, so that an fp64 model routes in fp64.
    """
    scenario = Scenario(
        sizes=(2, 1),
        model="fragment",
        accumulation=2,
        checkpointing=True,
        steps=5,
        options={"router_bias": False},
    )
    results = fleets(2, 1).run(train_in_fp64, scenario)
    losses, gradients = reference_in_fp64(scenario)
    for ranks in results:
        for found, _ in ranks:
            assert found == results[0][0][0]
    assert max(abs(one - other) for one, other in zip(results[0][0][0], losses, strict=True)) <= 1e-10
    worst = 0.0
    for step, expected in enumerate(gradients):
        pieces: Pieces = {}
        for ranks in results:
            pieces.update(ranks[0][1][step])
        for name, tensor in whole(pieces, expected).items():
            error = float((tensor - expected[name]).norm() / expected[name].norm())
            worst = max(worst, error)
            assert error <= 1e-10, (step, name)
    print(f"FP64 gradients {worst:.1e}")
    assert expected[name].dtype == torch.float64


@pytest.mark.parametrize(
    "zero", ["zero1-fp32", "zero1-bf16", "zero2-fp32", "zero2-bf16", "zero3-fp32", "zero3-bf16"]
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_flat_gradients_are_deepspeeds(fleets: Fleets, zero: str, accumulation: int) -> None:
    """`ZeroShards.gradients` needs no collective; `safe_get_full_grad` needs one per parameter and says the same."""
    scenario = Scenario(sizes=(2, 1), zero=zero, model="fragment", accumulation=accumulation)
    for ranks in fleets(2, 1).run(worst_zero_gradient, scenario):
        for worst, compared in ranks:
            assert compared > 40
            assert worst <= 1e-6

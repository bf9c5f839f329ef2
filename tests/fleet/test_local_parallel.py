"""A cluster whose experts are spread over its ranks computes what one process does, and saves what any other does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_fragment.schema import ConfigError
from tests.fleet.harness import Fleets
from tests.fleet.test_parity import check_agreement, check_same_as_one_process
from tests.fleet.test_resume import assert_same_bits, cut, worst
from tests.fleet.training import Scenario, reference, train
from tests.train.runs import load, losses_of, recipe_for, state_of
from tests.train.runs import train as train_run

EVEN = ((1.0, 1.0), (1.0, 1.0))
CASES = {
    "even-zero1-fragment": Scenario(sizes=(2, 2), model="fragment", layout="even", parallel=EVEN),
    "uneven-zero3-qwen3-acc4": Scenario(
        sizes=(2, 2), zero="zero3-fp32", layout="scattered", accumulation=4, parallel=((2.0, 1.0), (1.0, 3.0))
    ),
    "zero2-mixtral-ckpt-idle": Scenario(
        sizes=(2, 2),
        zero="zero2-fp32",
        model="mixtral",
        layout="uneven",  # the second cluster has one expert, so its second rank none
        checkpointing=True,
        padding="left",
        share="idle",
        parallel=EVEN,
    ),
    "zero3-fragment-ckpt-starved": Scenario(
        sizes=(2, 1),
        zero="zero3-fp32",
        model="fragment",
        accumulation=3,
        checkpointing=True,
        steered="starved",
        parallel=((3.0, 1.0), ()),
    ),
    "zero1-qwen3-acc8-crowded": Scenario(
        sizes=(2, 2), layout="none", accumulation=8, steered="crowded", parallel=EVEN, steps=8
    ),
    "zero1-qwen3-top1": Scenario(sizes=(2, 2), options={"num_experts_per_tok": 1}, parallel=EVEN, steps=8),
    "zero3-hot-top3": Scenario(
        sizes=(2, 2),
        model="fragment",
        options={"num_experts_per_tok": 3},
        layout="hot",
        zero="zero3-fp32",
        accumulation=2,
        parallel=EVEN,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_process(fleets: Fleets, name: str) -> None:
    """DeepSpeed#2870 (expert parallelism under ZeRO-3 is refused there), DeepSpeed#5066 (ranks without a token)."""
    check_same_as_one_process(fleets, CASES[name], f"parallel {name}")


@pytest.mark.parametrize("zero", ["zero1-bf16", "zero3-bf16"])
def test_bf16_trains_like_fp32(fleets: Fleets, zero: str) -> None:
    scenario = Scenario(
        sizes=(2, 2), zero=zero, model="fragment", accumulation=3, checkpointing=True, parallel=EVEN
    )
    fleet = check_agreement(fleets(2, 2).run(train, scenario), scenario.steps)
    alone = reference(replace(scenario, zero="zero1-fp32"))
    errors = [abs(one - other) for one, other in zip(fleet.losses, alone.losses, strict=True)]
    print(f"BF16 {zero} loss {max(errors):.1e}")
    assert max(errors) < 0.03


@pytest.mark.timeout(240)
def test_state_moves_between_layouts(fleets: Fleets, tmp_path: Path) -> None:
    """Spread evenly, spread otherwise, not at all, on one rank; under ZeRO-1 and 3: weights, moments, data and all."""
    common: dict[str, Any] = {"steps": 6, "checkpoint_every": 1, "keep_checkpoints": 6}

    def recipe(name: str, sizes: tuple[int, ...], zero: str, spread: Any) -> dict[str, Any]:
        sections = {"experts": {"local_parallel": spread}}
        return recipe_for(tmp_path, name=name, sizes=sizes, zero=zero, sections=sections, **common)

    even = recipe("even", (2, 2), "zero1-fp32", True)
    fleets(2, 2).run(train_run, even)
    expected, losses = state_of(tmp_path, even, 6), losses_of(tmp_path, even)
    same = cut(tmp_path, even, 3, "same")
    fleets(2, 2).run(train_run, same)
    assert_same_bits(state_of(tmp_path, same, 6), expected)
    assert losses_of(tmp_path, same) == losses

    def check(
        base: dict[str, Any], step: int, life: dict[str, Any], sizes: tuple[int, ...]
    ) -> dict[str, Any]:
        """Go on from a step that `base` itself has written."""
        cut(tmp_path, base, step, life["name"])
        assert {began for ranks in fleets(*sizes).run(train_run, life) for began in ranks} == {step}
        loss_error = max(abs(losses_of(tmp_path, life)[key] - value) for key, value in losses.items())
        state_error = worst(state_of(tmp_path, life, 6), expected)
        print(f"PARALLEL {life['name']} loss {loss_error:.1e} state {state_error:.1e}")
        assert loss_error <= 1e-5
        assert state_error <= 1e-5
        return life

    shares = {"ada": [1, 5], "bob": [2, 1]}
    otherwise = check(even, 1, recipe("otherwise", (2, 2), "zero3-fp32", shares), (2, 2))
    alone = check(otherwise, 2, recipe("alone", (1, 1), "zero3-fp32", True), (1, 1))
    whole = check(alone, 3, recipe("whole", (2, 1), "zero1-fp32", False), (2, 1))
    check(whole, 4, recipe("again", (2, 2), "zero2-fp32", shares), (2, 2))


@pytest.mark.parametrize("zero", ["zero1-fp32", "zero3-bf16"])
def test_clusters_that_train_apart_keep_their_experts_together(
    fleets: Fleets, tmp_path: Path, zero: str
) -> None:
    """DiLoCo over replicated experts, spread on one cluster only: copies are equal to the bit after every merge."""
    sections: dict[str, Any] = {
        "placement": {"policy": "replicated", "table": None},
        "experts": {"exchange": "local", "local_parallel": {"ada": [1, 2]}},
        "sync": {"strategy": "diloco", "every": 2, "check_every": 1, "codec": "int8", "error_feedback": 0.9},
    }
    recipe = recipe_for(tmp_path, name="apart", model="qwen3", zero=zero, sections=sections, steps=4)
    fleets(2, 1).run(train_run, recipe)
    state = state_of(tmp_path, recipe, 4)
    ours = {
        name.removeprefix("ada "): tensor for name, tensor in state.items() if name.startswith("ada weight")
    }
    assert any("#" in name for name in ours)
    assert all(torch.equal(state[f"bob {name}"], tensor) for name, tensor in ours.items())


REFUSALS: dict[str, tuple[Any, str]] = {
    "another cluster": (
        {"cyd": [1, 1]},
        "experts.local_parallel.cyd: unknown cluster, expected one of ada, bob",
    ),
    "too few shares": (
        {"ada": [1]},
        "experts.local_parallel.ada: expected a share for each of the cluster's 2 ranks, got 1",
    ),
    "no share": ({"ada": [1, 0]}, "experts.local_parallel"),
    "not a share": ("all", "experts.local_parallel"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused(tmp_path: Path, name: str) -> None:
    spread, sentence = REFUSALS[name]
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        load(recipe_for(tmp_path, sections={"experts": {"local_parallel": spread}}))

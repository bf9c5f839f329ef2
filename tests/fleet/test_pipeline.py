"""Clusters that run a pipeline compute what one process does, and save what any other does."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_fragment.observe import RunLog
from tests.fleet.harness import Fleets, Rank
from tests.fleet.test_parity import check_agreement, check_same_as_one_process
from tests.fleet.test_resume import assert_same_bits, cut, worst
from tests.fleet.training import Scenario, reference, start, train
from tests.train.runs import losses_of, recipe_for, state_of
from tests.train.runs import train as train_run

TIED = {"tie_word_embeddings": True}
CASES = {
    "2x2-fragment": Scenario(sizes=(2, 2), model="fragment", layout="even", partition=(2, 3)),
    "2x2-qwen3-tied-acc4-ckpt": Scenario(
        sizes=(2, 2), options=TIED, accumulation=4, checkpointing=True, partition=(3, 2)
    ),
    "2x2-mixtral-acc8-padded": Scenario(
        sizes=(2, 2), model="mixtral", layout="uneven", accumulation=8, padding="left", partition=(2, 3)
    ),
    "2x2-only-embedding-hot-top3-acc4": Scenario(
        sizes=(2, 2),
        model="fragment",
        options={"num_experts_per_tok": 3},
        layout="hot",
        accumulation=4,
        partition=(1, 4),
    ),
    "2x2-dense-stage-tied-only-head-acc4": Scenario(
        sizes=(2, 2),
        model="fragment",
        options={**TIED, "num_hidden_layers": 3, "first_k_dense": 1},
        accumulation=4,
        share="idle",
        partition=(2, 4),
    ),
    "2x2-only-head-starved": Scenario(sizes=(2, 2), steered="starved", partition=(4, 1)),
    "4+2-fragment-tied-acc4": Scenario(
        sizes=(4, 2), model="fragment", options=TIED, accumulation=4, checkpointing=True, partition=(2, 3)
    ),
    "4+2-qwen3-crowded-acc8": Scenario(
        sizes=(4, 2), layout="uneven", steered="crowded", accumulation=8, partition=(2, 3), steps=8
    ),
    "4+2-parallel-mixtral-acc4": Scenario(
        sizes=(4, 2),
        model="mixtral",
        layout="even",
        accumulation=4,
        parallel=((2.0, 1.0), ()),
        partition=(2, 3),
    ),
    "3x3-three-stages-qwen3-tied-acc4": Scenario(
        sizes=(3, 3), options={**TIED, "num_hidden_layers": 3}, accumulation=4, partition=(2, 2, 2), steps=8
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_process(fleets: Fleets, name: str) -> None:
    """DeepSpeed#1522 (a stage with nothing but the embedding), #1942 (expert groups within a stage), first dense layers
    that fill a stage, tied embeddings.
    """
    check_same_as_one_process(fleets, CASES[name], f"pipeline {name}")


def weights_at_the_ends(rank: Rank, scenario: Scenario) -> dict[str, torch.Tensor]:
    """Case: train; of the first stage the embedding, of the last the head."""
    stepper = start(rank, scenario)
    for step in range(scenario.steps):
        batches = scenario.batches(step, scenario.reader(rank.place))
        stepper.step(rank.next_step(), batches, learning_rate=scenario.learning_rate)
    model = stepper.engine.module
    found = {
        name: part.weight.detach().clone()
        for name, part in (("embedding", model.model.embed_tokens), ("head", model.lm_head))
        if hasattr(part, "weight")
    }
    stepper.engine.destroy()
    return found


@pytest.mark.parametrize("zero", ["zero1-fp32", "zero1-bf16"])
def test_a_tied_embedding_is_one_weight(fleets: Fleets, zero: str) -> None:
    """piper#13: after 10 steps, embedding and head are equal to the bit on all stages of all clusters."""
    scenario = Scenario(
        sizes=(4, 2), zero=zero, options=TIED, accumulation=4, partition=(2, 3), steps=10, model="fragment"
    )
    answers = fleets(4, 2, stages=2).run(weights_at_the_ends, scenario)
    first = answers[0][0]["embedding"]
    assert not torch.equal(first, scenario.model_of(first.dtype).model.embed_tokens.weight)
    assert [sorted(found) for ranks in answers for found in ranks] == [
        *[["embedding"]] * 2,
        *[["embedding", "head"]] * 2,
        ["embedding"],
        ["embedding", "head"],
    ]
    for ranks in answers:
        for found in ranks:
            assert all(torch.equal(weight, first) for weight in found.values())


@pytest.mark.parametrize("partition", [(2, 3), (1, 4)], ids=["", "only-embedding"])
def test_bf16_trains_like_fp32(fleets: Fleets, partition: tuple[int, ...]) -> None:
    scenario = Scenario(
        sizes=(2, 2),
        zero="zero1-bf16",
        model="fragment",
        accumulation=4,
        checkpointing=True,
        partition=partition,
    )
    fleet = check_agreement(fleets(2, 2, stages=2).run(train, scenario), scenario.steps)
    alone = reference(replace(scenario, zero="zero1-fp32"))
    errors = [abs(one - other) for one, other in zip(fleet.losses, alone.losses, strict=True)]
    print(f"BF16 pipeline loss {max(errors):.1e}")
    assert max(errors) < 0.03


@pytest.mark.timeout(360)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_state_moves_between_layouts(fleets: Fleets, tmp_path: Path, tied: bool) -> None:
    """Pipelines of different width, ZeRO-3, experts spread over ranks, one process a cluster: weights, moments, router
    biases, data and all.
    """
    common: dict[str, Any] = {"steps": 6, "checkpoint_every": 1, "keep_checkpoints": 6, "accumulation": 2}

    def recipe(name: str, sizes: tuple[int, ...], zero: str, spread: bool = False) -> dict[str, Any]:
        sections = {"experts": {"local_parallel": spread}}
        config = {"tie_word_embeddings": tied}
        return recipe_for(
            tmp_path, name=name, sizes=sizes, zero=zero, config=config, sections=sections, **common
        )

    def fleet(sizes: tuple[int, ...], zero: str) -> Any:
        return fleets(*sizes, stages=2 if zero.startswith("pipeline") else 1)

    piped = recipe("piped", (2, 2), "pipeline2-zero1-fp32")
    fleet((2, 2), "pipeline").run(train_run, piped)
    expected, losses = state_of(tmp_path, piped, 6), losses_of(tmp_path, piped)
    same = cut(tmp_path, piped, 3, "same")
    fleet((2, 2), "pipeline").run(train_run, same)
    assert_same_bits(state_of(tmp_path, same, 6), expected)
    assert losses_of(tmp_path, same) == losses

    def check(
        base: dict[str, Any], step: int, name: str, sizes: tuple[int, ...], zero: str, spread: bool = False
    ) -> dict[str, Any]:
        """Go on from a step that `base` itself has written."""
        life = recipe(name, sizes, zero, spread)
        cut(tmp_path, base, step, name)
        assert {began for ranks in fleet(sizes, zero).run(train_run, life) for began in ranks} == {step}
        loss_error = max(abs(losses_of(tmp_path, life)[key] - value) for key, value in losses.items())
        state_error = worst(state_of(tmp_path, life, 6), expected)
        print(f"PIPELINE {tied} {name} loss {loss_error:.1e} state {state_error:.1e}")
        assert loss_error <= 1e-5
        assert state_error <= 1e-5
        return life

    alone = check(piped, 1, "alone", (1, 1), "zero3-fp32")
    wide = check(alone, 2, "wide", (4, 2), "pipeline2-zero1-fp32", spread=True)
    parallel = check(wide, 3, "parallel", (2, 2), "zero3-fp32", spread=True)
    check(parallel, 4, "again", (2, 2), "pipeline2-zero1-fp32")


@pytest.mark.timeout(240)
def test_measured_cut_and_evaluation(fleets: Fleets, tmp_path: Path) -> None:
    """Clusters agree on it; where the cut is changes nothing, and evaluations are those of plain ranks too.

    DeepSpeed#1522: by hand, a stage has nothing but the embedding, and DeepSpeed is to compute gradient norms.
    """
    logs = {}
    for name, method in (("measured", "measured"), ("by-hand", [1, 4]), ("plain", None)):
        recipe = recipe_for(tmp_path, name=name, sizes=(2, 2), steps=4, accumulation=2, eval_every=2)
        config: dict[str, Any] = {"zero_optimization": {"stage": 1}}
        if method is not None:
            config["pipeline"] = {"stages": 2, "partition": method}
        recipe["deepspeed"] = {"config": config}
        fleets(2, 2, stages=2 if method else 1).run(train_run, recipe)
        logs[name] = RunLog(tmp_path / name)
    events = logs["measured"].events
    (outline,) = set(events.loc[events["kind"] == "stages", "message"])
    assert re.fullmatch(r"stage 0 runs embed_tokens( to \S+)?; stage 1 runs (\S+ to )?lm_head", outline)
    by_hand = logs["by-hand"].events
    assert "stage 0 runs embed_tokens; stage 1 runs layers.0 to lm_head" in set(by_hand["message"])
    for name in ("measured", "by-hand"):
        for table in ("steps", "evaluations"):
            found, expected = (
                getattr(logs[key], table).groupby("step")["loss"].mean() for key in (name, "plain")
            )
            assert (found - expected).abs().max() <= 1e-5
        (stages,) = {len(values["stages"]) for values in logs[name].summary()["per_cluster"].values()}
        assert stages == 2
    steps = logs["measured"].steps
    assert set(steps["bubble_expected"]) == {1 / 3}
    assert steps["bubble"].between(0, 1).all()
    waits = steps["stage_0_wan_wait_s"] + steps["stage_1_wan_wait_s"]
    assert (waits / 2 - steps["wan_wait_s"]).abs().max() < 1e-6

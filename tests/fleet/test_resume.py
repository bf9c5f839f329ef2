"""A run that is interrupted and resumed is the run that was not: states, losses and data, in any layout.

One run saves every step; other lives begin from copies of its directory with the later checkpoints taken away, as after
a kill at that step (the log may know more steps than the checkpoints).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_fragment.observe import RunLog
from moe_fragment.train.lock import RunLock
from tests.fleet.harness import Fleets
from tests.train.runs import (
    losses_of,
    recipe_for,
    refused,
    restore_weights,
    sequences_read,
    state_of,
    train,
    train_on_a_full_disk,
    train_poisoned,
    train_to,
)

STEPS = 6
KINDS = {
    "zero1-fp32": "fragment",
    "zero3-fp32": "fragment",
    "zero1-bf16": "qwen3",
    "zero2-bf16": "fragment",
    "zero3-bf16": "fragment",
}


def cut(home: Path, recipe: dict[str, Any], step: int, name: str) -> dict[str, Any]:
    """The recipe of a new life: a copy of a run's directory in which no checkpoint is newer than `step`."""
    shutil.copytree(home / recipe["name"], home / name)
    for path in (home / name).glob("*/checkpoints/step-*"):
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    return {**recipe, "name": name}


def worst(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], skip: str = " random ") -> float:
    """Largest L2 distance of two tensors relative to the larger of its norm and 1e-3 of its kind's."""
    assert {name for name in one if skip not in name} == {name for name in other if skip not in name}
    norms: dict[str, float] = {}
    for name, tensor in other.items():
        kind = name.split()[1]
        norms[kind] = (norms.get(kind, 0.0) ** 2 + float(tensor.double().norm()) ** 2) ** 0.5
    return max(
        float((one[name].double() - tensor.double()).norm())
        / max(float(tensor.double().norm()), 1e-3 * norms[name.split()[1]], 1e-30)
        for name, tensor in other.items()
        if skip not in name
    )


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.timeout(180)
@pytest.mark.parametrize("zero", KINDS)
def test_resumed_run_is_the_uninterrupted_one_to_the_bit(fleets: Fleets, tmp_path: Path, zero: str) -> None:
    """Megatron-LM#761 (resume equals uninterrupted), #6858 (each rank its own random state: dropout is on),
    radixark/Megatron-LM#66 (large experts beside tiny norms).
    """
    recipe = recipe_for(
        tmp_path,
        name="whole",
        model=KINDS[zero],
        zero=zero,
        config={"attention_dropout": 0.2},
        accumulation=2,
        steps=STEPS,
        checkpoint_every=1,
        keep_checkpoints=STEPS,
    )
    fleet = fleets(2, 1)
    assert fleet.run(train, recipe) == [[0, 0], [0]]
    expected, losses = state_of(tmp_path, recipe, STEPS), losses_of(tmp_path, recipe)
    assert len(losses) == 2 * STEPS
    assert not torch.equal(expected["ada random rank-00000"], expected["ada random rank-00001"])
    for step in (1, 4) if zero == "zero1-fp32" else (3,):
        life = cut(tmp_path, recipe, step, f"resumed-{step}")
        assert fleet.run(train, life) == [[step, step], [step]]
        assert_same_bits(state_of(tmp_path, life, STEPS), expected)
        assert losses_of(tmp_path, life) == losses


@pytest.mark.timeout(180)
def test_resumed_in_another_layout(fleets: Fleets, tmp_path: Path) -> None:
    """Other rank counts and ZeRO stages: moments and step counts included, experts by global id (KempnerForge#202).

    With a balance loss: it is each sequence's own, so other micro-batches change nothing.
    """
    common: dict[str, Any] = {
        "steps": STEPS,
        "shares": {"ada": 4, "bob": 1},
        "checkpoint_every": 1,
        "keep_checkpoints": STEPS,
    }
    wide = recipe_for(tmp_path, name="wide", sizes=(2, 1), zero="zero1-fp32", **common)
    fleets(2, 1).run(train, wide)
    expected, losses = state_of(tmp_path, wide, STEPS), losses_of(tmp_path, wide)
    halfway = state_of(tmp_path, wide, 3)
    assert {float(halfway[f"{c} consumed"]) for c in ("ada", "bob")} == {12.0, 3.0}
    assert all(float(halfway[name]) == 3.0 for name in halfway if " steps " in name)
    held = [name.partition("#")[2] for name in halfway if name.startswith("bob weight") and "#" in name]
    assert set(held) == {"1", "3", "4"}

    def check(sizes: tuple[int, ...], zero: str, base: dict[str, Any], name: str) -> dict[str, Any]:
        life = cut(tmp_path, base, 3, name)
        fresh = recipe_for(tmp_path, name=name, sizes=sizes, zero=zero, **common)
        began = fleets(*sizes).run(train, fresh)
        assert {step for ranks in began for step in ranks} == {3}
        assert fresh["name"] == life["name"]
        found = losses_of(tmp_path, fresh)
        loss_error = max(abs(found[key] - value) for key, value in losses.items())
        state_error = worst(state_of(tmp_path, fresh, STEPS), expected)
        print(f"RESUME {name} loss {loss_error:.1e} state {state_error:.1e}")
        assert loss_error <= 1e-5
        assert state_error <= 1e-5
        return fresh

    check((1, 1), "zero1-fp32", wide, "two-ranks-to-one")
    check((2, 1), "zero3-fp32", wide, "stage-1-to-3")
    check((2, 1), "zero2-fp32", wide, "stage-1-to-2")
    narrow = check((1, 1), "zero3-fp32", wide, "two-ranks-to-one-and-stage-1-to-3")
    check((2, 1), "zero1-fp32", narrow, "one-rank-to-two-and-stage-3-to-1")


def damage(path: Path, how: str) -> None:
    """Do something to a checkpoint of one cluster."""
    part, manifest = path / "rank-00000.safetensors", path / "manifest.json"
    if how == "truncated":
        part.write_bytes(part.read_bytes()[:-100])
    elif how == "altered":
        data = bytearray(part.read_bytes())
        data[-1] ^= 1
        part.write_bytes(data)
    elif how == "missing":
        part.unlink()
    elif how == "half a manifest":
        manifest.write_text(manifest.read_text()[:-200])
    elif how == "not a manifest":
        manifest.write_text("[]")
    else:
        text = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**text, **json.loads(how)}))


DAMAGES = {
    "truncated": "rank-00000.safetensors: [0-9]+ bytes, expected [0-9]+; use an earlier checkpoint",
    "altered": "rank-00000.safetensors: damaged since it was written; use an earlier checkpoint",
    "missing": "rank-00000.safetensors: missing; use an earlier checkpoint",
    "half a manifest": "manifest.json: damaged; use an earlier checkpoint",
    "not a manifest": "manifest.json: version None, expected 1",
    '{"version": 99}': "manifest.json: version 99, expected 1",
    '{"placement": {}}': "manifest.json: not a manifest of this version",
    '{"files": []}': "step-00000002: holds 0 of [0-9]+ elements of weight of",
    '{"cluster": "cyd"}': "step-00000002: was written by cluster cyd, not ada",
}


@pytest.mark.timeout(180)
def test_unusable_checkpoint_is_refused_everywhere(fleets: Fleets, tmp_path: Path) -> None:
    """One rank of one cluster has trouble; every rank of every cluster ends at once, with the sentence."""
    fleet = fleets(2, 1)
    recipe = recipe_for(tmp_path, name="whole", steps=2)
    fleet.run(train, recipe)

    def refusals(life: dict[str, Any], sentence: str) -> None:
        for cluster, ranks in enumerate(fleet.run(refused, life, timeout_s=30.0)):
            for error in ranks:
                assert re.search(sentence, error), error
                assert cluster == 0 or error.startswith("FleetError: cluster ada cannot begin: ")

    for index, (how, sentence) in enumerate(DAMAGES.items()):
        life = cut(tmp_path, recipe, 2, f"damaged-{index}")
        damage(tmp_path / life["name"] / "ada" / "checkpoints" / "step-00000002", how)
        refusals(life, sentence)

    everywhere = r"^(CheckpointError|FleetError: cluster ada cannot begin): .*step-00000002: "
    other = recipe_for(tmp_path, name="whole", steps=2, config={"moe_intermediate_size": 16})
    found = fleet.run(refused, other)
    wrong = "is of another model than the recipe's: model.layers.0.mlp.experts.down_proj#0 has 768 elements there, 512"
    assert all(re.search(everywhere + wrong, error) for ranks in found[:1] for error in ranks), found
    table = {"ada": [0, 1, 5], "bob": [2, 3, 4]}
    moved = recipe_for(tmp_path, name="whole", steps=2, sections={"placement": {"table": table}})
    found = fleet.run(refused, moved)
    assert all(re.search(everywhere + "was written under another placement", error) for error in found[0]), (
        found
    )

    (tmp_path / "whole" / "ada" / "schema.json").write_text(
        (tmp_path / "whole" / "bob" / "schema.json").read_text()
    )
    refusals(
        recipe, f"{tmp_path}/whole/ada: cannot resume, the log there has cluster bob, not ada; choose another"
    )


@pytest.mark.timeout(180)
def test_checkpoints_left_by_interrupted_lives(fleets: Fleets, tmp_path: Path) -> None:
    """Clusters with different newest checkpoints go on from the newest common one; half-written ones are not there."""
    fleet = fleets(2, 1)
    recipe = recipe_for(tmp_path, name="whole", steps=4, checkpoint_every=1, keep_checkpoints=4)
    fleet.run(train, recipe)
    expected = state_of(tmp_path, recipe, 4)

    life = cut(tmp_path, recipe, 3, "apart")
    ada, bob = (tmp_path / "apart" / name / "checkpoints" for name in ("ada", "bob"))
    shutil.rmtree(bob / "step-00000003")
    shutil.copytree(ada / "step-00000001", ada / "step-00000004.partial")
    assert fleet.run(train, {**life, "train": {**life["train"], "keep_checkpoints": 1}}) == [[2, 2], [2]]
    assert_same_bits(state_of(tmp_path, life, 4), expected)
    assert [sorted(path.name for path in where.iterdir()) for where in (ada, bob)] == [
        [
            "step-00000003",
            "step-00000004",
        ]  # the step before stays: this cluster cannot know that all have step 4
    ] * 2

    life = cut(tmp_path, recipe, 4, "apart-2")
    for cluster, steps in (("ada", (2, 3)), ("bob", (1, 4))):
        for step in steps:
            shutil.rmtree(tmp_path / "apart-2" / cluster / "checkpoints" / f"step-{step:08d}")
    sentence = (
        "FleetError: run apart-2 has checkpoints, but none that all clusters have: ada [1, 4], bob [2, 3]"
    )
    assert fleet.run(refused, life) == [[sentence, sentence], [sentence]]


@pytest.mark.timeout(180)
def test_step_saved_after_going_back_is_kept(fleets: Fleets, tmp_path: Path) -> None:
    """A checkpoint that another cluster did not have is not among those to keep: it would push out the new one."""
    fleet = fleets(2, 1)
    recipe = recipe_for(tmp_path, name="whole", steps=6, checkpoint_every=2, keep_checkpoints=2)
    fleet.run(train, recipe)
    assert sorted(path.name[-1] for path in (tmp_path / "whole/ada/checkpoints").iterdir()) == ["4", "6"]
    life = cut(tmp_path, recipe, 6, "back")
    shutil.rmtree(tmp_path / "back" / "bob" / "checkpoints" / "step-00000006")
    life["train"] = {**life["train"], "steps": 6, "checkpoint_every": 1, "keep_checkpoints": 1}
    assert fleet.run(train_to, life, 5) == [[4, 4], [4]]
    for cluster in ("ada", "bob"):
        kept = sorted(path.name[-1] for path in (tmp_path / "back" / cluster / "checkpoints").iterdir())
        assert kept == ["4", "5"]


@pytest.mark.timeout(180)
def test_disk_errors_leave_earlier_checkpoints(fleets: Fleets, tmp_path: Path) -> None:
    """Every rank of the cluster learns that one could not write, and the checkpoint before is whole."""
    fleet = fleets(2, 1)
    recipe = recipe_for(tmp_path, name="whole", steps=3, checkpoint_every=2, keep_checkpoints=2)
    sentence = "step-00000003: cannot be written .*No space left.*; earlier checkpoints are untouched"
    for errors in fleet.run(train_on_a_full_disk, recipe)[:1]:
        assert all(re.search(sentence, error) for error in errors), errors
    checkpoints = tmp_path / "whole" / "ada" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]
    assert fleet.run(train, recipe) == [[2, 2], [2]]


@pytest.mark.timeout(120)
def test_weights_alone_never_open_moments(fleets: Fleets, tmp_path: Path) -> None:
    """DeepSpeed#2737: `restore(..., moments=False)` takes weights only and leaves the optimizer new."""
    recipe = recipe_for(tmp_path, name="whole", steps=2)
    fleet = fleets(2, 1)
    fleet.run(train, recipe)
    for kinds, weights_equal, state in [
        part for ranks in fleet.run(restore_weights, recipe) for part in ranks
    ]:
        assert (kinds, weights_equal, state) == (["weight"], True, 0)


@pytest.mark.timeout(180)
def test_poisoned_gradients_are_skipped_and_then_stop_the_run(fleets: Fleets, tmp_path: Path) -> None:
    """One rank's NaN skips the step everywhere; too many in a row stop the run, with a checkpoint to go on from."""
    fleet = fleets(2, 1)
    recipe = recipe_for(tmp_path, name="poisoned", steps=9, max_skipped_steps=3)
    poisoned = (1, 4, 5, 6)
    sentence = "FleetError: 3 steps in a row were given up (train.max_skipped_steps), last: non-finite loss or gradient"
    assert fleet.run(train_poisoned, recipe, poisoned) == [[sentence, sentence], [sentence]]
    losses = losses_of(tmp_path, recipe)
    assert {step for _, step in losses} == set(range(1, 8))
    state = state_of(tmp_path, recipe, 7)
    assert all(bool(torch.isfinite(tensor.double()).all()) for tensor in state.values())
    assert {float(tensor) for name, tensor in state.items() if " steps " in name} == {3.0}
    assert float(state["ada consumed"]) == 7 * 3, "skipped steps use up their data"
    for cluster in ("ada", "bob"):
        lines = (tmp_path / "poisoned" / cluster / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        skipped = [event["step"] for event in events if event["kind"] == "step_skipped"]
        assert skipped == [step + 1 for step in poisoned]
    assert RunLog(tmp_path / "poisoned").summary()["skipped_steps"] == len(poisoned)
    assert fleet.run(train, recipe) == [[7, 7], [7]]
    assert {step for _, step in losses_of(tmp_path, recipe)} == set(range(1, 10))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("zero", ["zero1-fp32", "zero3-fp32"])
def test_no_sequence_is_repeated_or_left_out(fleets: Fleets, tmp_path: Path, zero: str) -> None:
    """torchft#58, and pytorch#28257, DeepSpeed#2223: clusters with other numbers of sequences end together."""
    fleet = fleets(2, 1)
    recipe = recipe_for(tmp_path, name="whole", zero=zero, steps=4, batch=4, shares={"ada": 1, "bob": 3})
    first = fleet.run(sequences_read, recipe, 2)
    second = fleet.run(sequences_read, recipe, 4)
    for cluster, share in enumerate((1, 3)):
        read = [number for life in (first, second) for ranks in life[cluster] for number in ranks]
        assert sorted(read) == list(range(4 * share))


@pytest.mark.timeout(180)
def test_another_model_of_the_same_sizes_a_held_directory_and_fewer_steps_are_refused(
    fleets: Fleets, tmp_path: Path
) -> None:
    """What fits by size alone is not the same model; a directory has one writer; a run does not go back."""
    fleet = fleets(2, 1)
    recipe = recipe_for(tmp_path, name="whole", steps=2, checkpoint_every=1, keep_checkpoints=2)
    fleet.run(train, recipe)
    fields = recipe["model"]["config"]
    others = {**recipe["model"], "config": {**fields, "rms_norm_eps": 1e-3}}
    ((sentence, _), _) = fleet.run(refused, {**recipe, "model": others})
    assert "is of another model than the recipe's: rms_norm_eps is 1e-06 there, 0.001 here" in sentence
    ((sentence, _), _) = fleet.run(refused, {**recipe, "train": {**recipe["train"], "steps": 1}})
    assert "train.steps: expected at least 2, where run whole is already, got 1" in sentence
    held = RunLock(tmp_path / "whole" / "ada")
    ((sentence, _), _) = fleet.run(refused, {**recipe, "train": {**recipe["train"], "steps": 3}})
    assert f"another run is writing here (process {os.getpid()})" in sentence
    held.release()

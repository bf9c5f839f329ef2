"""A cluster that lost its disk takes the others' state, and the run goes on as if nothing had happened."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_fragment.fabric import FleetError
from moe_fragment.observe import RunLog
from moe_fragment.train.heal import transfer_plan
from tests.fleet.harness import Fleets
from tests.fleet.test_resume import assert_same_bits, cut, worst
from tests.fleet.test_sync_state import STREAMING
from tests.train.runs import (
    EVERYWHERE,
    heal_on_a_full_disk,
    losses_of,
    recipe_for,
    refused,
    state_of,
    sync_state,
    train,
    train_to,
)

STEPS = 6


def without(home: Path, recipe: dict[str, Any], step: int, cluster: str) -> dict[str, Any]:
    """A life that begins at `step`, in which `cluster` has nothing."""
    life = cut(home, recipe, step, f"{recipe['name']}-without-{cluster}-{step}")
    shutil.rmtree(home / life["name"] / cluster)
    return life


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("zero", "lost"), [("zero1-fp32", "bob"), ("zero3-fp32", "ada")])
def test_healed_run_is_the_one_that_lost_nothing(
    fleets: Fleets, tmp_path: Path, zero: str, lost: str
) -> None:
    """Exact sync, all experts everywhere: from two ranks to one and the other way, moments, biases, data and all."""
    recipe = recipe_for(
        tmp_path,
        name="whole",
        zero=zero,
        sections=EVERYWHERE,
        steps=STEPS,
        checkpoint_every=1,
        keep_checkpoints=STEPS,
    )
    fleet = fleets(2, 1)
    fleet.run(train, recipe)
    life = without(tmp_path, recipe, 3, lost)
    assert fleet.run(train, life) == [[3, 3], [3]]
    losses, found = losses_of(tmp_path, recipe), losses_of(tmp_path, life)
    assert {step for cluster, step in found if cluster == lost} == {4, 5, 6}
    assert max(abs(found[key] - losses[key]) for key in found) <= 1e-6
    assert worst(state_of(tmp_path, life, STEPS), state_of(tmp_path, recipe, STEPS)) <= 1e-6
    log = RunLog(tmp_path / life["name"])
    healed = log.events[log.events["kind"] == "healed"]
    other = {"ada": "bob", "bob": "ada"}[lost]
    assert list(healed["message"]) == [f"had no checkpoint and took step 3 from cluster {other}"]
    assert set(healed["cluster"]) == {lost}
    received = sum(
        path.stat().st_size
        for path in (tmp_path / life["name"] / lost / "checkpoints/step-00000003").iterdir()
    )
    assert log.summary()["wan_bytes"]["heal"] == pytest.approx(received, rel=0.1)


@pytest.mark.timeout(240)
def test_outer_state_is_received_and_nobody_elses_debt(fleets: Fleets, tmp_path: Path) -> None:
    """While a fragment is under way: global copy, momentum and mean are the giver's; a codec's error is not."""
    sections = {**EVERYWHERE, "sync": {**STREAMING, "codec": "int4", "error_feedback": 0.9}}
    recipe = recipe_for(
        tmp_path,
        name="streaming",
        model="qwen3",
        sections=sections,
        steps=9,
        checkpoint_every=1,
        keep_checkpoints=9,
    )
    fleets(2, 1).run(train_to, recipe, 5)
    life = without(tmp_path, recipe, 5, "bob")
    given = state_of(tmp_path, life | {"train": {**life["train"], "shares": {"ada": 3}}}, 5)
    (begun,) = fleets(2, 1).run(sync_state, life)[1]
    kinds = set()
    for (kind, name), values in begun.items():
        kinds.add(kind)
        if kind in ("error_feedback", "error_pending"):
            assert not values.any()
            assert bool(given[f"ada {kind} {name}"].any())
        else:
            assert torch.equal(values, given[f"ada {kind} {name}"])
    received = state_of(tmp_path, life | {"train": {**life["train"], "shares": {"bob": 2}}}, 5)
    for name in (name.removeprefix("ada outer_weight ") for name in given if " outer_weight " in name):
        assert torch.equal(received[f"bob weight {name}"], given[f"ada outer_weight {name}"])
    assert kinds == {"outer_weight", "outer_velocity", "error_feedback", "error_pending", "in_flight"}
    assert fleets(2, 1).run(train, life) == [[5, 5], [5]]
    state = state_of(tmp_path, life, 9)
    copies = [{name: state[name] for name in state if name.startswith(f"{c} outer")} for c in ("ada", "bob")]
    assert len(copies[0]) == len(copies[1]) > 0
    assert all(torch.equal(copies[1][name.replace("ada", "bob")], copies[0][name]) for name in copies[0])
    again = cut(tmp_path, life, 7, "again")
    fleets(2, 1).run(train, again)
    assert_same_bits(state_of(tmp_path, again, 9), state)


@pytest.mark.timeout(240)
def test_what_nobody_else_has_is_named(fleets: Fleets, tmp_path: Path) -> None:
    """Pinned experts, a syncer's copy, a damaged checkpoint: one sentence everywhere, and nothing is written."""
    fleet = fleets(2, 1)
    pinned = recipe_for(tmp_path, name="pinned", steps=2)
    fleet.run(train, pinned)
    shutil.rmtree(tmp_path / "pinned" / "bob" / "checkpoints")
    said = {answer for ranks in fleet.run(refused, pinned) for answer in ranks}
    assert len(said) == 1
    sentence = said.pop()
    assert sentence.startswith("FleetError: cluster bob has no checkpoint, and ")
    assert "(the first is model.layers.0.mlp.experts.down_proj#1)" in sentence
    assert not list((tmp_path / "pinned" / "bob").glob("checkpoints/*"))

    sections = {**EVERYWHERE, "sync": {"strategy": "decoupled", "every": 2, "fragments": 1}}
    hosted = recipe_for(tmp_path, name="hosted", sections=sections, steps=2, model="qwen3")
    fleet.run(train, hosted)
    shutil.rmtree(tmp_path / "hosted" / "ada" / "checkpoints")
    said = {answer for ranks in fleet.run(refused, hosted) for answer in ranks}
    assert said == {
        "FleetError: cluster ada has no checkpoint, and it hosts the syncer of decoupled, whose copy is nowhere else: "
        "put its run directory back"
    }

    whole = recipe_for(tmp_path, name="damaged", sections=EVERYWHERE, steps=2)
    fleet.run(train, whole)
    shutil.rmtree(tmp_path / "damaged" / "bob" / "checkpoints")
    part = tmp_path / "damaged" / "ada" / "checkpoints" / "step-00000002" / "rank-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    for ranks in fleet.run(refused, whole, timeout_s=60.0):
        for answer in ranks:
            assert answer.startswith("FleetError: cluster ada cannot begin: ")
            assert "rank-00001.safetensors: damaged since it was written" in answer
    assert not (tmp_path / "damaged" / "bob" / "checkpoints").exists()


@pytest.mark.timeout(240)
def test_a_heal_that_fails_leaves_nothing_and_names_the_cause(fleets: Fleets, tmp_path: Path) -> None:
    """A full disk, and a recipe that asks for another placement than the donor's."""
    fleet = fleets(2, 1)
    recipe = recipe_for(tmp_path, name="full", sections=EVERYWHERE, steps=2)
    fleet.run(train_to, recipe, 1)
    shutil.rmtree(tmp_path / "full" / "bob" / "checkpoints")
    for ranks in fleet.run(heal_on_a_full_disk, recipe, timeout_s=60.0):
        for answer in ranks:
            assert answer == "FleetError: cluster bob cannot begin: [Errno 28] No space left on device"
    pinned = recipe_for(tmp_path, name="full", steps=2)
    table = {"ada": [0, 1, 2, 3, 4, 5], "bob": [4, 5]}
    for changed in (pinned, {**recipe, "placement": {"policy": "manual", "table": table}}):
        for ranks in fleet.run(refused, changed, timeout_s=60.0):
            assert all("was written under another placement" in answer for answer in ranks), ranks
    assert not list((tmp_path / "full" / "bob").glob("checkpoints/*"))
    assert fleet.run(train, recipe) == [[1, 1], [1]]


@pytest.mark.timeout(240)
def test_asynchronous_cluster_takes_the_others_base(fleets: Fleets, tmp_path: Path) -> None:
    """A cluster that does not host the syncer may lose its disk."""
    sections = {**EVERYWHERE, "sync": {"strategy": "parameter_server", "every": 2}}
    recipe = recipe_for(
        tmp_path,
        name="served",
        sections=sections,
        steps=4,
        checkpoint_every=2,
        keep_checkpoints=4,
        model="qwen3",
    )
    fleets(2, 1).run(train, recipe)
    life = without(tmp_path, recipe, 2, "bob")
    assert fleets(2, 1).run(train, life) == [[2, 2], [2]]
    manifest = json.loads(
        (tmp_path / life["name"] / "bob/checkpoints/step-00000004/manifest.json").read_text()
    )
    assert manifest["consumed"] == 4 * 2
    state = state_of(tmp_path, life, 4)
    assert torch.equal(state["ada weight model.norm.weight"], state["bob weight model.norm.weight"])


def test_who_gives_what() -> None:
    holds = [["a", "x"], ["a", "y"], ["a", "x", "y"], ["a", "y"]]
    assert transfer_plan(holds, [2], "pqrs") == {(2, 3): ["a", "y"], (2, 0): ["x"]}
    assert transfer_plan(holds, [0, 1], "pqrs") == {(0, 2): ["a", "x"], (1, 2): ["a", "y"]}
    with pytest.raises(FleetError, match=r"cluster p has no checkpoint, and 1 .*\(the first is x\)"):
        transfer_plan(holds, [0, 2], "pqrs")

"""Sync state in checkpoints, and what links cannot change: resumes to the bit, other layouts, any speed and jitter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_fragment.observe import RunLog
from moe_fragment.train.checkpoint import CheckpointError, is_merged
from moe_fragment.train.export import open_checkpoints, whole_state
from tests.fleet.harness import Fleets
from tests.fleet.test_resume import assert_same_bits, cut, worst
from tests.fleet.training import Scenario, train_on_links
from tests.train.runs import (
    EVERYWHERE,
    losses_of,
    recipe_for,
    refused,
    state_of,
    sync_state,
    train,
    train_to,
    train_unmerged,
)

STEPS = 9
STREAMING: dict[str, Any] = {
    "strategy": "streaming_diloco",
    "every": 4,
    "fragments": 2,
    "overlap": 1,
    "outer": {"learning_rate": 0.4},
    "check_every": 1,
}
LIVES: dict[str, tuple[dict[str, Any], str, tuple[int, ...]]] = {
    "streaming": (
        {"sync": {**STREAMING, "codec": "int4", "error_feedback": 0.9}},
        "zero3-bf16",
        (1, 2, 4, 5),
    ),
    "sparseloco": (
        {**EVERYWHERE, "sync": {"preset": "sparseloco", "every": 3}},
        "zero1-fp32",
        (2, 4),
    ),
    "mixing": ({"sync": {"strategy": "butterfly", "rounds": "one", "every": 2}}, "zero1-fp32", (3,)),
    "gradient": ({"sync": {"codec": "int4", "error_feedback": 1.0}}, "zero1-bf16", (4,)),
}


def life_of(home: Path, name: str, **train_fields: Any) -> dict[str, Any]:
    """A recipe that saves every step."""
    sections, zero, _ = LIVES[name]
    return recipe_for(
        home,
        name="whole",
        zero=zero,
        model="qwen3",
        sections=sections,
        steps=STEPS,
        checkpoint_every=1,
        keep_checkpoints=STEPS,
        **train_fields,
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", LIVES)
def test_resumes_to_the_bit(fleets: Fleets, tmp_path: Path, name: str) -> None:
    """pytorch#75666 (error feedback is saved), pytorch#51427 (compression from the first step).

    Between merges, while a fragment is under way, and with what codecs still owe."""
    recipe = life_of(tmp_path, name)
    fleets(2, 1).run(train, recipe)
    expected, losses = state_of(tmp_path, recipe, STEPS), losses_of(tmp_path, recipe)
    kinds = {key.split()[1] for key in state_of(tmp_path, recipe, STEPS - 1)}
    assert {"outer_weight", "error_feedback"} & kinds or name == "mixing"
    check_export(tmp_path, recipe, expected, name)
    for step in LIVES[name][2]:
        life = cut(tmp_path, recipe, step, f"resumed-{step}")
        assert {began for ranks in fleets(2, 1).run(train, life) for began in ranks} == {step}
        assert_same_bits(state_of(tmp_path, life, STEPS), expected)
        assert losses_of(tmp_path, life) == losses


def check_export(home: Path, recipe: dict[str, Any], last: dict[str, torch.Tensor], name: str) -> None:
    """Of copies that are apart, an export takes the global one, or their mean if they are only mixed."""
    middle = whole_state(open_checkpoints(home / recipe["name"], STEPS - 2))["model.norm.weight"]
    state = state_of(home, recipe, STEPS - 2)
    copies = [state[f"{cluster} weight model.norm.weight"] for cluster in ("ada", "bob")]
    if name == "gradient":
        assert torch.equal(copies[0], copies[1])
        assert torch.equal(middle, copies[0])
        return
    assert not torch.equal(copies[0], copies[1])
    if name == "mixing":
        torch.testing.assert_close(middle, (copies[0] + copies[1]) / 2)
        return
    assert torch.equal(middle, state["ada outer_weight model.norm.weight"])
    end = whole_state(open_checkpoints(home / recipe["name"], STEPS))["model.norm.weight"]
    assert torch.equal(end, last["bob weight model.norm.weight"])


@pytest.mark.timeout(240)
def test_resumes_in_another_layout(fleets: Fleets, tmp_path: Path) -> None:
    """Outer weights, momentum and a fragment under way go from two ranks and ZeRO-1 to one and ZeRO-3."""
    common: dict[str, Any] = {
        "sections": {"sync": STREAMING},
        "steps": STEPS,
        "shares": {"ada": 4, "bob": 1},
        "checkpoint_every": 1,
        "keep_checkpoints": STEPS,
    }
    wide = recipe_for(tmp_path, name="wide", sizes=(2, 1), zero="zero1-fp32", **common)
    fleets(2, 1).run(train, wide)
    cut(tmp_path, wide, 5, "narrow")
    assert any(" in_flight " in key for key in state_of(tmp_path, {**wide, "name": "narrow"}, 5))
    narrow = recipe_for(tmp_path, name="narrow", sizes=(1, 1), zero="zero3-fp32", **common)
    fleets(1, 1).run(train, narrow)
    losses, found = losses_of(tmp_path, wide), losses_of(tmp_path, narrow)
    loss_error = max(abs(found[key] - value) for key, value in losses.items())
    state_error = worst(state_of(tmp_path, narrow, STEPS), state_of(tmp_path, wide, STEPS))
    print(f"SYNC RESUME loss {loss_error:.1e} state {state_error:.1e}")
    assert loss_error <= 1e-5
    assert state_error <= 1e-5


@pytest.mark.timeout(240)
def test_what_a_codec_owes_follows_the_parameter(fleets: Fleets, tmp_path: Path) -> None:
    """pytorch#49418 (not the bucket), DeepSpeed's 1-bit Adam (not the rank count): two rails of two ranks to one of
    one."""
    sync = {**STREAMING, "codec": "int4", "error_feedback": 0.9}
    common: dict[str, Any] = {"sections": {"sync": sync}, "checkpoint_every": 1, "keep_checkpoints": STEPS}
    wide = recipe_for(tmp_path, name="owes", sizes=(2, 2), zero="zero3-fp32", steps=STEPS, **common)
    fleets(2, 2).run(train_to, wide, 5)
    narrow = recipe_for(tmp_path, name="owes", sizes=(1, 1), zero="zero1-fp32", steps=STEPS, **common)
    expected = state_of(tmp_path, wide, 5)
    found = fleets(1, 1).run(sync_state, narrow)
    kinds = set()
    for cluster, ranks in zip(("ada", "bob"), found, strict=True):
        for (kind, name), values in ranks[0].items():
            assert torch.equal(values, expected[f"{cluster} {kind} {name}"])
            kinds.add(kind)
    assert kinds == {"outer_weight", "outer_velocity", "error_feedback", "error_pending", "in_flight"}
    assert not torch.equal(
        expected["ada error_feedback lm_head.weight"], expected["bob error_feedback lm_head.weight"]
    )


def test_another_strategy_is_refused(fleets: Fleets, tmp_path: Path) -> None:
    recipe = life_of(tmp_path, "sparseloco")
    fleets(2, 1).run(train, {**recipe, "train": {**recipe["train"], "steps": 2}})
    for sync, sentence in (
        ({"strategy": "allreduce"}, "the checkpoint was written under another kind of strategy"),
        (
            {"strategy": "streaming_diloco", "every": 9, "fragments": 2},
            "sync.fragments: the checkpoint has 1",
        ),
    ):
        answers = fleets(2, 1).run(refused, {**recipe, "sync": sync})
        assert all(sentence in answer for ranks in answers for answer in ranks), answers


@pytest.mark.timeout(240)
def test_copies_that_were_refused_are_not_exported(fleets: Fleets, tmp_path: Path) -> None:
    """Too far apart at the end: the run says so, keeps each cluster's own, and goes on under another bound and H."""
    far: dict[str, Any] = {"strategy": "teleport", "every": 4, "guard": {"warn": 1e-9, "refuse": 1e-8}}
    recipe = recipe_for(tmp_path, name="apart", sections={"sync": far}, steps=4, checkpoint_every=2)
    fleets(2, 1).run(train, recipe)
    events = RunLog(tmp_path / "apart").events
    assert "sync_refused" in set(events["kind"])
    with pytest.raises(CheckpointError, match="too far apart to be merged"):
        whole_state(open_checkpoints(tmp_path / "apart"))
    near = {**recipe, "sync": {"strategy": "teleport", "every": 3}, "train": {**recipe["train"], "steps": 6}}
    fleets(2, 1).run(train, near)
    state = state_of(tmp_path, near, 6)
    merged = whole_state(open_checkpoints(tmp_path / "apart"))["model.norm.weight"]
    assert torch.equal(merged, state["ada weight model.norm.weight"])
    assert torch.equal(merged, state["bob weight model.norm.weight"])


@pytest.mark.timeout(240)
def test_a_last_merge_that_failed_is_made_up_for(fleets: Fleets, tmp_path: Path) -> None:
    """The last checkpoint is there, but the run is not complete: the next life merges, evaluates and saves it again."""
    sync = {"strategy": "local_sgd", "every": 3}
    recipe = recipe_for(tmp_path, name="unmerged", sections={"sync": sync}, steps=5, checkpoint_every=1)
    assert all(
        "the last merge failed 4 times" in said for said in fleets(2, 1).run(train_unmerged, recipe)[0]
    )
    assert not is_merged(tmp_path / "unmerged" / "ada", 5)
    fleets(2, 1).run(train, recipe)
    assert is_merged(tmp_path / "unmerged" / "ada", 5)
    state = state_of(tmp_path, recipe, 5)
    assert torch.equal(state["ada weight model.norm.weight"], state["bob weight model.norm.weight"])


LINKS: list[dict[str, str]] = [
    {"bandwidth": "10 Gbit/s", "rtt": "1 ms"},
    {"bandwidth": "40 Mbit/s", "rtt": "20 ms", "jitter": "15 ms"},
]
SPEEDS: dict[str, Scenario] = {
    "allreduce": Scenario(sizes=(1, 1), sync={}),
    "encoded": Scenario(sizes=(1, 1), sync={"codec": "int8", "error_feedback": 1.0}),
    "diloco": Scenario(
        sizes=(2, 1), sync={"strategy": "diloco", "every": 3}, exchange="local", layout="even"
    ),
    "streaming": Scenario(sizes=(2, 1), sync={**STREAMING, "mix": 0.5, "codec": "fp4"}),
}


@pytest.mark.parametrize("name", SPEEDS)
def test_links_change_no_bit(fleets: Fleets, tmp_path: Path, name: str) -> None:
    """Losses and trunks after every step are the same whatever bandwidth, latency and jitter, so whatever the order in
    which transfers end.
    """
    scenario = replace(SPEEDS[name], steps=8)
    fleet = fleets(*scenario.sizes)
    found = [
        fleet.run(train_on_links, scenario, links, f"{tmp_path.name}-{at}") for at, links in enumerate(LINKS)
    ]
    for one, other in zip(*found, strict=True):
        assert one[0].losses == other[0].losses
        assert one[0].trunk_hashes == other[0].trunk_hashes
        assert one[0].syncs == other[0].syncs

"""Fleets whose clusters train apart and merge: against one process, to the bit among themselves, whatever the
layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_fragment.fabric import OK
from tests.fleet.apart import train_apart
from tests.fleet.harness import Fleets
from tests.fleet.models import EXPERTS
from tests.fleet.training import History, Scenario, reference, train

OUTER = {"learning_rate": 0.7, "momentum": 0.9}
DILOCO: dict[str, Any] = {"strategy": "diloco", "every": 4, "outer": OUTER, "check_every": 1}
SCENARIOS = {
    "tokens, pinned": Scenario(sizes=(2, 1), sync=DILOCO, layout="uneven", accumulation=3, steps=10),
    "tokens, ZeRO-3": Scenario(
        sizes=(2, 1), sync=DILOCO, layout="scattered", zero="zero3-fp32", model="mixtral", steps=10
    ),
    "tokens, ZeRO-2": Scenario(
        sizes=(2, 1), sync=DILOCO, layout="scattered", zero="zero2-fp32", accumulation=3, steps=10
    ),
    "local, replicated": Scenario(
        sizes=(2, 1), sync=DILOCO, layout="replicated", exchange="local", zero="zero3-fp32", steps=10
    ),
    "pipeline, tied": Scenario(
        sizes=(4, 2),
        sync=DILOCO,
        layout="uneven",
        options={"tie_word_embeddings": True},
        accumulation=4,
        partition=(2, 3),
        steps=10,
    ),
    "pipeline, local, replicated": Scenario(
        sizes=(2, 2),
        sync=DILOCO,
        layout="replicated",
        exchange="local",
        model="mixtral",
        accumulation=3,
        partition=(3, 2),
        steps=10,
    ),
    "local SGD": Scenario(
        sizes=(2, 1),
        sync={"strategy": "local_sgd", "every": 3, "check_every": 1},
        layout="replicated",
        exchange="local",
        steps=8,
    ),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_same_as_one_process(fleets: Fleets, name: str) -> None:
    """torchft#171 (clusters of several ranks), accelerate#2790 (accumulation: a sync is no optimizer step).

    Losses to 1e-5, final weights to 1e-5 relative per tensor, on clusters of two ranks and one, with unequal
    batches."""
    scenario = SCENARIOS[name]
    histories = fleets(*scenario.sizes, stages=scenario.stages).run(train, scenario)
    first = histories[0][0]
    assert first.outcomes == [OK] * scenario.steps, first.reasons
    alone, weights = train_apart(scenario)
    worst = max(abs(one - other) for one, other in zip(first.losses, alone.losses, strict=True))
    errors = []
    for ranks, expected in zip(histories, weights, strict=True):
        found = ranks[0].final
        for tensor, values in found.items():
            parameter, _, expert = tensor.partition("#")
            alone_values = (
                expected[parameter].view(EXPERTS, -1)[int(expert)] if expert else expected[parameter]
            )
            errors.append((float((values - alone_values).norm() / alone_values.norm()), tensor))
    print(f"APART {name}: loss {worst:.1e}, weights {max(errors)}")
    assert worst <= 1e-5
    assert max(errors)[0] <= 1e-5
    check_equal_trunks(histories, scenario)


def check_equal_trunks(histories: list[list[History]], scenario: Scenario) -> None:
    """All clusters hold the same trunk at the end, to the bit, and different ones in between."""
    ends = {history.trunk_hashes[-1] for ranks in histories for history in ranks}
    assert len(ends) == 1
    apart = {ranks[0].trunk_hashes[0] for ranks in histories}
    assert len(apart) == len(histories)
    assert all(history.syncs == histories[0][0].syncs for ranks in histories for history in ranks)
    assert histories[0][0].syncs
    assert {outcome for _, _, outcome in histories[0][0].syncs} == {"merged"}


STREAMING: dict[str, Any] = {
    "strategy": "streaming_diloco",
    "every": 6,
    "fragments": 2,
    "overlap": 1,
    "mix": 0.5,
    "check_every": 1,
}
VARIANTS: dict[str, tuple[tuple[int, ...], str, dict[str, Any], str, str]] = {
    "streaming fp4, pipeline": (
        (4, 2),
        "pipeline2-zero1-bf16",
        {**STREAMING, "codec": "fp4"},
        "tokens",
        "scattered",
    ),
    "butterfly, pipeline, hot experts": (
        (2, 2),
        "pipeline2-zero1-fp32",
        {"strategy": "butterfly", "every": 3, "check_every": 1},
        "tokens",
        "hot",
    ),
    "teleport, pipeline": (
        (2, 2),
        "pipeline2-zero1-fp32",
        {"strategy": "teleport", "every": 5, "check_every": 1},
        "local",
        "even",
    ),
    "streaming fp4": ((2, 1), "zero1-bf16", {**STREAMING, "codec": "fp4"}, "tokens", "scattered"),
    "streaming, replicated": ((2, 1), "zero3-fp32", {**STREAMING, "codec": "int8"}, "local", "replicated"),
    "sparseloco": (
        (1, 1),
        "zero1-fp32",
        {"preset": "sparseloco", "every": 4, "check_every": 1},
        "tokens",
        "even",
    ),
    "butterfly": (
        (1, 1, 1),
        "zero1-fp32",
        {"strategy": "butterfly", "every": 3, "check_every": 1},
        "tokens",
        "thirds",
    ),
    "streaming, ZeRO-2": ((2, 1), "zero2-bf16", {**STREAMING, "codec": "int8"}, "tokens", "uneven"),
    "hot experts": ((2, 1), "zero1-fp32", {**DILOCO, "codec": "int8"}, "tokens", "hot"),
    "teleport": (
        (1, 1),
        "zero1-fp32",
        {"strategy": "teleport", "every": 5, "check_every": 1},
        "local",
        "even",
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_copies_are_equal_to_the_bit_at_the_end(fleets: Fleets, name: str) -> None:
    sizes, zero, sync, exchange, layout = VARIANTS[name]
    scenario = Scenario(sizes=sizes, zero=zero, sync=sync, exchange=exchange, layout=layout, steps=13)
    if zero.startswith("pipeline"):
        scenario = replace(scenario, partition=(2, 3), options={"tie_word_embeddings": True})
    histories = fleets(*sizes, stages=scenario.stages).run(train, scenario)
    for ranks in histories:
        assert ranks[0].outcomes == [OK] * scenario.steps, ranks[0].reasons
        assert ranks[0].losses[-1] < ranks[0].losses[0] + 0.2
    check_equal_trunks(histories, scenario)
    if layout in ("hot", "replicated"):
        shared = set(histories[0][0].final) & set(histories[1][0].final)
        assert any("#" in tensor for tensor in shared)
        for tensor in shared:
            assert torch.equal(histories[0][0].final[tensor], histories[1][0].final[tensor]), tensor


def test_gradients_of_a_pipeline(fleets: Fleets) -> None:
    """Encoded, and by butterfly: the copies, the last stage's of the tied embedding too, stay equal to the bit."""
    scenario = Scenario(
        sizes=(4, 2), options={"tie_word_embeddings": True}, accumulation=4, partition=(2, 3), steps=10
    )
    exact = fleets(4, 2, stages=2).run(train, scenario)[0][0]
    for sync in ({"codec": "int8", "error_feedback": 1.0}, {"strategy": "butterfly"}):
        histories = fleets(4, 2, stages=2).run(train, replace(scenario, sync=sync))
        for ranks in histories:
            assert ranks[0].trunk_hashes == histories[0][0].trunk_hashes
        errors = [abs(a - b) for a, b in zip(histories[0][0].losses, exact.losses, strict=True)]
        assert max(errors) < (1e-5 if "strategy" in sync else 0.1)


@pytest.mark.parametrize("codec", ["int8", [{"topk": {"k": 256, "block": 1024}}, "int8"]])
def test_gradient_codec_trains_like_the_exact_sum(fleets: Fleets, codec: Any) -> None:
    """Trunk copies stay equal to the bit in every step, and the losses near those of the exact all-reduce."""
    scenario = Scenario(sizes=(2, 1), layout="scattered", steps=15)
    exact = fleets(2, 1).run(train, scenario)[0][0]
    histories = fleets(2, 1).run(train, replace(scenario, sync={"codec": codec, "error_feedback": 1.0}))
    for ranks in histories:
        assert ranks[0].trunk_hashes == histories[0][0].trunk_hashes
    found = histories[0][0]
    assert found.losses[0] == exact.losses[0]
    assert max(abs(one - other) for one, other in zip(found.losses, exact.losses, strict=True)) < 0.02


def test_butterfly_gradients_equal_the_all_reduce(fleets: Fleets) -> None:
    scenario = Scenario(sizes=(1, 1, 1), layout="thirds", steps=8)
    exact = fleets(1, 1, 1).run(train, scenario)[0][0]
    found = fleets(1, 1, 1).run(train, replace(scenario, sync={"strategy": "butterfly"}))[0][0]
    assert max(abs(one - other) for one, other in zip(found.losses, exact.losses, strict=True)) < 1e-5


def test_replicated_experts_under_a_gradient_strategy(fleets: Fleets) -> None:
    """Experts 1 and 6 on both clusters: gradients are summed over the copies, and the run is one process's."""
    scenario = Scenario(sizes=(2, 1), layout="hot", steps=12)
    histories = fleets(2, 1).run(train, scenario)
    alone = reference(scenario)
    assert max(abs(a - b) for a, b in zip(histories[0][0].losses, alone.losses, strict=True)) < 1e-5
    assert histories[0][0].norms == pytest.approx(alone.norms, rel=1e-5)
    shared = set(histories[0][0].final) & set(histories[1][0].final)
    assert sum("#" in tensor for tensor in shared) == 8
    for tensor in shared:
        assert torch.equal(histories[0][0].final[tensor], histories[1][0].final[tensor])


def test_one_cluster_is_plain_data_parallel(fleets: Fleets) -> None:
    """pytorch#74157: with nobody to average with, local SGD of every period is the cluster's own training;
    hivemind#440: a lone cluster waits for nobody.
    """
    scenario = Scenario(sizes=(2,), layout="alone", steps=8)
    plain = fleets(2).run(train, scenario)[0]
    local = fleets(2).run(train, replace(scenario, sync={"strategy": "local_sgd", "every": 4}))[0]
    alone = reference(scenario)
    assert [outcome for _, _, outcome in local[0].syncs] == ["merged"] * 2
    assert max(abs(one - other) for one, other in zip(local[0].losses, plain[0].losses, strict=True)) < 1e-5
    assert max(abs(one - other) for one, other in zip(local[0].losses, alone.losses, strict=True)) < 1e-5
    for tensor, values in plain[0].final.items():
        torch.testing.assert_close(local[0].final[tensor], values, rtol=1e-4, atol=1e-6, msg=tensor)

"""A fleet computes what one process computes: losses, gradients of trunk and experts, norms, router bias.

The table below covers every pair of values of its nine columns (`test_table_is_a_pairwise_cover`), not their
product. Its last rows are combinations that deserve a run of their own.

The rule for gradients: of each tensor (an expert counts by itself), the L2 distance to one process's is at most 1e-6
of its norm, at the first and at the last step. On a processor whose kernels round worse than that, the bound is what
the two runs may lose to rounding, each as much as one process does against fp64, and never more than 3e-6. A tensor
that is zero (an expert without a token) must be zero. One process is evaluated at the fleet's own weights, so that
the last step does not measure how far Adam lets two runs drift; that drift is what the 20 losses measure.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

from moe_fragment.fabric import OK
from tests.fleet.harness import Fleets
from tests.fleet.training import (
    History,
    Pieces,
    Scenario,
    by_expert,
    gradients_at,
    reference,
    train,
)

LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-6
ROUNDING_CAP = 3e-6
ROUNDING_FACTOR = 2.0

Row = tuple[tuple[int, ...], str, str, int, bool, str, str, str, str]
COLUMNS = ("sizes", "zero", "layout", "accumulation", "checkpointing", "padding", "share", "steered", "model")
TABLE: list[Row] = [
    ((1, 1), "zero1", "scattered", 1, False, "", "equal", "", "fragment"),
    ((1, 1), "zero3", "scattered", 3, False, "right", "idle", "starved", "qwen3"),
    ((1, 1), "zero3", "even", 3, True, "left", "equal", "", "mixtral"),
    ((1, 1), "zero3", "uneven", 3, False, "", "unequal", "crowded", "fragment"),
    ((1, 1), "zero3", "scattered", 1, False, "", "one", "starved", "fragment"),
    ((2, 1), "zero3", "even", 1, True, "left", "unequal", "crowded", "qwen3"),
    ((2, 1), "zero1", "uneven", 3, False, "right", "unequal", "crowded", "mixtral"),
    ((2, 1), "zero1", "even", 1, False, "", "one", "", "qwen3"),
    ((2, 1), "zero3", "scattered", 1, True, "left", "idle", "crowded", "mixtral"),
    ((2, 1), "zero1", "even", 3, False, "", "equal", "starved", "fragment"),
    ((2, 1), "zero3", "uneven", 1, True, "", "idle", "", "qwen3"),
    ((2, 2), "zero3", "uneven", 3, True, "", "one", "starved", "mixtral"),
    ((2, 2), "zero1", "even", 1, True, "right", "idle", "", "fragment"),
    ((2, 2), "zero1", "uneven", 1, False, "left", "unequal", "starved", "fragment"),
    ((2, 2), "zero1", "uneven", 1, True, "right", "equal", "crowded", "qwen3"),
    ((2, 2), "zero3", "scattered", 1, False, "", "unequal", "", "mixtral"),
    # The router bias with accumulation and recomputation; three clusters; a cluster without any expert.
    ((2, 1), "zero3", "scattered", 3, True, "right", "unequal", "", "fragment"),
    ((1, 1, 1), "zero1", "thirds", 1, True, "", "unequal", "", "qwen3"),
    ((2, 1), "zero1", "none", 1, True, "", "unequal", "", "mixtral"),
    # ZeRO-2, which reduces every micro-batch.
    ((2, 1), "zero2", "scattered", 3, True, "right", "unequal", "", "fragment"),
    ((2, 2), "zero2", "uneven", 1, False, "", "idle", "starved", "qwen3"),
]
COVERED: dict[str, list[object]] = {
    "sizes": [(1, 1), (2, 2), (2, 1)],
    "zero": ["zero1", "zero3"],
    "layout": ["even", "uneven", "scattered"],
    "accumulation": [1, 3],
    "checkpointing": [False, True],
    "padding": ["", "left", "right"],
    "share": ["equal", "unequal", "idle", "one"],
    "steered": ["", "starved", "crowded"],
    "model": ["qwen3", "mixtral", "fragment"],
}
IMPOSSIBLE = {("padding", "left", "share", "one"), ("padding", "right", "share", "one")}
"""A single token cannot be padded, nor crowd an expert."""
IMPOSSIBLE |= {("share", "one", "steered", "crowded")}


def scenario_of(row: Row) -> Scenario:
    values = dict(zip(COLUMNS, row, strict=True))
    return Scenario(**{**values, "zero": f"{values['zero']}-fp32"})  # type: ignore[arg-type]


def name_of(row: Row) -> str:
    sizes, zero, layout, accumulation, checkpointing, padding, share, steered, model = row
    words = [
        "+".join(map(str, sizes)),
        zero,
        model,
        layout,
        f"acc{accumulation}",
        "ckpt" * checkpointing,
        padding,
        share,
        steered,
    ]
    return "-".join(filter(None, words))


def test_table_is_a_pairwise_cover() -> None:
    needed = {
        (one, x, other, y)
        for one, other in itertools.combinations(COLUMNS, 2)
        for x in COVERED[one]
        for y in COVERED[other]
    }
    present = {
        (one, row[i], other, row[j])
        for row in TABLE
        for (i, one), (j, other) in itertools.combinations(enumerate(COLUMNS), 2)
    }
    assert needed - present == IMPOSSIBLE


@dataclass(frozen=True, order=True)
class Error:
    """Of one tensor's gradient: its share of what is allowed, then the relative error, and where."""

    of_allowed: float
    relative: float
    name: str


def worst_gradient(found: Pieces, alone: Pieces, exact: Pieces, *, experts: bool) -> Error:
    """The tensor with the largest error by the module's rule.

    Args:
        found: of the fleet.
        alone: of one process.
        exact: of one process in fp64.
        experts: look at experts only, or else at the trunk only.
    """
    errors = [Error(0.0, 0.0, "")]
    for name in [name for name in found if ("#" in name) == experts]:
        expected = alone[name].double()
        norm, distance = float(expected.norm()), float((found[name].double() - expected).norm())
        rounding = ROUNDING_FACTOR * float((exact[name] - expected).norm())
        allowed = max(GRADIENT_TOLERANCE * norm, min(rounding, ROUNDING_CAP * norm))
        if norm == 0.0:
            assert distance == 0.0, f"{name} has a gradient, alone it has none"
            continue
        errors.append(Error(distance / allowed, distance / norm, name))
    return max(errors)


def merged(histories: list[list[History]], step: int, what: str) -> Pieces:
    """Weights or gradients of the whole model: the trunk of the first cluster, the experts of all."""
    pieces: Pieces = {}
    for ranks in reversed(histories):
        pieces.update(getattr(ranks[0], what)[step])
    return pieces


def check_agreement(histories: list[list[History]], steps: int) -> History:
    """What must be equal on all ranks, whatever the numbers are; returns the first rank's history."""
    first = histories[0][0]
    assert first.outcomes == [OK] * steps, first.reasons
    for ranks in histories:
        for history in ranks:
            assert history.losses == first.losses
            assert history.norms == first.norms
            assert history.trunk_hashes == first.trunk_hashes, "trunk copies differ between clusters"
            for step, bias in first.biases.items():
                assert bias is None or torch.equal(bias, history.biases[step])
    return first


@pytest.mark.parametrize("row", TABLE, ids=name_of)
def test_same_as_one_process(fleets: Fleets, row: Row) -> None:
    """Covers DeepSpeed#4808 and #5066 (experts without tokens under ZeRO-3), #5794 (the last layer is MoE, with
    recomputation), #5259 and #6546 (scale of expert gradients), #8475 and #8613 (norm with experts), transformers#35203
    (accumulation), #37474 and pytorch#36516 (unequal shares and cluster sizes), sglang#38773 (no token at all).
    """
    scenario = scenario_of(row)
    check_same_as_one_process(fleets, scenario, name_of(row))


def check_same_as_one_process(fleets: Fleets, scenario: Scenario, name: str) -> None:
    """Losses, gradients, norms, router bias, by the module's rule."""
    last = scenario.steps - 1
    histories = fleets(*scenario.sizes, stages=scenario.stages).run(train, scenario, (0, last))
    fleet = check_agreement(histories, scenario.steps)
    alone = reference(scenario)

    loss_error = max(abs(one - other) for one, other in zip(fleet.losses, alone.losses, strict=True))
    norm_error = abs(fleet.norms[0] - alone.norms[0]) / alone.norms[0]
    trunk, experts = [], []
    for step in (0, last):
        found, weights = merged(histories, step, "gradients"), merged(histories, step, "weights")
        one, exact = (
            by_expert(gradients_at(scenario, weights, fleet.biases[step], step, dtype), found)
            for dtype in (torch.float32, torch.float64)
        )
        trunk.append(worst_gradient(found, one, exact, experts=False))
        experts.append(worst_gradient(found, one, exact, experts=True))
    print(f"PARITY {name} loss {loss_error:.1e} norm {norm_error:.1e} {max(trunk)} {max(experts)}")
    assert loss_error <= LOSS_TOLERANCE
    assert norm_error <= GRADIENT_TOLERANCE
    assert max(trunk).of_allowed <= 1.0, max(trunk)
    assert max(experts).of_allowed <= 1.0, max(experts)
    if scenario.model == "fragment":
        assert torch.equal(fleet.biases[scenario.steps], alone.biases[scenario.steps])
        assert fleet.biases[scenario.steps].abs().max() > 0


def test_clip_norm_counts_each_expert_once(fleets: Fleets) -> None:
    """DeepSpeed#8475, #8613: the clip norm is sqrt(trunk^2 + sum of every expert's^2), whoever holds the expert."""
    norms = {}
    for layout in ("even", "scattered", "none"):
        scenario = Scenario(layout=layout, steps=1, clip_norm=0.0)
        histories = fleets(1, 1).run(train, scenario, (0,))
        gradients = merged(histories, 0, "gradients")
        squares = [float(tensor.double().square().sum()) for tensor in gradients.values()]
        norms[layout] = histories[0][0].norms[0]
        assert norms[layout] == pytest.approx(math.sqrt(math.fsum(squares)), rel=1e-6)
    assert max(norms.values()) == pytest.approx(min(norms.values()), rel=1e-6)


@pytest.mark.parametrize("zero", ["zero1-bf16", "zero2-bf16", "zero3-bf16"])
def test_bf16_trains_like_fp32(fleets: Fleets, zero: str) -> None:
    """pytorch#111131 (bf16 over gloo): bf16 travels as bytes; trunk copies stay equal to the bit."""
    scenario = Scenario(sizes=(2, 1), zero=zero, model="fragment", accumulation=3, checkpointing=True)
    fleet = check_agreement(fleets(2, 1).run(train, scenario), scenario.steps)
    alone = reference(replace(scenario, zero="zero1-fp32"))
    errors = [abs(one - other) for one, other in zip(fleet.losses, alone.losses, strict=True)]
    print(f"BF16 {zero} loss {max(errors):.1e} {fleet.losses[0]:.3f} {fleet.losses[-1]:.3f}")
    assert max(errors) < 0.03
    assert len(set(fleet.trunk_hashes)) == scenario.steps

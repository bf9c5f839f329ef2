"""Cases that look closer than a training run: fp64 without DeepSpeed, and ZeRO's gradients against its own access."""

from __future__ import annotations

from typing import Any

import torch

from tests.fleet.harness import Rank
from tests.fleet.models import join
from tests.fleet.training import ADAM, LAYOUTS, Pieces, Scenario, canonical, start


def logits_before_and_after(rank: Rank, scenario: Scenario) -> tuple[torch.Tensor, torch.Tensor]:
    """Case: logits of the same batch from the whole model and from its fragments; ranks have unequal batches."""
    from moe_fragment.models.fragment import fragment

    model = scenario.model_of().eval()
    tokens = scenario.batch(0, rank.place, 0).input_ids
    with torch.no_grad():
        before = model(input_ids=tokens, use_cache=False).logits
        fragment(model, _placement(rank, scenario), rank.fabric)
        rank.fabric.begin_step(rank.next_step())
        after = model(input_ids=tokens, use_cache=False).logits
    _finish(rank)
    return before, after


def train_in_fp64(rank: Rank, scenario: Scenario) -> tuple[list[float], list[Pieces]]:
    """Case: plain torch in double precision; losses, and this cluster's gradients, whole, by step."""
    from moe_fragment.models.fragment import fragment
    from moe_fragment.sync import CanonicalVector, GradientSync, RailVector, Run
    from moe_fragment.sync.canonical import interval
    from moe_fragment.train.loss import micro_batch_losses

    fabric, place = rank.fabric, rank.place
    model = fragment(scenario.model_of(torch.float64), _placement(rank, scenario), fabric)
    trunk = {
        name: parameter
        for name, parameter in sorted(model.named_parameters())
        if model.fragmented.expert_ids(name) is None
    }
    vector = CanonicalVector({name: parameter.numel() for name, parameter in trunk.items()})
    low, high = interval(vector.size, place.rank, place.size)
    runs = [Run(low, high - low, 0, 0)]
    reducer = GradientSync(RailVector(fabric, vector, runs, dtype=torch.float64))
    optimizer = torch.optim.AdamW(
        _groups(model), lr=scenario.learning_rate, betas=ADAM["betas"], eps=ADAM["eps"]
    )
    losses, gradients = [], []
    for step in range(scenario.steps):
        fabric.begin_step(rank.next_step())
        total, tokens = torch.zeros((), dtype=torch.float64), 0
        for batch in scenario.batches(step, place):
            found = micro_batch_losses(model, batch)
            found.total.backward()
            total += found.cross_entropy
            tokens += found.tokens
        for _, parameter in sorted(model.named_parameters()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            fabric.cluster_sum(parameter.grad)
        flat = torch.cat([trunk[name].grad.reshape(-1) for name in vector.sizes])
        own = flat[low:high].clone()
        reducer.reduce([own])
        flat.zero_()
        flat[low:high] = own
        fabric.cluster_sum(flat)
        for name, parameter in trunk.items():
            parameter.grad = flat[vector.starts[name] :][: parameter.numel()].view(parameter.shape).clone()
        sums = fabric.fleet_sum(torch.tensor([float(total), float(tokens)], dtype=torch.float64))
        for parameter in model.parameters():
            parameter.grad /= sums[1]
        losses.append(float(sums[0] / sums[1]))
        gradients.append(_by_expert(model))
        optimizer.step()
        optimizer.zero_grad()
        _finish(rank)
    return losses, gradients


def reference_in_fp64(scenario: Scenario) -> tuple[list[float], list[Pieces]]:
    """The same in one process; gradients by parameter name."""
    from tests.fleet.training import gradients_of

    model = scenario.model_of(torch.float64)
    model.set_experts_implementation("batched_mm")
    optimizer = torch.optim.AdamW(
        _groups(model), lr=scenario.learning_rate, betas=ADAM["betas"], eps=ADAM["eps"]
    )
    losses, gradients = [], []
    for step in range(scenario.steps):
        losses.append(gradients_of(model, scenario, step)[0])
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def worst_zero_gradient(rank: Rank, scenario: Scenario) -> tuple[float, int]:
    """Case: largest relative difference between our flat gradients and DeepSpeed's, and how many were compared."""
    from deepspeed.utils import safe_get_full_grad

    stepper = start(rank, scenario)
    parameters = dict(stepper.engine.module.named_parameters())
    flats_of = stepper.shards.gradients
    worst: list[float] = []

    def compare() -> list[torch.Tensor]:
        flats = flats_of()
        ours = canonical(rank, stepper, flats)
        for name, parameter in parameters.items():
            theirs = safe_get_full_grad(parameter).float().reshape(-1)
            experts = stepper.engine.module.fragmented.expert_ids(name)
            mine = ours[name] if experts is None else torch.cat([ours[f"{name}#{e}"] for e in experts])
            assert mine.shape == theirs.shape
            worst.append(float((mine - theirs).norm() / theirs.norm().clamp_min(1e-12)))
        return flats

    stepper.shards.gradients = compare  # type: ignore[method-assign]
    for step in range(2):
        stepper.step(rank.next_step(), scenario.batches(step, rank.place), learning_rate=1e-3)
    stepper.engine.destroy()
    return max(worst), len(worst)


def _placement(rank: Rank, scenario: Scenario) -> Any:
    from moe_fragment.placement import Placement
    from tests.fleet.models import LAYERS

    layout = LAYOUTS[scenario.layout]
    return Placement(clusters=rank.topology.names, num_experts=8, layers=dict.fromkeys(range(LAYERS), layout))


def _groups(model: Any) -> list[dict[str, Any]]:
    parameters = sorted(model.named_parameters())
    return [
        {"params": [p for _, p in parameters if p.ndim > 1], "weight_decay": ADAM["weight_decay"]},
        {"params": [p for _, p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]


def _by_expert(model: Any) -> Pieces:
    pieces: Pieces = {}
    for name, parameter in model.named_parameters():
        experts = model.fragmented.expert_ids(name)
        if experts is None:
            pieces[name] = parameter.grad.clone()
            continue
        pieces.update({f"{name}#{e}": row.clone() for e, row in zip(experts, parameter.grad, strict=True)})
    return pieces


def _finish(rank: Rank) -> None:
    """Close the step as the product does."""
    from moe_fragment.fabric import OK

    assert rank.fabric.verdict(OK, []).outcome == OK, rank.fabric.failure
    assert rank.fabric.commit(True)


def whole(pieces: Pieces, like: Pieces) -> Pieces:
    """Canonical pieces under the names of `like`."""
    return {name: join(name, pieces).view(tensor.shape) for name, tensor in like.items()}

"""Clusters that train apart, in one process: a model per cluster, plain torch, `torch.optim.SGD` as the outer step."""

from __future__ import annotations

from typing import Any

import torch

from tests.fleet.training import ADAM, LAYOUTS, History, Pieces, Scenario


def train_apart(scenario: Scenario) -> tuple[History, list[Pieces]]:
    """The run of a parameter strategy without fragments and overlap; also each cluster's weights at the end.

    With `exchange: tokens` the clusters' models share their experts; with `local` each has its own, all of them, and
    they are merged like the trunk.
    """
    from moe_fragment.train.loss import micro_batch_losses

    sync = scenario.sync
    models = [scenario.model_of() for _ in scenario.sizes]
    if scenario.exchange == "tokens":
        for model in models[1:]:
            for mine, first in zip(_expert_modules(model), _expert_modules(models[0]), strict=True):
                for name, parameter in first.named_parameters():
                    setattr(mine, name, parameter)
    named = [dict(sorted(model.named_parameters())) for model in models]
    everything = {id(parameter): parameter for names in named for parameter in names.values()}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in everything.values() if p.ndim > 1], "weight_decay": ADAM["weight_decay"]},
            {"params": [p for p in everything.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=scenario.learning_rate,
        betas=ADAM["betas"],
        eps=ADAM["eps"],
    )
    merged = [name for name in named[0] if scenario.exchange == "local" or not _is_expert(name)]
    outer = {name: torch.nn.Parameter(named[0][name].detach().clone()) for name in merged}
    rule = sync.get("outer", {"learning_rate": 1.0, "momentum": 0.0})
    sgd = torch.optim.SGD(
        outer.values(),
        lr=rule["learning_rate"],
        momentum=rule["momentum"],
        nesterov=rule["momentum"] > 0,
    )
    history, trained = History(), [0] * len(models)
    for step in range(scenario.steps):
        losses, tokens = [0.0] * len(models), [0] * len(models)
        for place in scenario.places():
            for batch in scenario.batches(step, place):
                if batch.filler:
                    continue
                found = micro_batch_losses(models[place.cluster], batch)
                found.total.backward()
                losses[place.cluster] += float(found.cross_entropy.double())
                tokens[place.cluster] += found.tokens
        for cluster, names in enumerate(named):
            _scale_and_clip(scenario, cluster, names, tokens)
            trained[cluster] += tokens[cluster]
        optimizer.step()
        optimizer.zero_grad()
        history.losses.append(
            sum(losses) / sum(tokens) if scenario.exchange == "tokens" else losses[0] / tokens[0]
        )
        if (step + 1) % sync["every"] == 0 or step + 1 == scenario.steps:
            _merge(named, outer, sgd if (step + 1) % sync["every"] == 0 else None, trained)
            trained = [0] * len(models)
    return history, [{name: p.detach().reshape(-1) for name, p in names.items()} for names in named]


def _expert_modules(model: Any) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith("mlp.experts")]


def _is_expert(name: str) -> bool:
    return ".mlp.experts." in name


def _scale_and_clip(
    scenario: Scenario, cluster: int, names: dict[str, torch.nn.Parameter], tokens: list[int]
) -> None:
    """Mean gradients, clipped by the norm of what the cluster holds."""
    together = scenario.exchange == "tokens"
    held = LAYOUTS[scenario.layout][cluster]
    parts = []
    for name, parameter in names.items():
        if _is_expert(name):
            assert parameter.grad is not None
            parts += [
                (parameter.grad[expert], sum(tokens) if together else tokens[cluster]) for expert in held
            ]
        else:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parts.append((parameter.grad, tokens[cluster]))
    for gradient, count in parts:
        gradient /= count
    norm = torch.stack([gradient.double().square().sum() for gradient, _ in parts]).sum().sqrt()
    for gradient, _ in parts:
        gradient *= min(1.0, scenario.clip_norm / (float(norm) + 1e-6))


@torch.no_grad()
def _merge(
    named: list[dict[str, torch.nn.Parameter]],
    outer: dict[str, torch.nn.Parameter],
    sgd: torch.optim.SGD | None,
    trained: list[int],
) -> None:
    """An outer step; of a round that the end of the run cuts short, an average."""
    for name, weights in outer.items():
        weights.grad = torch.zeros_like(weights)
        for names, tokens in zip(named, trained, strict=True):
            weights.grad += (weights - names[name]) * (tokens / sum(trained))
        if sgd is None:
            weights -= weights.grad
    if sgd is not None:
        sgd.step()
    for name, weights in outer.items():
        for names in named:
            names[name].copy_(weights)

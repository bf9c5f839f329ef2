"""What each piece of a model costs on this cluster, measured, and the cut into stages that follows from it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch.autograd.graph import saved_tensors_hooks

from moe_fragment.models.fragment import expert_layers
from moe_fragment.placement import Placement
from moe_fragment.train.deepspeed_config import is_bf16
from moe_fragment.train.loss import Batch, token_losses
from moe_fragment.train.stages import Stage, alone, parameters_of, pieces, run

_REPEATS = 3
_SLACK = 0.03
"""How much slower than the fastest cut one may be that needs less memory."""


@dataclass(frozen=True)
class Cost:
    """Of one piece on one cluster."""

    seconds: float
    """Forward and backward of a micro-batch."""
    state_bytes: float
    """Weights, gradients, master weights and moments of a rank."""
    activation_bytes: float
    """What a micro-batch keeps from its forward for its backward."""


def measure_costs(
    model: Any,
    config: Mapping[str, Any],
    placement: Placement,
    cluster: int,
    *,
    width: int,
    sample: tuple[int, int],
) -> list[Cost]:
    """Run every piece of a model by itself, with all its experts: a token costs the same wherever its experts are.

    Args:
        model: whole, on the CPU; it stays as it is.
        config: DeepSpeed configuration.
        placement: of the experts, of which the cluster keeps its own.
        cluster: index of this one.
        width: ranks of a stage.
        sample: sequences and tokens per sequence of a micro-batch.
    """
    device = torch.device(get_accelerator().current_device_name())
    dtype = torch.bfloat16 if is_bf16(config) else torch.float32
    found = []
    for index, parameters in enumerate(_parameters(model, placement, cluster)):
        piece, stage = alone(model, index)
        seconds, activation_bytes = _run(piece.to(device, dtype).train(), stage, sample)
        # Working weights, fp32 gradients, and a share of master weights and two moments.
        state_bytes = parameters * (dtype.itemsize + 4 + 12 / width)
        found.append(Cost(seconds, state_bytes, activation_bytes))
    return found


def _parameters(model: Any, placement: Placement, cluster: int) -> list[float]:
    """Of each piece, how many this cluster holds."""
    elsewhere: dict[str, float] = {}
    for layer in expert_layers(model):
        part = 1 - len(placement.experts_of(layer.index, cluster)) / placement.num_experts
        stacked = sum(parameter.numel() for _, parameter in layer.stacked())
        elsewhere[f"layers.{layer.index}"] = part * stacked
    return [
        sum(parameter.numel() for parameter in parameters_of(piece.module)) - elsewhere.get(piece.name, 0.0)
        for piece in pieces(model)
    ]


def _run(model: Any, stage: Stage, sample: tuple[int, int]) -> tuple[float, float]:
    """Median seconds of forward and backward, and bytes kept between them."""
    device, vocabulary = next(model.base_model.buffers()).device, model.config.vocab_size
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    tokens = torch.randint(0, vocabulary, (sample[0], sample[1] + 1))
    batch = Batch.of(tokens, 0).to(device)
    times, kept = [], 0.0
    for _ in range(_REPEATS + 1):
        inputs = batch.input_ids
        if not stage.is_first:
            inputs = torch.randn(*sample, model.config.hidden_size, device=device, dtype=dtype)
            inputs.requires_grad_()
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        get_accelerator().synchronize()
        started = time.monotonic()
        with saved_tensors_hooks(keep, lambda tensor: tensor):
            outputs, _ = run(model, stage, inputs)
            loss = token_losses(outputs, batch) if stage.is_last else outputs
        loss.backward(torch.ones_like(loss))
        get_accelerator().synchronize()
        times.append(time.monotonic() - started)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        kept = float(sum(size for at, size in storages.items() if at not in weights))
        model.zero_grad()
    return statistics.median(times[1:]), kept


def balance(costs_CN: Sequence[Sequence[Cost]], stages: int, micro_batches: int) -> list[int]:
    """Bounds of the stages such that the slowest one, on whatever cluster, is as fast as can be; and of the cuts that
    are nearly as fast, the one whose fullest rank needs least.

    Stages of different clusters wait for each other in every layer, so one cut must suit all. A stage keeps the
    activations of as many micro-batches as there are stages from it to the last (1F1B).

    Args:
        costs_CN: of each piece on each cluster.
        stages: at most as many as there are pieces.
        micro_batches: of a step.
    """
    count = len(costs_CN[0])

    def seconds(_: int, low: int, high: int) -> float:
        return max(sum(cost.seconds for cost in costs_N[low:high]) for costs_N in costs_CN)

    def size(stage: int, low: int, high: int) -> float:
        flying = min(stages - stage, micro_batches)
        return max(
            sum(cost.state_bytes + flying * cost.activation_bytes for cost in costs_N[low:high])
            for costs_N in costs_CN
        )

    fastest = _least_of_the_largest(count, stages, seconds)
    bound = (1 + _SLACK) * max(seconds(s, fastest[s], fastest[s + 1]) for s in range(stages))
    return _least_of_the_largest(
        count,
        stages,
        lambda stage, low, high: (
            size(stage, low, high) if seconds(stage, low, high) <= bound else float("inf")
        ),
    )


def _least_of_the_largest(count: int, stages: int, cost: Any) -> list[int]:
    """Bounds of `count` pieces in `stages`, none of them empty, whose largest `cost(stage, low, high)` is least."""
    best: list[dict[int, tuple[float, list[int]]]] = [{0: (0.0, [0])}]
    for stage in range(stages):
        ends: dict[int, tuple[float, list[int]]] = {}
        for high in range(stage + 1, count - (stages - stage - 1) + 1):
            ends[high] = min(
                (max(largest, cost(stage, low, high)), [*bounds, high])
                for low, (largest, bounds) in best[-1].items()
                if low < high
            )
        best.append(ends)
    return best[-1][count][1]

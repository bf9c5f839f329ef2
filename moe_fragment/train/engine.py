"""Builds what a rank trains with: the model fragmented, cut into stages if the cluster runs a pipeline, and wrapped."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe_fragment.experts import ExpertParallel
from moe_fragment.fabric import Fabric
from moe_fragment.models.fragment import Fragmented, fragment
from moe_fragment.placement import Placement
from moe_fragment.train.cluster_engine import ClusterEngine
from moe_fragment.train.deepspeed_config import MEASURED, is_bf16, partition_method, pipeline_stages
from moe_fragment.train.local_experts import LocalExperts
from moe_fragment.train.partition import partition, partition_by_measurement
from moe_fragment.train.pipeline import PipelineClusterEngine, StagePart


def parameter_groups(model: nn.Module, fragmented: Fragmented, weight_decay: float) -> list[dict[str, Any]]:
    """Trunk matrices, trunk vectors (not decayed), and experts, each in name order."""
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "experts": []}
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            continue
        if fragmented.expert_ids(name) is not None:
            groups["experts"].append(parameter)
        else:
            groups["matrices" if parameter.ndim > 1 else "vectors"].append(parameter)
    return [
        {"params": parameters, "weight_decay": 0.0 if kind == "vectors" else weight_decay}
        for kind, parameters in groups.items()
        if parameters
    ]


def build_engine(
    model: Any,
    placement: Placement,
    fabric: Fabric,
    config: Mapping[str, Any],
    *,
    shares: Sequence[float] | None = None,
    sample: tuple[int, int] = (1, 128),
    accumulation: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> ClusterEngine:
    """Fragment a model and wrap it for the cluster's ranks (the default group), AdamW inside; collective over them.

    Args:
        model: a whole transformers model, the same on all ranks of the fleet; it is changed in place.
        placement: of its experts.
        fabric: of this rank.
        config: DeepSpeed configuration, checked by `check_deepspeed_config`.
        shares: each rank's part of the cluster's experts (of a pipeline: of its stage's), relative to the others; None
            where every rank has them all.
        sample: sequences and tokens per sequence of a micro-batch, where the cut into stages is to be measured.
        accumulation: micro-batches per step.
        learning_rate, betas, eps, weight_decay: of AdamW; the rate is set anew before each step.

    Returns:
        an engine without clipping of its own.

    Raises:
        ConfigError: the model cannot be cut into the stages that the configuration wants.
        ValueError: see `fragment`.
    """
    import deepspeed

    stages = pipeline_stages(config)
    groups = _stage_groups(fabric.local_ranks, stages) if shares is not None else []
    width = fabric.local_ranks // stages
    stage, place = divmod(fabric.local_rank, width)
    parallel = ExpertParallel(place, shares, groups[stage]) if shares is not None else None
    part = None
    if stages > 1:
        if partition_method(config) == MEASURED:
            bounds = partition_by_measurement(
                model, config, placement, fabric, sample=sample, micro_batches=accumulation
            )
        else:
            bounds = partition(model, config)
        part = StagePart(model, bounds, stage)
    fragment(model, placement, fabric, parallel, part=part is not None)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, model.fragmented, weight_decay), lr=learning_rate, betas=betas, eps=eps
    )
    own: dict[str, Any] = {}
    if stages > 1 and not is_bf16(config):
        # DeepSpeed's own norm takes a collective over all stages for each parameter group, of which a stage may have
        # none (DeepSpeed#1522): it would wait for ever.
        own["zero_optimization"] = {**config["zero_optimization"], "compute_grad_norm": False}
    full = {
        "steps_per_print": 10**9,
        **config,
        **own,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
    }
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    trained = part.pipelined() if part is not None else model
    engine, *_ = deepspeed.initialize(model=trained, optimizer=optimizer, config=full)
    local_experts = None
    if parallel is not None:
        local_experts = LocalExperts(
            model.fragmented,
            torch.device(engine.device),
            torch.bfloat16 if is_bf16(config) else torch.float32,
            learning_rate=learning_rate,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
    if part is None:
        return ClusterEngine(engine, model, local_experts)
    return PipelineClusterEngine(engine, model, local_experts, part.outline)


def _stage_groups(ranks: int, stages: int) -> list[dist.ProcessGroup]:
    """A group of each stage's ranks."""
    width = ranks // stages
    return [dist.new_group(list(range(stage * width, (stage + 1) * width))) for stage in range(stages)]

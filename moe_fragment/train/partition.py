"""Which stage of a pipeline runs which pieces of a model: DeepSpeed's own methods, and by measurement."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from moe_fragment.fabric import Fabric
from moe_fragment.placement import Placement
from moe_fragment.schema import ConfigError
from moe_fragment.train.deepspeed_config import BY_TYPE, MEASURED, partition_method, pipeline_stages
from moe_fragment.train.stages import Piece, parameters_of, pieces


def partition(model: Any, config: Mapping[str, Any]) -> list[int]:
    """Bounds of the stages: stage s runs the pieces [bounds[s], bounds[s + 1]).

    DeepSpeed's methods weigh a whole model's pieces, all experts included, so that all clusters come to the same. For
    `measured` see `partition_by_measurement`; here it is `uniform`.

    Args:
        model: whole, not fragmented.
        config: DeepSpeed configuration.

    Raises:
        ConfigError: the model cannot be cut like that.
    """
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    row, stages, method = pieces(model), pipeline_stages(config), partition_method(config)
    if isinstance(method, list):
        bounds = [sum(method[:stage]) for stage in range(stages + 1)]
    elif method in ("uniform", MEASURED):
        bounds = partition_uniform(len(row), stages)
    elif method == "parameters":
        bounds = partition_balanced(_sizes(row), stages)
    else:
        bounds = partition_balanced(_of_type(row, method.removeprefix(BY_TYPE)), stages)
    return checked(bounds, row)


def partition_by_measurement(
    model: Any,
    config: Mapping[str, Any],
    placement: Placement,
    fabric: Fabric,
    *,
    sample: tuple[int, int],
    micro_batches: int,
) -> list[int]:
    """Bounds that suit what the pieces cost on all clusters; collective over the fleet.

    The first rank of each cluster measures; see `layer_costs`.

    Args:
        model: whole, not fragmented.
        config: DeepSpeed configuration.
        placement: of the experts.
        fabric: of this rank.
        sample: sequences and tokens per sequence of a micro-batch.
        micro_batches: of a step.

    Raises:
        ConfigError: the model has fewer pieces than there are stages.
        FleetError: a cluster did not say what it measured.
    """
    from moe_fragment.train.layer_costs import Cost, balance, measure_costs

    stages = pipeline_stages(config)
    row = pieces(model)
    checked(partition(model, config), row)
    own: list[dict[str, float]] = []
    if fabric.local_rank == 0:
        width = fabric.local_ranks // stages
        costs = measure_costs(model, config, placement, fabric.cluster, width=width, sample=sample)
        own = [asdict(cost) for cost in costs]
    heard = fabric.gather("layer costs", own)
    return balance([[Cost(**cost) for cost in costs] for costs in heard], stages, micro_batches)


def checked(bounds: Sequence[int], row: Sequence[Piece]) -> list[int]:
    """Bounds that give every stage something.

    Raises:
        ConfigError: they do not.
    """
    if bounds[-1] != len(row):
        raise ConfigError(
            f"deepspeed: pipeline.partition: expected {len(row)} layers in all (embedding, {len(row) - 3} decoder "
            f"layers, norm, head), got {bounds[-1]}"
        )
    empty = [stage for stage in range(len(bounds) - 1) if bounds[stage] >= bounds[stage + 1]]
    if empty:
        raise ConfigError(
            f"deepspeed: pipeline.stages: stage {empty[0]} would have none of the model's {len(row)} layers "
            f"(embedding, decoder layers, norm, head)"
        )
    return [int(bound) for bound in bounds]


def _sizes(row: Sequence[Piece]) -> list[int]:
    return [sum(parameter.numel() for parameter in parameters_of(piece.module)) for piece in row]


def _of_type(row: Sequence[Piece], pattern: str) -> list[int]:
    matches = [int(bool(re.search(pattern, type(piece.module).__name__, re.IGNORECASE))) for piece in row]
    if not any(matches):
        names = ", ".join(dict.fromkeys(type(piece.module).__name__ for piece in row))
        raise ConfigError(f"deepspeed: pipeline.partition: {BY_TYPE}{pattern}: matches none of {names}")
    return matches

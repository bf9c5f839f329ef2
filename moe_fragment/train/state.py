"""The canonical state of a cluster: what its ranks hold, under names that no layout appears in.

Every canonical parameter (a trunk parameter, or one expert of a stacked one) has an fp32 weight and Adam's two moments,
all one-dimensional, and a step count. A rank stores the ranges it owns; whoever loads asks for ranges by name, so any
rank count, ZeRO stage or placement reads what any other wrote.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from moe_fragment.fabric import Fabric
from moe_fragment.sync import CanonicalVector, checksum
from moe_fragment.train.zero import MOMENTS, Shard, ZeroShards, is_expert

WEIGHT = "weight"
KINDS = (WEIGHT, *MOMENTS)

Reader = Callable[[str, str, int, int], torch.Tensor]
"""(kind, canonical name, offset, size) -> fp32 [size]."""


def own_ranges(shards: ZeroShards) -> Iterator[tuple[str, Shard, torch.Tensor]]:
    """(kind, shard, values fp32 [size]) of everything this rank owns; moments only after the first step."""
    masters = shards.masters()
    for shard in shards.shards:
        end = shard.position + shard.size
        yield WEIGHT, shard, masters[shard.flat].detach()[shard.position : end]
        moments = shards.moments(shard.flat)
        for kind in MOMENTS:
            if kind in moments:
                yield kind, shard, moments[kind][shard.position : end]


def step_counts(shards: ZeroShards) -> dict[str, float]:
    """Adam's step count of each canonical parameter this rank owns a part of."""
    return {
        shard.name: float(moments["step"])
        for shard in shards.shards
        if "step" in (moments := shards.moments(shard.flat))
    }


@torch.no_grad()
def restore(shards: ZeroShards, read: Reader, steps: dict[str, float], *, moments: bool = True) -> None:
    """Fill this rank's master weights and moments from a stored state.

    No collective, so that it may raise on one rank alone: when all ranks are done, `shards.publish_masters()` hands
    the weights to the model.

    Args:
        shards: of the new layout.
        read: gives any range of what was stored.
        steps: Adam's step count by canonical name.
        moments: False to take weights only, and start the optimizer anew.
    """
    fresh: dict[int, dict[str, Any]] = {}
    for shard in [*shards.shards, *shards.mirrors]:
        master = shards.masters()[shard.flat]
        end = shard.position + shard.size
        master.data[shard.position : end] = read(WEIGHT, shard.name, shard.offset, shard.size).to(
            master.device
        )
        if not moments or shard.name not in steps:
            continue
        held = fresh.setdefault(
            shard.flat,
            {kind: torch.zeros_like(master) for kind in MOMENTS}
            | {"step": torch.tensor(steps[shard.name], dtype=torch.float32)},
        )
        for kind in MOMENTS:
            held[kind][shard.position : end] = read(kind, shard.name, shard.offset, shard.size).to(
                master.device
            )
    for flat, held in fresh.items():
        shards.set_moments(flat, held)


def trunk_checksum(shards: ZeroShards, fabric: Fabric) -> int:
    """A number that two clusters share only if their trunks are equal to the bit, whatever their layouts.

    Collective over the cluster.
    """
    vector = CanonicalVector(shards.sizes(experts=False))
    masters = shards.masters()
    total = torch.zeros(1, dtype=torch.int64)
    for shard in shards.shards:
        if is_expert(shard.name):
            continue
        values = masters[shard.flat][shard.position : shard.position + shard.size]
        total += checksum(values, vector.starts[shard.name] + shard.offset)
    return int(fabric.cluster_sum(total))

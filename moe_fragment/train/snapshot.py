"""All that one rank puts into a checkpoint, and takes out of it, by the keys `kind|name|offset`.

Its shards of weights and moments (`state.py`), its intervals of the sync's state, its random state, and on the first of
the ranks with the same parameters the model's persistent buffers (router biases).
"""

from __future__ import annotations

import torch
from torch import nn

from moe_fragment.sync.state import FEEDBACK, LOST, Reader
from moe_fragment.train.checkpoint import Checkpoint
from moe_fragment.train.random_state import RANDOM_KINDS, random_state, restore_random_state
from moe_fragment.train.state import own_ranges, restore
from moe_fragment.train.syncing import FleetSync
from moe_fragment.train.zero import ZeroShards


def rank_tensors(
    shards: ZeroShards, sync: FleetSync, model: nn.Module, rank: int, *, first: bool
) -> dict[str, torch.Tensor]:
    """Everything local rank `rank` stores; `first`: of those with the same parameters."""
    tensors = {f"{kind}|{shard.name}|{shard.offset}": values for kind, shard, values in own_ranges(shards)}
    tensors |= {f"{kind}|{name}|{offset}": values for kind, name, offset, values in sync.state()}
    for kind, values in random_state().items():
        tensors[_random_key(kind, rank)] = values
    if first:
        for name, buffer in _saved_buffers(model).items():
            tensors[f"buffer|{name}|0"] = buffer
    return tensors


def restore_rank(checkpoint: Checkpoint, shards: ZeroShards, model: nn.Module, rank: int) -> None:
    """Inverse of `rank_tensors`, whatever layout wrote the checkpoint; the caller then publishes the masters.

    Raises:
        CheckpointError: it is damaged or does not hold what this rank needs.
    """
    restore(shards, checkpoint.read, checkpoint.manifest.steps)
    for name, buffer in _saved_buffers(model).items():
        stored = checkpoint.extra(f"buffer|{name}|0")
        if stored is not None:
            buffer.copy_(stored)
    restore_random_state({kind: checkpoint.extra(_random_key(kind, rank)) for kind in RANDOM_KINDS})


def sync_reader(checkpoint: Checkpoint) -> Reader:
    """Reads the sync's state; where nothing is stored about what codecs owe, they owe nothing.

    That is so when a cluster got its checkpoint from another, and when error feedback was turned on since.
    """
    owed = {FEEDBACK, LOST} - checkpoint.kinds

    def read(kind: str, name: str, offset: int, size: int) -> torch.Tensor:
        return torch.zeros(size) if kind in owed else checkpoint.read(kind, name, offset, size)

    return read


def _random_key(kind: str, rank: int) -> str:
    return f"{kind}|rank-{rank:05d}|0"


def _saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Persistent buffers by name."""
    found = {}
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        if attribute not in model.get_submodule(owner)._non_persistent_buffers_set:
            found[name] = buffer
    return found

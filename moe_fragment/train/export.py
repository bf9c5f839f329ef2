"""From the checkpoints of all clusters to one directory that plain `transformers` opens."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import moe_fragment.models.register  # noqa: F401 (makes the model type known)
from moe_fragment.models.configuration import FragmentMoeConfig
from moe_fragment.models.stock import stock_equivalent
from moe_fragment.sync.state import OUTER, SERVED
from moe_fragment.train.checkpoint import Checkpoint, CheckpointError, checkpoint_path, saved_steps
from moe_fragment.train.state import WEIGHT
from moe_fragment.train.zero import expert_name


@dataclass(frozen=True)
class Exported:
    """What was written where."""

    path: Path
    step: int
    architecture: str
    """Class that opens it."""
    needs_moe_fragment: bool
    """Whether `import moe_fragment` must come first, because no stock class computes this model."""
    why: str
    """The options no stock class has, if it needs moe_fragment."""


def export(run: Path, out: Path, *, step: int | None = None, dtype: torch.dtype = torch.float32) -> Exported:
    """Write the model of a run as a transformers directory, tokenizer included.

    Args:
        run: directory of the run, holding one directory per cluster.
        out: directory to write; must not hold anything yet.
        step: which checkpoint; default the newest that all clusters have.
        dtype: of the weights in the file.

    Raises:
        CheckpointError: a cluster's directory or checkpoint is missing or damaged, trunk copies differ, or `out`
            is not empty.
    """
    checkpoints = open_checkpoints(run, step)
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out}: is not empty; choose another directory")
    first = next(iter(checkpoints.values()))
    state = whole_state(checkpoints)
    config: PreTrainedConfig = AutoConfig.for_model(**first.manifest.model)
    why = ""
    if isinstance(config, FragmentMoeConfig):
        try:
            config, convert = stock_equivalent(config)
            state = convert(state)
        except ValueError as error:
            why = str(error)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(state, strict=False)
    left = sorted(set(missing) - set(model.all_tied_weights_keys))
    if left or unexpected:
        raise CheckpointError(
            f"{first.path}: does not fit {type(model).__name__}: {[*left, *unexpected][:3]}"
        )
    _round(model, dtype)
    model.save_pretrained(out)
    tokenizer = first.path.parent.parent / "tokenizer"
    if tokenizer.is_dir():
        shutil.copytree(tokenizer, out, dirs_exist_ok=True)
    return Exported(out, first.manifest.step, type(model).__name__, bool(why), why)


def _round(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Weights to `dtype`, except those that the class keeps in fp32 when it opens the file: they decide the routing."""
    kept = "|".join(map(re.escape, model._keep_in_fp32_modules_strict or ["(nothing)"]))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and not re.search(rf"(^|\.)({kept})($|\.)", name):
            tensor.data = tensor.data.to(dtype)


def open_checkpoints(run: Path, step: int | None = None) -> dict[str, Checkpoint]:
    """The checkpoints of all clusters of a run after the same step, by cluster.

    Raises:
        CheckpointError: see `export`.
    """
    directories = sorted(path.parent for path in run.glob("*/checkpoints"))
    if not directories:
        raise CheckpointError(f"{run}: no checkpoints of any cluster there")
    steps = {directory.name: saved_steps(directory) for directory in directories}
    steps = {name: saved for name, saved in steps.items() if saved} or steps
    common = set.intersection(*map(set, steps.values()))
    if step is None and not common:
        raise CheckpointError(f"{run}: no step that all clusters saved: {steps}")
    chosen = max(common) if step is None else step
    if chosen not in common:
        raise CheckpointError(
            f"{run}: step {chosen} was not saved by all clusters; they share {sorted(common)}"
        )
    opened = {name: Checkpoint(checkpoint_path(run / name, chosen)) for name in steps}
    for name, checkpoint in opened.items():
        absent = set(checkpoint.manifest.placement.clusters) - set(opened)
        if absent:
            raise CheckpointError(
                f"{run}: cluster {name} shares its experts with {', '.join(sorted(absent))}, whose directory is not "
                f"here; copy the run directories of all clusters together first"
            )
    return opened


def whole_state(checkpoints: Mapping[str, Checkpoint]) -> dict[str, torch.Tensor]:
    """State dict (fp32) of the whole model: the trunk, and every expert from a cluster that holds it.

    Of what clusters that train apart hold several copies of, it is the global one of their last merge (Streaming DiLoCo
    finds it better than any single copy), or the mean of copies that are only ever mixed.

    Raises:
        CheckpointError: copies that must be equal differ between clusters, or an expert is nowhere.
    """
    first_name, first = next(iter(checkpoints.items()))
    if first.manifest.sync["ended"] and any(
        own["tokens"] for sync in first.manifest.sync["rounds"] for own in sync["own"]
    ):
        raise CheckpointError(
            f"{first.path}: the clusters' trunks were too far apart to be merged (sync.guard.refuse) and are no one "
            f"model; raise that bound and train.steps, and go on"
        )
    served = {
        name: checkpoint
        for checkpoint in checkpoints.values()
        for name in checkpoint.manifest.sizes
        if checkpoint.holds(SERVED, name)
    }
    mixed = bool(first.manifest.sync["again"])
    copies: dict[str, list[torch.Tensor]] = {}
    for cluster, checkpoint in checkpoints.items():
        for name, size in checkpoint.manifest.sizes.items():
            if served.get(name, checkpoint) is not checkpoint:
                continue  # the syncer's copy is the one that counts
            kind = next((kind for kind in (SERVED, OUTER) if checkpoint.holds(kind, name)), WEIGHT)
            values = checkpoint.read(kind, name, 0, size).view(checkpoint.manifest.shapes[name])
            held = copies.setdefault(name, [])
            if held and not mixed and not torch.equal(held[0], values):
                raise CheckpointError(f"clusters {first_name} and {cluster} hold different copies of {name}")
            held.append(values)
    state: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, held in copies.items():
        parameter, marker, expert = name.partition("#")
        if marker:
            experts.setdefault(parameter, {})[int(expert)] = held[0]
        elif mixed:
            state[name] = torch.stack(held).mean(0)
        else:
            state[name] = held[0]
    count = first.manifest.placement.num_experts
    for parameter, stack in experts.items():
        if len(stack) != count:
            lost = expert_name(parameter, min(set(range(count)) - set(stack)))
            raise CheckpointError(f"{lost}: is in no cluster's checkpoint")
        state[parameter] = torch.stack([stack[number] for number in range(count)])
    for name in first.names("buffer"):
        buffer = first.extra(f"buffer|{name}|0")
        assert buffer is not None
        state[name] = buffer
    return state


def summary(exported: Exported) -> dict[str, Any]:
    """For `export --json`."""
    return {**exported.__dict__, "path": str(exported.path)}

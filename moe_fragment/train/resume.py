"""Where a run goes on, and whether a checkpoint is one of this run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from moe_fragment.fabric import FleetError
from moe_fragment.placement import Placement
from moe_fragment.train.checkpoint import Checkpoint, CheckpointError


def newest_common(
    run: str, clusters: Sequence[str], saved: Sequence[Sequence[int]]
) -> tuple[int | None, list[int]]:
    """The newest step that all clusters have saved which have saved any; and the indices of those that have not.

    Args:
        run: its name.
        clusters: their names.
        saved: steps of each.

    Returns:
        None and nobody when no cluster has saved any.

    Raises:
        FleetError: there are checkpoints, but no common one.
    """
    if not any(saved):
        return None, []
    common = set.intersection(*(set(steps) for steps in saved if steps))
    if common:
        return max(common), [cluster for cluster, steps in enumerate(saved) if not steps]
    each = ", ".join(f"{name} {list(steps)}" for name, steps in zip(clusters, saved, strict=True))
    raise FleetError(f"run {run} has checkpoints, but none that all clusters have: {each}")


_HARMLESS = re.compile(
    r"_name_or_path|transformers_version|dtype|use_cache|.*dropout|.*_coef|router_bias_update_rate|output_.*"
)
"""Fields of a model's configuration that may change between lives: they leave its outputs as they are."""


def check_fits(
    checkpoint: Checkpoint,
    cluster: str,
    placement: Placement,
    sizes: Mapping[str, int],
    model: Mapping[str, Any],
) -> None:
    """Refuse a checkpoint of another cluster, placement or model.

    Args:
        checkpoint: of this cluster, as its place in the run directory says.
        cluster, placement: of this run.
        sizes: elements of every canonical parameter of the model.
        model: its transformers configuration.

    Raises:
        CheckpointError: the first difference.
    """
    manifest = checkpoint.manifest
    if manifest.cluster != cluster:
        raise CheckpointError(f"{checkpoint.path}: was written by cluster {manifest.cluster}, not {cluster}")
    if manifest.placement != placement:
        raise CheckpointError(f"{checkpoint.path}: was written under another placement than the recipe's")
    for name in sorted({*sizes, *manifest.sizes}):
        there, here = manifest.sizes.get(name), sizes.get(name)
        if there != here:
            raise CheckpointError(
                f"{checkpoint.path}: is of another model than the recipe's: {name} has {there or 'no'} elements there, "
                f"{here or 'none'} here"
            )
    now = json.loads(json.dumps(model, default=str))
    for field in sorted({*now, *manifest.model}):
        there, here = manifest.model.get(field), now.get(field)
        if there != here and not _HARMLESS.fullmatch(field):
            raise CheckpointError(
                f"{checkpoint.path}: is of another model than the recipe's: {field} is {there!r} there, {here!r} here"
            )

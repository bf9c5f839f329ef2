"""Sweep files in a temporary directory, and runs that look as if they had been trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from moe_fragment.observe import RunWriter
from moe_fragment.placement import place_experts
from moe_fragment.sweep import Job, Sweep
from moe_fragment.train.checkpoint import MANIFEST, VERSION, Manifest, checkpoint_path
from tests.train.runs import recipe_for

TRUNK, EXPERT = 1000, 100
"""Values of the trunk, and of the one expert of each cluster."""


def write_sweep(home: Path, **fields: Any) -> Path:
    """A sweep file over a tiny recipe of clusters ada and bob; `fields` are the file's, None leaves one out."""
    recipe = recipe_for(home, sizes=(1, 1))
    (home / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    data = {"name": "sweep", "out": str(home / "out"), "recipe": "recipe.yaml", "runs": [{"name": "plain"}]}
    path = home / "sweep.yaml"
    path.write_text(
        yaml.safe_dump({k: v for k, v in {**data, **fields}.items() if v is not None}, sort_keys=False)
    )
    return path


def pretend(job: Job, *, losses: Sequence[float], trunk_bytes: int, merges: Sequence[float] = ()) -> None:
    """A complete run in the job's directory: evaluated every second step.

    Args:
        job: whose run.
        losses: of its evaluations.
        trunk_bytes: sent per step and cluster.
        merges: distance between trunk copies, in a merge after each of the first steps.
    """
    topology = job.recipe.fleet()
    placement = place_experts(topology, num_experts=2, layers=[0])
    for index, name in enumerate(topology.names):
        directory = job.recipe.run_directory / name
        with RunWriter(
            directory, cluster=name, clusters=topology.names, layers=1, experts=2, emulated=True
        ) as writer:
            for step in range(1, job.recipe.train.steps + 1):
                scalars = {
                    "loss": 3.0,
                    "tokens": 10,
                    "step_s": 1.0 + index,
                    "compute_s": 0.75,
                    "wan_wait_s": 0.25,
                }
                if step <= len(merges):
                    scalars |= {"trunk_distance": merges[step - 1], "trunk_cosine": 0.5, "codec_error": 0.1}
                wan = {topology.names[1 - index]: {"trunk": {"sent": trunk_bytes}, "dispatch": {"sent": 7}}}
                writer.step(step, scalars, wan, np.zeros((1, 2), dtype=int), np.zeros((1, 2), dtype=int))
                if step % 2 == 0:
                    writer.evaluation(step, losses[step // 2 - 1], 10)
            if merges:
                writer.event("sync_refused", "too far apart", step=len(merges))
        (directory / "recipe.yaml").write_text(job.recipe.dump())
        checkpoint = checkpoint_path(directory, job.recipe.train.steps)
        checkpoint.mkdir(parents=True)
        manifest = Manifest(
            step=job.recipe.train.steps,
            cluster=name,
            consumed=0,
            data="",
            placement=placement,
            model={},
            sizes={"trunk": TRUNK, f"experts#{index}": EXPERT},
            steps={},
            shapes={},
            sync={"ended": True},
        )
        (checkpoint / MANIFEST).write_text(
            json.dumps({"version": VERSION, "files": [], **manifest.to_json()})
        )


def load(home: Path, **fields: Any) -> Sweep:
    """The sweep that `write_sweep` writes."""
    return Sweep.load(write_sweep(home, **fields))

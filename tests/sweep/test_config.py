"""What a sweep file may say: how it is expanded, and one sentence for what cannot work, before anything is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_fragment.schema import ConfigError
from moe_fragment.sweep import Sweep
from tests.sweep.sweeps import load, write_sweep
from tests.train.runs import ROOT

SHIPPED = sorted((ROOT / "recipes" / "sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_sweep_loads(path: Path) -> None:
    sweep = Sweep.load(path)
    assert sweep.config.name == path.stem
    assert all(job.recipe.train.eval_every for job in sweep.jobs)


def test_runs_and_grid_and_seeds(tmp_path: Path) -> None:
    sweep = load(
        tmp_path,
        set={"train.steps": 9},
        seeds=[0, 4],
        runs=[{"name": "once", "seeds": [7], "set": {"sync": {"strategy": "diloco", "every": 5}}}],
        grid={"sync.codec": ["int8", {"topk": {"k": 8}}], "train.learning_rate": [1e-5]},
    )
    assert [job.label for job in sweep.jobs] == [
        "once-s7",
        "codec-int8_learning_rate-1.0e-05-s0",
        "codec-int8_learning_rate-1.0e-05-s4",
        "codec-topk-k-8_learning_rate-1.0e-05-s0",
        "codec-topk-k-8_learning_rate-1.0e-05-s4",
    ]
    once, _, int8, topk, _ = (job.recipe for job in sweep.jobs)
    assert (once.train.steps, once.sync.every, once.sync.outer.learning_rate) == (9, 5, 0.7)
    assert (once.model.seed, once.data.seed, once.train.seed) == (7, 7, 7)
    assert (int8.sync.codec, int8.model.seed, int8.train.learning_rate) == ("int8", 4, 1e-5)
    assert topk.sync.codec == {"topk": {"k": 8}}
    assert once.run_directory == tmp_path / "out" / "sweep" / "once-s7"
    assert sweep.varied == ("sync.strategy", "sync.every", "sync.codec", "train.learning_rate")


def test_overrides_are_for_all_runs_but_name_and_out(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, runs=[{"name": "a", "set": {"train.steps": 3}}, {"name": "b"}])
    sweep = Sweep.load(path, ["train.steps=2", "name=other", f"out={tmp_path}/there"])
    assert [job.recipe.train.steps for job in sweep.jobs] == [2, 2]
    assert sweep.directory == tmp_path / "there" / "other"
    assert sweep.jobs[0].recipe.run_directory.parent == sweep.directory


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"rusn": []}, "rusn: unknown field, did you mean 'runs'?"),
    "unknown field of a run": ({"runs": [{"name": "a", "sets": {}}]}, "runs[0].sets: unknown field, did you mean 'set"),
    "no runs": ({"runs": None}, "runs: expected at least one run here or a field in grid"),
    "no values": ({"grid": {"train.steps": []}}, "grid.train.steps: expected at least 1 entry, got 0"),
    "name of a path": ({"runs": [{"name": "../x"}]}, "runs[0].name: expected text like"),
    "name twice": ({"runs": [{"name": "a"}, {"name": "A"}]}, "runs: the name 'A' is used twice"),
    "seed twice": ({"seeds": [1, 1]}, "run plain: seeds: one is given twice in [1, 1]"),
    "seed below 0": ({"seeds": [-1]}, "seeds[0]: expected at least 0, got -1"),
    "seed in set": ({"set": {"model.seed": 3}}, "set: model.seed is set by `seeds`"),
    "seed in grid": ({"grid": {"train.seed": [3]}}, "grid: train.seed is set by `seeds`"),
    "name in set": ({"runs": [{"name": "a", "set": {"out": "x"}}]}, "runs.a.set: out of a run is made from"),
    "no recipe": ({"recipe": "nowhere.yaml"}, "run plain: HERE/nowhere.yaml: no such file"),
    "refused by the recipe": (
        {"runs": [{"name": "fine"}, {"name": "bad", "set": {"sync.every": 5}}]},
        "run bad: HERE/recipe.yaml: sync.every: has no effect with strategy allreduce",
    ),
    "refused by the model": (
        {"runs": [{"name": "bad", "set": {"model.config.hiden_size": 8}}]},
        "run bad: model.config.hiden_size: unknown field",
    ),
    "on other hosts": (
        {"set": {"topology.clusters": [{"name": n, "hosts": [{"host": n, "slots": 1}]} for n in ("ada", "bob")]}},
        "run plain: topology.clusters: a sweep starts clusters of local processes",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_bad_sweep_gets_one_sentence(tmp_path: Path, what: str) -> None:
    fields, sentence = BAD[what]
    path = write_sweep(tmp_path, **fields)
    with pytest.raises(ConfigError) as raised:
        Sweep.load(path)
    said = str(raised.value).replace(str(tmp_path), "HERE")
    assert said.startswith(f"HERE/sweep.yaml: {sentence}"), said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()

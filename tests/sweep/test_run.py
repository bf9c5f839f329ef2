"""Sweeps that start fleets: the shipped smoke sweep as a person types it, and runs that fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from moe_fragment import cli
from moe_fragment.schema import ConfigError
from moe_fragment.sweep import Sweep, build_table, run, run_sweep
from moe_fragment.train.launch import LaunchError
from tests.sweep.sweeps import load, pretend, write_sweep
from tests.train.runs import ROOT

COMMAND = [sys.executable, "-c", "from moe_fragment.cli import main; main()", "sweep"]


@pytest.mark.timeout(300)
def test_smoke_sweep_runs_once(tmp_path: Path) -> None:
    words = [
        *COMMAND,
        str(ROOT / "recipes" / "sweeps" / "smoke.yaml"),
        f"out={tmp_path}",
        "--quiet",
        "--json",
    ]
    first = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert first.returncode == 0, first.stderr[-3000:]
    rows = json.loads(first.stdout)["rows"]
    assert [(row["run"], row["status"], row["steps"]) for row in rows] == [
        ("allreduce", "complete", 6),
        ("diloco-int8", "complete", 6),
    ]
    assert rows[0]["compression"] == 1.0, "exact all-reduce is the plain one, to the byte"
    assert rows[1]["compression"] > 10, "a quarter of the bytes, every third step"
    assert rows[1]["dispatch_bytes"] == 0 < rows[0]["dispatch_bytes"]
    assert rows[1]["merges"] == 2
    table = tmp_path / "smoke" / "table.csv"
    assert len(pd.read_csv(table)) == 2
    logs = sorted(tmp_path.glob("smoke/*/*/launcher.log"))
    assert len(logs) == 4
    sizes = [log.stat().st_size for log in logs]
    table.unlink()
    again = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert again.returncode == 0, again.stderr[-3000:]
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert [log.stat().st_size for log in logs] == sizes, "nothing was started"
    assert table.exists()


RUNS = [{"name": name} for name in ("done", "bad", "good")]


def test_a_failed_run_is_recorded_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_sweep(tmp_path, runs=RUNS)
    sweep = Sweep.load(path)
    jobs = {job.label: job for job in sweep.jobs}
    finish = {"losses": [4.0, 3.0, 2.0], "trunk_bytes": 100}
    pretend(jobs["done-s0"], **finish)  # type: ignore[arg-type]
    started = []

    def launch(recipe: Path, overrides: tuple[str, ...], *, quiet: bool) -> None:
        (job,) = [job for job in sweep.jobs if job.overrides == overrides]
        started.append(job.label)
        if job.name == "bad" and len(started) < 3:
            raise LaunchError("cluster bob ended")
        pretend(job, **finish)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "launch", launch)
    monkeypatch.setattr(sys, "argv", ["moe-fragment", "sweep", str(path), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert started == ["bad-s0", "good-s0"]
    assert "run bad-s0 failed: cluster bob ended" in err
    assert err.endswith("moe-fragment: 1 of 3 runs failed: bad-s0; the table has the reasons\n")
    rows = json.loads(out)["rows"]
    assert [row["status"] for row in rows] == ["complete", "failed", "complete"]
    assert rows[1]["error"] == "cluster bob ended"
    assert run_sweep(sweep, quiet=True) == []
    assert started[2:] == ["bad-s0"], "only what is not complete"
    assert list(build_table(sweep).rows["status"]) == ["complete"] * 3


def test_an_interrupt_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(recipe: Path, overrides: tuple[str, ...], *, quiet: bool) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "launch", launch)
    sweep = load(tmp_path, runs=RUNS)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, quiet=True)
    assert list(build_table(sweep).rows["status"]) == ["not run"] * 3


def test_a_run_of_another_recipe_is_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = load(tmp_path)
    pretend(sweep.jobs[0], losses=[4.0, 3.0, 2.0], trunk_bytes=100)
    monkeypatch.setattr(run, "launch", None)
    other = load(tmp_path, set={"train.learning_rate": 0.5})
    with pytest.raises(ConfigError, match="run plain: .*plain-s0 holds a run with other settings; remove it"):
        run_sweep(other, quiet=True)

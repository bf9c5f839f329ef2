"""The table of a sweep from run logs whose numbers are known."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from moe_fragment.sweep import Sweep, build_table, print_table
from moe_fragment.sweep.run import FAILED
from moe_fragment.sweep.show import as_json
from moe_fragment.sweep.table import CURVES_FILE, MERGES_FILE, TABLE_FILE
from tests.sweep.sweeps import TRUNK, load, pretend

RUNS = [
    {"name": "plain"},
    {"name": "rare", "set": {"sync": {"strategy": "teleport", "every": 2}}},
    {"name": "broken"},
    {"name": "later"},
]


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Two complete runs of 6 steps, one that failed, one that was not run."""
    sweep = load(tmp_path, runs=RUNS, target_loss=2.5)
    plain, rare, broken, _ = sweep.jobs
    pretend(plain, losses=[4.0, 3.0, 2.0], trunk_bytes=2 * TRUNK * 4)
    pretend(rare, losses=[5.0, 4.0, 3.0], trunk_bytes=100, merges=[0.2, 0.4])
    broken.recipe.run_directory.mkdir(parents=True)
    (broken.recipe.run_directory / FAILED).write_text("cluster bob ended\nwith code 1\n")
    return sweep


def test_table(sweep: Sweep) -> None:
    rows = build_table(sweep).rows.set_index("run")
    assert list(rows["status"]) == ["complete", "complete", "failed", "not run"]
    assert rows.loc["broken", "error"] == "cluster bob ended\nwith code 1"
    plain, rare = rows.loc["plain"], rows.loc["rare"]
    assert (plain["sync.strategy"], rare["sync.strategy"], rare["sync.every"]) == ("allreduce", "teleport", 2)
    assert (plain["eval_loss"], rare["eval_loss"]) == (2.0, 3.0)
    assert (plain["steps"], plain["emulated"]) == (6, True)
    assert plain["seconds"] == 6 * 2.0, "the slowest cluster sets the pace"
    assert (plain["compute_s"], plain["wan_wait_s"]) == (6 * 0.75, 6 * 0.25)
    assert plain["trunk_bytes_per_step"] == 2 * 2 * TRUNK * 4
    assert plain["dispatch_bytes"] == 6 * 2 * 7
    assert plain["wan_bytes"] == plain["trunk_bytes"] + plain["dispatch_bytes"]
    # A ring over two clusters sends the trunk once per cluster; experts that one cluster holds are not in it.
    assert plain["compression"] == pytest.approx(0.5)
    assert rare["compression"] == pytest.approx(TRUNK * 4 / 100)
    assert math.isnan(plain["merges"]), "gradients are summed, copies never differ"
    assert (rare["merges"], rare["refused"], rare["failed_merges"]) == (1, 1, 0)
    assert rare["trunk_distance"] == pytest.approx(0.3)
    assert (rare["trunk_cosine"], rare["codec_error"], rare["trunk_distance_last"]) == (0.5, 0.1, 0.4)


def test_losses_at_equal_marks(sweep: Sweep) -> None:
    """Between evaluations in a straight line, blank before the first, the last one after the end."""
    rows = build_table(sweep).rows.set_index("run")
    plain, rare = rows.loc["plain"], rows.loc["rare"]
    assert [plain[f"loss_at_{step}_steps"] for step in (2, 3, 4, 6)] == pytest.approx([4.0, 3.5, 3.0, 2.0])
    assert [plain[f"loss_at_{second}_s"] for second in (6, 9, 12)] == pytest.approx([3.5, 2.75, 2.0])
    assert math.isnan(plain["loss_at_3_s"])
    # 16,014 bytes a step against 214: at 1 kB the one has no loss yet and the other had one after 856.
    assert rare["loss_at_0.001_MB"] == pytest.approx(3.0 + (1284 - 1000) / 428)
    assert math.isnan(plain["loss_at_0.001_MB"])
    assert rare["loss_at_0.01_MB"] == 3.0, "it ended before, having sent less"
    assert (plain["steps_to_target"], plain["seconds_to_target"]) == (5, 10)
    assert math.isnan(rare["steps_to_target"])


def test_files_and_json(sweep: Sweep, tmp_path: Path) -> None:
    table = build_table(sweep)
    table.write(tmp_path)
    curves = pd.read_csv(tmp_path / CURVES_FILE)
    assert list(curves.columns) == ["run", "seed", "step", "wan_bytes", "seconds", "eval_loss"]
    assert len(curves) == 2 * 3
    assert list(pd.read_csv(tmp_path / TABLE_FILE)["run"]) == ["plain", "rare", "broken", "later"]
    merges = pd.read_csv(tmp_path / MERGES_FILE)
    assert list(merges["run"]) == ["rare", "rare"]
    assert list(merges["refused"]) == [False, True]
    assert list(merges["trunk_distance"]) == [0.2, 0.4]
    found = as_json(sweep, table)
    assert found["rows"][0]["eval_loss"] == 2.0
    assert found["rows"][3]["eval_loss"] is None


def test_emulated_links_are_named(sweep: Sweep) -> None:
    console = Console(file=io.StringIO(), width=96)
    print_table(sweep, build_table(sweep), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Sweep sweep (emulated links)" in text
    assert "failed" in text
    assert "…" not in text, "nothing is cut off"


def test_nothing_was_run_yet(tmp_path: Path) -> None:
    table = build_table(load(tmp_path))
    assert list(table.rows["status"]) == ["not run"]
    assert list(table.curves.columns) == ["run", "seed", "step", "wan_bytes", "seconds", "eval_loss"]

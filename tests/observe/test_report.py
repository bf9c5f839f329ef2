"""The summary of a run and how it is shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from moe_fragment.observe import STEP_DISCARDED, STEP_SKIPPED, RunWriter, print_report, report

CLUSTERS = ("berlin", "oslo")


def write_run(run: Path, *, emulated: bool, clusters: tuple[str, ...] = CLUSTERS) -> None:
    """Two steps; oslo is slower, sees more tokens and loses more."""
    for cluster in clusters:
        c = CLUSTERS.index(cluster)
        with RunWriter(
            run / cluster, cluster=cluster, clusters=CLUSTERS, layers=1, experts=2, emulated=emulated
        ) as writer:
            for step in (1, 2):
                scalars = {
                    "loss": 4.0 + c - step,
                    "tokens": 100 + 200 * c,
                    "step_s": 1.0 + c,
                    "compute_s": 0.5,
                }
                scalars |= {"remote_rows": 10, "remote_pairs": 20, "local_pairs": 60, "wan_wait_s": 0.25}
                wan = {CLUSTERS[1 - c]: {"dispatch": {"sent": 1000, "received": 1000}, "trunk": {"sent": 1}}}
                writer.step(step, scalars, wan, np.zeros((1, 2), dtype=int), np.zeros((1, 2), dtype=int))
            writer.evaluation(1, 9.0, 10)
            writer.evaluation(2, 2.0 + c, 10)
            writer.event(STEP_DISCARDED, "step 2 was discarded: oslo did not answer", step=2)
            if c == 0:
                writer.event(STEP_SKIPPED, "step 1 overflowed", step=1)


def test_stages_of_a_pipeline(tmp_path: Path) -> None:
    """A cluster that runs none has none."""
    for cluster in CLUSTERS:
        with RunWriter(
            tmp_path / cluster, cluster=cluster, clusters=CLUSTERS, layers=1, experts=2, emulated=False
        ) as writer:
            scalars = {"loss": 4.0, "tokens": 100, "step_s": 1.0}
            if cluster == "oslo":
                scalars |= {"bubble_expected": 0.2, "stage_0_idle_s": 0.5, "stage_1_idle_s": 0.25}
                scalars |= {"stage_0_wan_wait_s": 0.125, "stage_1_wan_wait_s": 0.0}
            for step in (1, 2):
                own = {"bubble": 0.2 + 0.1 * step} if cluster == "oslo" else {}
                zeros = np.zeros((1, 2), dtype=int)
                writer.step(step, {**scalars, **own}, {}, zeros, zeros)
    found = report(tmp_path)["per_cluster"]
    assert "stages" not in found["berlin"]
    assert found["oslo"]["bubble"] == pytest.approx(0.35)
    assert found["oslo"]["bubble_expected"] == pytest.approx(0.2)
    assert found["oslo"]["stages"] == [
        {"idle_s": 1.0, "wan_wait_s": 0.25},
        {"idle_s": 0.5, "wan_wait_s": 0.0},
    ]
    console = Console(file=io.StringIO(), width=100)
    print_report(report(tmp_path), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "What the stages of the pipelines waited" in text
    assert "35.0%" in text


def test_summary(tmp_path: Path) -> None:
    write_run(tmp_path, emulated=True)
    summary = report(tmp_path)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["run"] == tmp_path.name
    assert summary["clusters"] == ["berlin", "oslo"]
    assert (summary["steps"], summary["last_step"], summary["tokens"]) == (2, 2, 800)
    assert summary["final_loss"] == pytest.approx((2 * 100 + 3 * 300) / 400)
    assert summary["eval_loss"] == pytest.approx(2.5)
    assert summary["tokens_per_second"] == pytest.approx(800 / 4), "the slowest cluster sets the pace"
    assert summary["wan_bytes"] == {"dispatch": 4000, "combine": 0, "trunk": 4, "heal": 0}
    assert summary["remote_fraction"] == pytest.approx(0.25)
    assert summary["dedup_ratio"] == pytest.approx(2.0)
    assert summary["per_cluster"]["oslo"] == {
        "compute_s": 1.0,
        "local_wait_s": None,
        "wan_wait_s": 0.5,
        "wan_hidden_s": None,
        "tokens": 600,
    }
    assert (summary["emulated"], summary["events"]) == (True, 3)
    assert (summary["discarded_steps"], summary["skipped_steps"]) == (1, 1)


@pytest.mark.parametrize("emulated", [True, False])
def test_emulated_links_are_always_named(tmp_path: Path, emulated: bool) -> None:
    write_run(tmp_path / "run", emulated=emulated)
    console = Console(file=io.StringIO(), width=100)
    print_report(report(tmp_path / "run"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("emulated" in text) == emulated
    assert "4.00 kB" in text
    assert "not measured" in text


def test_a_missing_cluster_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, emulated=False, clusters=("oslo",))
    summary = report(tmp_path)
    assert summary["missing_clusters"] == ["berlin"]
    console = Console(file=io.StringIO(), width=100)
    print_report(summary, console)
    assert "Without the logs of berlin" in console.file.getvalue()  # type: ignore[attr-defined]

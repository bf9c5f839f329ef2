"""The table of a sweep, from the logs of its runs: one row per run and seed, and the loss curves behind it.

Losses are those of evaluations (the same held-out text for all runs). Between two evaluations the loss at a mark is
interpolated linearly; a run that ends before a mark of bytes keeps its last loss, having sent less. Bytes are payload
that training sent, summed over clusters; what evaluations send is not in them. Seconds are the measured wall clock of
the steps (the slowest cluster's of each), syncs included, evaluations and start not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from moe_fragment.observe import STEP_SKIPPED, SYNC_FAILED, SYNC_REFUSED, RunLog
from moe_fragment.sweep.config import Job, Sweep, resolved, written
from moe_fragment.sweep.run import failure
from moe_fragment.train.checkpoint import Checkpoint, CheckpointError, checkpoint_path
from moe_fragment.train.launch import is_complete

TABLE_FILE = "table.csv"
CURVES_FILE = "curves.csv"
MERGES_FILE = "merges.csv"
_CURVE = ("step", "wan_bytes", "seconds", "eval_loss")
_MERGE = ("step", "trunk_distance", "trunk_cosine", "codec_error", "refused")
_QUARTERS = (0.25, 0.5, 0.75, 1.0)
_DECADES = 10.0 ** np.arange(3, 16)
_FP32_BYTES = 4


@dataclass(frozen=True)
class Table:
    """Of a sweep.

    Attributes:
        rows: a row per run and seed, also those that failed or were not run (`status`).
        curves: `run`, `seed`, `step`, `wan_bytes`, `seconds`, `eval_loss` of every evaluation of complete runs.
        merges: `run`, `seed`, `step`, `trunk_distance`, `trunk_cosine`, `codec_error`, `refused` of every step in which
            a complete run compared trunk copies; several fragments that end with one step are one.
    """

    rows: pd.DataFrame
    curves: pd.DataFrame
    merges: pd.DataFrame

    def write(self, directory: Path) -> None:
        """As `table.csv`, `curves.csv` and `merges.csv`."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, frame in ((TABLE_FILE, self.rows), (CURVES_FILE, self.curves), (MERGES_FILE, self.merges)):
            frame.to_csv(directory / name, index=False, float_format="%.6g")


def build_table(sweep: Sweep) -> Table:
    """Read the logs of the complete runs.

    Raises:
        RunLogError: a log is damaged.
    """
    complete = [job for job in sweep.jobs if is_complete(job.recipe)]
    logs = {job.label: RunLog(job.recipe.run_directory) for job in complete}
    curves = {label: curve(log) for label, log in logs.items()}
    merges = {label: merges_of(log) for label, log in logs.items()}
    marks = _Marks.over(list(curves.values()))
    rows = []
    for job in sweep.jobs:
        row = _settings(job, sweep.varied)
        if job.label in logs:
            losses = curves[job.label]
            row |= {"status": "complete", **_measured(job, logs[job.label])}
            if not job.recipe.sync.is_gradient:
                row |= _of_merges(merges[job.label], logs[job.label])
            row |= {"eval_loss": losses["eval_loss"].iloc[-1], **marks.losses(losses)}
            if sweep.config.target_loss is not None:
                row |= reached(losses, sweep.config.target_loss)
        else:
            reason = failure(job)
            row |= {"status": "not run" if reason is None else "failed", "error": reason}
        rows.append(row)
    table = pd.DataFrame(rows)
    last = [name for name in ("error",) if name in table]
    return Table(
        table[[name for name in table.columns if name not in last] + last],
        _stacked(complete, curves, _CURVE),
        _stacked(complete, merges, _MERGE),
    )


def _stacked(jobs: Sequence[Job], frames: Mapping[str, pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    parts = [frames[job.label].assign(run=job.name, seed=job.seed) for job in jobs if len(frames[job.label])]
    empty = pd.DataFrame(columns=["run", "seed", *columns])
    return pd.concat(parts, ignore_index=True)[list(empty.columns)] if parts else empty


def curve(log: RunLog) -> pd.DataFrame:
    """`step`, `wan_bytes` and `seconds` so far, and `eval_loss` (nats per token), by evaluation."""
    steps = log.step_numbers
    seconds = log.steps.groupby("step")["step_s"].max().reindex(steps).cumsum().to_numpy()
    sent = log.wan_bytes()[..., 0].sum(axis=(1, 2, 3)).cumsum()
    losses = log.evaluations.groupby("step")["loss"].mean()
    losses = losses[losses.index.isin(steps)]
    at = np.searchsorted(steps, losses.index.to_numpy())
    return pd.DataFrame(
        {
            "step": steps[at],
            "wan_bytes": sent[at],
            "seconds": seconds[at],
            "eval_loss": losses.to_numpy(),
        }
    )


@dataclass(frozen=True)
class _Marks:
    """Where the curves of a sweep are compared."""

    steps: Sequence[int]
    wan_bytes: Sequence[float]
    seconds: Sequence[float]

    @classmethod
    def over(cls, curves: Sequence[pd.DataFrame]) -> _Marks:
        """Quarters of the shortest run in steps and in seconds; every power of ten that some run sends."""
        if not curves:
            return cls((), (), ())
        steps = min(int(frame["step"].max()) for frame in curves)
        seconds = min(float(frame["seconds"].max()) for frame in curves)
        most = max(float(frame["wan_bytes"].max()) for frame in curves)
        sent = [mark for frame in curves for mark in frame["wan_bytes"] if mark > 0]
        return cls(
            sorted({max(1, round(steps * part)) for part in _QUARTERS}),
            [mark for mark in _DECADES if sent and min(sent) <= mark <= most],
            [_rounded_down(seconds * part) for part in _QUARTERS],
        )

    def losses(self, frame: pd.DataFrame) -> dict[str, float]:
        """Evaluation loss at every mark."""
        found = {f"loss_at_{mark}_steps": at(frame, "step", mark) for mark in self.steps}
        found |= {f"loss_at_{mark / 1e6:g}_MB": at(frame, "wan_bytes", mark) for mark in self.wan_bytes}
        found |= {f"loss_at_{mark:g}_s": at(frame, "seconds", mark) for mark in self.seconds}
        return found


def at(frame: pd.DataFrame, axis: str, mark: float) -> float:
    """The loss where `axis` is at `mark`; not a number before the first evaluation, the last loss after the end."""
    kept = frame.drop_duplicates(axis, keep="last")
    return float(np.interp(mark, kept[axis], kept["eval_loss"], left=math.nan))


def reached(frame: pd.DataFrame, target: float) -> dict[str, float]:
    """Steps, seconds and bytes at which the loss came down to `target`, interpolated; not a number if it did not."""
    names = {"step": "steps_to_target", "seconds": "seconds_to_target", "wan_bytes": "wan_bytes_to_target"}
    losses = frame["eval_loss"].to_numpy()
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return dict.fromkeys(names.values(), math.nan)
    after = int(below[0])
    if after == 0:
        return {column: float(frame[name].iloc[0]) for name, column in names.items()}
    part = (losses[after - 1] - target) / (losses[after - 1] - losses[after])
    found = {}
    for name, column in names.items():
        low, high = frame[name].iloc[after - 1], frame[name].iloc[after]
        found[column] = float(low + part * (high - low))
    return found


def _settings(job: Job, varied: Sequence[str]) -> dict[str, Any]:
    return {
        "run": job.name,
        "seed": job.seed,
        **{dotted: _cell(resolved(job.recipe, dotted)) for dotted in varied},
    }


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, (bool, int, float, str)) else written(value)


def _measured(job: Job, log: RunLog) -> dict[str, Any]:
    summary = log.summary()
    steps, sent = summary["steps"], summary["wan_bytes"]
    row: dict[str, Any] = {
        "emulated": summary["emulated"],
        "steps": steps,
        "train_loss": summary["final_loss"],
        "skipped_steps": len(log.events.loc[log.events["kind"] == STEP_SKIPPED, "step"].unique()),
        "wan_bytes": sum(sent.values()),
        "wan_bytes_per_step": sum(sent.values()) / steps,
    }
    for channel in log.channels:
        row |= {f"{channel}_bytes": sent[channel], f"{channel}_bytes_per_step": sent[channel] / steps}
    plain = plain_bytes_per_step(job)
    row["compression"] = plain * steps / sent["trunk"] if plain and sent["trunk"] else math.nan
    row["seconds"] = summary["elapsed_s"]
    for name in ("compute_s", "wan_wait_s"):
        row[name] = float(np.mean([each[name] or 0.0 for each in summary["per_cluster"].values()]))
    return row


def plain_bytes_per_step(job: Job) -> float:
    """What a plain fp32 all-reduce of everything with copies sends per step, over all clusters.

    A ring over h clusters sends 2 (h - 1) times the values; parameters that one cluster alone holds send nothing.
    0 if the checkpoint at the end is gone.
    """
    held: dict[str, list[int]] = {}
    for cluster in job.recipe.fleet().names:
        directory = checkpoint_path(job.recipe.run_directory / cluster, job.recipe.train.steps)
        try:
            sizes = Checkpoint(directory).manifest.sizes
        except CheckpointError:
            return 0.0
        for name, size in sizes.items():
            held.setdefault(name, []).append(size)
    return float(sum(2 * (len(sizes) - 1) * sizes[0] * _FP32_BYTES for sizes in held.values()))


def merges_of(log: RunLog) -> pd.DataFrame:
    """Every step in which trunk copies were compared: how far apart they were, and whether the guard refused."""
    own = log.steps[log.steps["cluster"] == log.present[0]]
    compared = own[own["trunk_distance"].notna()] if "trunk_distance" in own else own.iloc[:0]
    refused = log.events.loc[log.events["kind"] == SYNC_REFUSED, "step"]
    frame = compared.reindex(columns=list(_MERGE)).reset_index(drop=True)
    return frame.assign(refused=frame["step"].isin(refused))


def _of_merges(merges: pd.DataFrame, log: RunLog) -> dict[str, Any]:
    refused = int(merges["refused"].sum())
    row: dict[str, Any] = {
        "merges": len(merges) - refused,
        "refused": refused,
        "failed_merges": log.events.loc[log.events["kind"] == SYNC_FAILED, "step"].nunique(),
    }
    for name in ("codec_error", "trunk_distance", "trunk_cosine"):
        row[name] = float(merges[name].mean())
    row["trunk_distance_last"] = float(merges["trunk_distance"].iloc[-1]) if len(merges) else math.nan
    return row


def _rounded_down(value: float) -> float:
    """To two significant digits."""
    if value <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(math.floor(value / unit) * unit)

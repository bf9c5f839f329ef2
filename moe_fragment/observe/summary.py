"""The numbers that describe a run in one screen, computed from its log and safe to write as JSON."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import pandas as pd

from moe_fragment.observe.layout import STEP_DISCARDED, STEP_SKIPPED, SYNC_FAILED, SYNC_REFUSED, RunLogError

if TYPE_CHECKING:
    from moe_fragment.observe.runlog import RunLog

_STAGE = re.compile(r"stage_(\d+)_idle_s")
_PER_CLUSTER_SECONDS = ("compute_s", "local_wait_s", "wan_wait_s", "wan_hidden_s")


def summarise(log: RunLog) -> dict[str, Any]:
    """Summary of a run, over the clusters whose logs are present.

    Returns:
        `run`, `clusters` (names in topology order), `missing_clusters`, `emulated`, `steps` (how many were
        recorded), `last_step`, `tokens`, `final_loss` (nats; token-weighted over clusters at the last step),
        `eval_loss` (same, at the last evaluation), `elapsed_s` (sum over steps of the slowest cluster),
        `tokens_per_second`, `wan_bytes` (channel to bytes sent), `remote_fraction`, `dedup_ratio`,
        `merges` (steps with one), `failed_merges`, `refused_merges`, `trunk_distance` and `codec_error` (means over
        the steps in which they were measured), `per_cluster` (name to seconds and tokens; of a pipeline also `bubble`,
        `bubble_expected` and, by stage, the seconds in `stages`), `events`, `discarded_steps`, `skipped_steps`. What
        was not measured is None.

    Raises:
        RunLogError: no step was recorded yet.
    """
    steps = log.steps
    if steps.empty:
        raise RunLogError(f"{log.paths[0]}: the run has not finished its first step")
    last = steps[steps["step"] == steps["step"].iloc[-1]]
    evaluations = log.evaluations
    final = evaluations[evaluations["step"] == evaluations["step"].max()]
    remote, local, rows = (_total(steps, name) for name in ("remote_pairs", "local_pairs", "remote_rows"))
    elapsed = steps.groupby("step")["step_s"].max().sum() if "step_s" in steps else math.nan
    first = steps[steps["cluster"] == steps["cluster"].iloc[0]]
    tokens = int(steps["tokens"].sum())
    sent_K = log.wan_bytes()[..., 0].sum(axis=(0, 1, 2))
    return {
        "run": log.name,
        "clusters": list(log.clusters),
        "missing_clusters": [name for name in log.clusters if name not in log.present],
        "emulated": log.emulated,
        "steps": len(log.step_numbers),
        "last_step": int(log.step_numbers[-1]),
        "tokens": tokens,
        "final_loss": _weighted_loss(last),
        "eval_loss": _weighted_loss(final),
        "elapsed_s": _or_none(elapsed),
        "tokens_per_second": _ratio(tokens, elapsed),
        "wan_bytes": {name: int(sent) for name, sent in zip(log.channels, sent_K, strict=True)},
        "remote_fraction": _ratio(remote, remote + local),
        "dedup_ratio": _ratio(remote, rows),
        "merges": _count(first, "trunk_distance"),
        "failed_merges": _fleet_count(log.events, SYNC_FAILED),
        "refused_merges": _fleet_count(log.events, SYNC_REFUSED),
        "trunk_distance": _mean(first, "trunk_distance"),
        "codec_error": _mean(first, "codec_error"),
        "per_cluster": {
            str(name): {
                **{field: _or_none(_total(part, field)) for field in _PER_CLUSTER_SECONDS},
                "tokens": int(part["tokens"].sum()),
                **_pipeline(part),
            }
            for name, part in steps.groupby("cluster", observed=True)
        },
        "events": len(log.events),
        "discarded_steps": _fleet_count(log.events, STEP_DISCARDED),
        "skipped_steps": _fleet_count(log.events, STEP_SKIPPED),
    }


def _pipeline(part: pd.DataFrame) -> dict[str, Any]:
    """Of a cluster that ran one."""
    names = [name for name in part.columns if part[name].notna().any()]
    numbers = sorted(int(found[1]) for name in names if (found := _STAGE.fullmatch(name)))
    if not numbers:
        return {}
    return {
        "bubble": _mean(part, "bubble"),
        "bubble_expected": _mean(part, "bubble_expected"),
        "stages": [
            {what: _or_none(_total(part, f"stage_{number}_{what}")) for what in ("idle_s", "wan_wait_s")}
            for number in numbers
        ],
    }


def _total(frame: pd.DataFrame, column: str) -> float:
    return float(frame[column].sum(min_count=1)) if column in frame else math.nan


def _count(frame: pd.DataFrame, column: str) -> int:
    return int(frame[column].notna().sum()) if column in frame else 0


def _mean(frame: pd.DataFrame, column: str) -> float | None:
    return _or_none(float(frame[column].mean())) if column in frame else None


def _weighted_loss(rows: pd.DataFrame) -> float | None:
    rows = rows[rows["tokens"] > 0]
    return _ratio(float((rows["loss"] * rows["tokens"]).sum(skipna=False)), float(rows["tokens"].sum()))


def _fleet_count(events: pd.DataFrame, kind: str) -> int:
    """Every cluster reports what befell the fleet; the one that saw most of it is right."""
    counts = events.loc[events["kind"] == kind, "cluster"].value_counts()
    return int(counts.max()) if len(counts) else 0


def _ratio(over: float, under: float) -> float | None:
    return _or_none(over / under) if under else None


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None

"""`moe-fragment report RUN`: the summary of a run as a dictionary or as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_fragment.observe.runlog import RunLog

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def report(run_path: str | Path | Sequence[str | Path]) -> dict[str, Any]:
    """The summary of a run, safe to write as JSON (keys: `moe_fragment.observe.summary.summarise`).

    Raises:
        RunLogError: there is no readable run, or it has not finished a step.
    """
    return RunLog(run_path).summary()


def print_report(summary: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a summary for people."""
    (console or Console()).print(render(summary))


def render(summary: Mapping[str, Any]) -> RenderableType:
    """A summary as rich tables; emulated links are named as such wherever a number depends on them."""
    emulated = " (emulated links)" if summary["emulated"] else ""
    parts: list[RenderableType] = [_overview(summary, emulated), _per_cluster(summary, emulated)]
    if any("stages" in values for values in summary["per_cluster"].values()):
        parts.append(_stages(summary, emulated))
    if summary["missing_clusters"]:
        names = ", ".join(summary["missing_clusters"])
        parts.append(Text(f"Without the logs of {names}: copy their run directories beside this one."))
    return Group(*parts)


def _overview(summary: Mapping[str, Any], emulated: str) -> Table:
    table = Table(title=Text(f"Run {summary['run']}{emulated}"), show_header=False)
    table.add_column()
    table.add_column(justify="right")
    wan = {name: sent for name, sent in summary["wan_bytes"].items() if sent}
    merges = [
        ("merges / failed / refused", "{merges} / {failed_merges} / {refused_merges}".format(**summary)),
        ("distance of trunk copies before a merge", _number(summary["trunk_distance"], "{:.3f}")),
    ]
    codec = [("relative error of the codec", _number(summary["codec_error"], "{:.4f}"))]
    rows = [
        ("clusters", ", ".join(summary["clusters"])),
        ("steps", f"{summary['steps']:,}"),
        ("tokens", f"{summary['tokens']:,}"),
        ("final loss (nats per token)", _number(summary["final_loss"], "{:.4f}")),
        ("evaluation loss (nats per token)", _number(summary["eval_loss"], "{:.4f}")),
        (f"tokens per second{emulated}", _number(summary["tokens_per_second"], "{:,.0f}")),
        ("remote fraction of (token, expert) pairs", _number(summary["remote_fraction"], "{:.1%}")),
        ("pairs per row sent (deduplication)", _number(summary["dedup_ratio"], "{:.2f}")),
        *((f"WAN payload sent, {name}", _bytes(sent)) for name, sent in wan.items()),
        ("WAN payload sent, all", _bytes(sum(wan.values()))),
        *(merges if summary["merges"] or summary["failed_merges"] else []),
        *(codec if summary["codec_error"] else []),
        ("steps discarded / skipped", f"{summary['discarded_steps']} / {summary['skipped_steps']}"),
        ("events", str(summary["events"])),
    ]
    for name, value in rows:
        table.add_row(Text(name), Text(value))
    return table


def _per_cluster(summary: Mapping[str, Any], emulated: str) -> Table:
    table = Table(title=Text(f"Where the seconds went{emulated}"))
    table.add_column("cluster")
    columns = {
        "compute_s": "compute",
        "local_wait_s": "local wait",
        "wan_wait_s": "WAN wait",
        "wan_hidden_s": "WAN hidden",
    }
    for title in columns.values():
        table.add_column(f"{title} (s)", justify="right")
    table.add_column("tokens", justify="right")
    for name, values in summary["per_cluster"].items():
        seconds = [_number(values[field], "{:,.1f}") for field in columns]
        table.add_row(Text(name), *seconds, f"{values['tokens']:,}")
    return table


def _stages(summary: Mapping[str, Any], emulated: str) -> Table:
    table = Table(title=Text(f"What the stages of the pipelines waited{emulated}"))
    table.add_column("cluster")
    for title in ("stage", "idle (s)", "WAN wait (s)", "bubble", "of equal stages"):
        table.add_column(title, justify="right")
    for name, values in summary["per_cluster"].items():
        bubbles = [_number(values.get(field), "{:.1%}") for field in ("bubble", "bubble_expected")]
        for number, stage in enumerate(values.get("stages", ())):
            seconds = [_number(stage[field], "{:,.1f}") for field in ("idle_s", "wan_wait_s")]
            of_all = ["", ""] if number else bubbles
            table.add_row(Text("" if number else name), str(number), *seconds, *of_all)
    return table


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)


def _bytes(count: float) -> str:
    for unit in _BYTE_UNITS:
        if count < 1000 or unit == _BYTE_UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")

"""A sweep's table for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from moe_fragment.sweep.config import Sweep
from moe_fragment.sweep.table import TABLE_FILE, Table

_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "eval_loss": ("loss", "{:.4f}".format),
    "wan_bytes_per_step": ("WAN kB a step", lambda value: f"{value / 1e3:,.{1 if value < 1e5 else 0}f}"),
    "compression": ("trunk ratio", "{:,.1f}".format),
    "codec_error": ("codec error", "{:.3f}".format),
    "trunk_distance": ("apart", "{:.3f}".format),
    "merges": ("merges", "{:.0f}".format),
    "refused": ("refused", "{:.0f}".format),
    "seconds": ("s", "{:.1f}".format),
    "seconds_to_target": ("s to target", "{:.1f}".format),
}
"""Those that fit a terminal: name in the table to heading and form."""


def print_table(sweep: Sweep, table: Table, console: Console | None = None) -> None:
    """For people; emulated links are named in the title."""
    rows = table.rows
    emulated = " (emulated links)" if "emulated" in rows and rows["emulated"].eq(True).any() else ""
    shown = RichTable(
        title=Text(f"Sweep {sweep.config.name}{emulated}"), box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    shown.add_column("run", no_wrap=True)
    columns = [name for name in _COLUMNS if name in rows and rows[name].fillna(0).ne(0).any()]
    for name in columns or ["eval_loss"]:
        shown.add_column(
            _COLUMNS[name][0], justify="right", min_width=len("not run") if name == "eval_loss" else None
        )
    for job, row in zip(sweep.jobs, rows.to_dict("records"), strict=True):
        cells = [_shown(row[name], _COLUMNS[name][1]) for name in columns]
        if row["status"] != "complete":
            cells = [row["status"]]
        shown.add_row(Text(job.label), *cells)
    where = sweep.directory / TABLE_FILE
    (console or Console()).print(shown, Text(f"all columns: {where}", overflow="fold"))


def as_json(sweep: Sweep, table: Table) -> dict[str, Any]:
    """What `sweep --json` prints; what was not measured is null."""
    return {
        "sweep": sweep.config.name,
        "directory": str(sweep.directory),
        "rows": _records(table.rows),
        "curves": _records(table.curves),
    }


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(frame.to_json(orient="records", double_precision=12))
    return found


def _shown(value: Any, form: Callable[[Any], str]) -> str:
    return "-" if pd.isna(value) else form(value)

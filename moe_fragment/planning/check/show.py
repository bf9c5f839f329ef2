"""A check as a table for people, and as one JSON object for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_fragment.planning.check.run import Outcome


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """``{"cases": [...]}``: ``predicted`` and ``expected`` map the same names to numbers (None: none that is finite),
    ``error`` is the relative error of the value furthest off."""
    return {
        "cases": [
            {
                "id": outcome.case.id,
                "kind": outcome.case.kind,
                "predicted": {
                    name: value if math.isfinite(value) else None for name, value in outcome.predicted.items()
                },
                "expected": outcome.case.expected,
                "error": outcome.error,
                "passed": outcome.passed,
            }
            for outcome in outcomes
        ]
    }


def print_check(outcomes: Sequence[Outcome], console: Console | None = None) -> None:
    """Print every case, then how many of each kind passed."""
    console = console or Console()
    table = Table(title="Predicted against published")
    for heading in ("case", "kind"):
        table.add_column(heading, overflow="fold")
    for heading in ("predicted", "published", "error", "tolerance"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("")
    for outcome in outcomes:
        case, error = outcome.case, outcome.error
        table.add_row(
            escape(case.id),
            case.kind,
            escape(_values(outcome.predicted)),
            escape(_values(case.expected)),
            "-" if error is None else f"{error:+.1%}",
            escape(str(case.tolerance)),
            "pass" if outcome.passed else "[bold red]fail[/]",
        )
    console.print(table)
    total = Counter(outcome.case.kind for outcome in outcomes)
    passed = Counter(outcome.case.kind for outcome in outcomes if outcome.passed)
    summary = Table(title="By kind")
    summary.add_column("kind")
    summary.add_column("passed", justify="right")
    for kind, number in total.items():
        summary.add_row(kind, f"{passed[kind]} of {number}")
    summary.add_section()
    summary.add_row("all", f"{passed.total()} of {total.total()}")
    console.print(summary)


def _values(values: Mapping[str, float]) -> str:
    return "\n".join(f"{name} {value:.4g}" for name, value in values.items())

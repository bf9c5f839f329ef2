"""A check as a table for people, and as one JSON object for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_fragment.planning.check.run import Outcome


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """``{"cases": [...], "kinds": {KIND: {"passed", "total"}}}``.

    ``predicted`` and ``expected`` of a case map the same names to numbers, ``error`` is the relative error of the
    value furthest off (None if zero was expected and missed).
    """
    return {
        "cases": [
            {
                "id": outcome.case.id,
                "kind": outcome.case.kind,
                "predicted": outcome.predicted,
                "expected": outcome.case.expected,
                "error": outcome.error,
                "passed": outcome.passed,
            }
            for outcome in outcomes
        ],
        "kinds": {
            kind: {"passed": passed, "total": total} for kind, (passed, total) in by_kind(outcomes).items()
        },
    }


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, tuple[int, int]]:
    """How many cases passed, of how many, for each kind in the order of the file."""
    total = Counter(outcome.case.kind for outcome in outcomes)
    passed = Counter(outcome.case.kind for outcome in outcomes if outcome.passed)
    return {kind: (passed[kind], number) for kind, number in total.items()}


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
    summary = Table(title="By kind")
    summary.add_column("kind")
    summary.add_column("passed", justify="right")
    for kind, (passed, total) in by_kind(outcomes).items():
        summary.add_row(kind, f"{passed} of {total}")
    summary.add_section()
    summary.add_row("all", f"{sum(outcome.passed for outcome in outcomes)} of {len(outcomes)}")
    console.print(summary)


def _values(values: Mapping[str, float]) -> str:
    return "\n".join(f"{name} {value:.4g}" for name, value in values.items())

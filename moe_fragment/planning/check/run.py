"""Evaluate a case file: predict every expected value by the formula of its kind, and compare."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from moe_fragment.planning.check import kinds, training
from moe_fragment.planning.check.cases import Case, read_cases
from moe_fragment.planning.check.tolerance import Ranking
from moe_fragment.schema import ConfigError, FieldError, explain

KINDS: dict[str, type[kinds.Inputs]] = {
    "all_reduce": kinds.AllReduce,
    "send": kinds.Send,
    "tcp": kinds.Tcp,
    "hierarchical_all_reduce": kinds.HierarchicalAllReduce,
    "dp_sync": kinds.DataParallelSync,
    "utilisation": kinds.Utilisation,
    "outer_utilisation": kinds.OuterUtilisation,
    "throughput": training.Throughput,
    "training_cost": training.TrainingCost,
    "parameters": kinds.ParameterCount,
    "wire": kinds.Wire,
    "goodput": kinds.Goodput,
    "bubble": kinds.Bubble,
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One case, evaluated."""

    case: Case
    """What was asked."""
    predicted: dict[str, float]
    """Predictions under the names of the case's expected values."""
    passed: bool
    """Whether all of them are within the tolerance."""

    @property
    def error(self) -> float | None:
        """Predicted over expected, less one, of the value furthest off; None if zero was expected and missed."""
        errors = [_relative(self.predicted[name], value) for name, value in self.case.expected.items()]
        worst = max(errors, key=abs)
        return worst if math.isfinite(worst) else None


def check_file(path: str | Path) -> list[Outcome]:
    """Evaluate every case of a case file, in its order.

    Raises:
        ConfigError: an unknown kind, a missing or unknown field, a wrong type, a number that makes no sense; one
            sentence that names the file, the case and the field. A prediction that misses is no error.
    """
    predicted = [(case, _predict(case, f"{path}: case {case.id!r}")) for case in read_cases(path)]
    return [
        Outcome(case=case, predicted=values, passed=_passes(case, values, predicted))
        for case, values in predicted
    ]


def _predict(case: Case, where: str) -> dict[str, float]:
    if case.kind not in KINDS:
        raise ConfigError(f"{where}: kind: expected one of {', '.join(KINDS)}, got {case.kind!r}")
    try:
        formulas = KINDS[case.kind].model_validate(case.inputs).predictions()
    except ValidationError as error:
        raise ConfigError(explain(error, where, "inputs")) from None
    values = {}
    for name in case.expected:
        if name not in formulas:
            raise ConfigError(
                f"{where}: expected.{name}: unknown for kind '{case.kind}', expected one of {', '.join(formulas)}"
            )
        try:
            value = formulas[name]()
        except FieldError as error:
            raise ConfigError(f"{where}: inputs.{error}") from None
        except (OverflowError, ZeroDivisionError):
            value = math.inf
        if not math.isfinite(value):
            raise ConfigError(f"{where}: inputs: the numbers are too large or too small to compute {name}")
        values[name] = case.allowed.comparable(value)
    return values


def _passes(case: Case, values: dict[str, float], others: Sequence[tuple[Case, dict[str, float]]]) -> bool:
    if isinstance(case.allowed, Ranking):
        rivals = [
            (other, theirs)
            for other, theirs in others
            if other is not case
            and other.kind == case.kind
            and isinstance(other.allowed, Ranking)
            and _family(other) == _family(case)
        ]
        return all(
            _order(values[name], theirs[name]) == _order(case.expected[name], other.expected[name])
            for other, theirs in rivals
            for name in case.expected
            if name in other.expected
        )
    first = next(iter(case.expected))
    return all(
        case.allowed.holds(values[name], expected, first=name == first)
        for name, expected in case.expected.items()
    )


def _family(case: Case) -> str:
    return case.id.rpartition("-")[0]


def _order(one: float, other: float) -> int:
    return (one > other) - (one < other)


def _relative(predicted: float, expected: float) -> float:
    if expected == 0:
        return 0.0 if predicted == 0 else math.inf
    return predicted / expected - 1

"""Tolerances: what each form allows, and forms that are none."""

from __future__ import annotations

import pytest

from moe_fragment.planning.check.tolerance import Ranking, parse_tolerance


@pytest.mark.parametrize(
    ("text", "expected", "right", "wrong"),
    [
        ("5%", 100, [95, 105], [94.9, 105.1]),
        ("0.1 %", 1000, [1001], [1001.1]),
        ("0.5", 2, [1.5, 2.5], [2.6]),
        (0.5, 2, [1.5], [1.4]),
        ("[1, 2]", 7, [1, 2], [0.9, 2.1]),
        ("1 cell of logspace(-1,3,50)", 10.985, [9.2, 13.2], [7.6, 15.9]),
        ("2 cells of logspace(-1,3,50)", 10.985, [7.6, 15.9], [0, -1]),
    ],
)
def test_what_is_allowed(text: str, expected: float, right: list[float], wrong: list[float]) -> None:
    tolerance = parse_tolerance(text)
    for value in right:
        assert tolerance.holds(value, expected, first=True), value
    for value in wrong:
        assert not tolerance.holds(value, expected, first=True), value


def test_an_interval_is_about_the_first_value() -> None:
    interval = parse_tolerance("[1,2]")
    assert interval.holds(1000.5, 1000, first=False)
    assert not interval.holds(1.5, 1000, first=False)


def test_predictions_go_up_to_the_next_point_of_a_grid() -> None:
    cells = parse_tolerance("1 cell of logspace(0,2,3)")
    assert cells.comparable(10.0000001) == pytest.approx(10)
    assert cells.comparable(11) == pytest.approx(100)
    assert cells.comparable(0.01) == pytest.approx(1)
    assert cells.comparable(1234) == 1234  # beyond the grid


def test_a_ranking_is_decided_elsewhere() -> None:
    assert isinstance(parse_tolerance("ranking"), Ranking)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "about",
        "-5%",
        "nan",
        "[2,1]",
        "[1]",
        True,
        None,
        float("nan"),
        "1 cell of logspace(3,-1,50)",
        "1 cell of logspace(0,1,1)",
    ],
)
def test_what_is_no_tolerance(text: object) -> None:
    with pytest.raises(ValueError, match="expected a percentage"):
        parse_tolerance(text)

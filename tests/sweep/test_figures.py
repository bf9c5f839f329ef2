"""The shipped table and the figures of docs/compression.md, which anyone can draw again."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moe_fragment.sweep import Sweep
from tests.train.runs import ROOT

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def script() -> Any:
    """docs/figures/compression.py as a module."""
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures" / "compression.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_shipped_table_is_of_the_shipped_sweep() -> None:
    sweep = Sweep.load(ROOT / "recipes" / "sweeps" / "compression.yaml")
    table = pd.read_csv(DOCS / "data" / "compression.csv")
    assert [*zip(table["run"], table["seed"], strict=True)] == [(job.name, job.seed) for job in sweep.jobs]
    assert set(table["status"]) == {"complete"}


def test_figures_are_drawn_and_shown(script: Any, tmp_path: Path) -> None:
    drawn = script.draw(DOCS / "data", tmp_path)
    text = (DOCS / "compression.md").read_text(encoding="utf-8")
    for path in drawn:
        assert path.stat().st_size > 10_000
        assert (DOCS / "figures" / path.name).is_file()
        assert f"(figures/{path.name})" in text

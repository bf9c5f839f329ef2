"""The page on the planner shows the constants that the code uses."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"


def test_the_table_of_fitted_constants() -> None:
    rows = re.findall(r"^\| `(\w+)\.([A-Z_]+)` \| (\S+) \|", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) == 8
    for module, name, value in rows:
        assert getattr(importlib.import_module(f"moe_fragment.planning.{module}"), name) == float(value), name

"""Clusters that run a pipeline compute what one process does, and save what any other does."""

from __future__ import annotations

import pytest

from tests.fleet.harness import Fleets
from tests.fleet.test_parity import check_same_as_one_process
from tests.fleet.training import Scenario

CASES = {
    "2x2-fragment": Scenario(sizes=(2, 2), model="fragment", layout="even", partition=(2, 3)),
}


@pytest.mark.parametrize("name", CASES)
def test_same_as_one_process(fleets: Fleets, name: str) -> None:
    check_same_as_one_process(fleets, CASES[name], f"pipeline {name}")

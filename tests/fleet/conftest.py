"""Fleets shared by all tests here; see `harness`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fleet.harness import Fleets

# Before anything is imported in the test process or forked from it.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

TIMEOUT_S = 400.0
"""Of a test; above the harness's own time-outs, whose messages are better."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "fleets" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def fleets() -> Iterator[Fleets]:
    """`fleets(2, 1)`: a running fleet of a cluster of two ranks and one of one."""
    running = Fleets()
    try:
        yield running
    finally:
        running.close()

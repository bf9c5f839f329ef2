"""Fleets shared by all tests here; see `harness`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.fleet.harness import Fleets

# Before anything is imported in the test process or forked from it.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def fleets() -> Iterator[Fleets]:
    """`fleets(2, 1)`: a running fleet of a cluster of two ranks and one of one."""
    running = Fleets()
    try:
        yield running
    finally:
        running.close()

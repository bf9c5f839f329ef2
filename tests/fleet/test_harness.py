"""The harness itself: a failing rank and a hanging one are reported, and nothing survives."""

from __future__ import annotations

import os
import time

import psutil
import pytest

from tests.fleet.harness import Fleet, FleetFailure, Fleets, Rank


def who(rank: Rank) -> tuple[str, int, int]:
    return str(rank.place), rank.next_step(), os.getpid()


def fail_on(rank: Rank, cluster: int, local: int) -> None:
    if (rank.place.cluster, rank.place.rank) == (cluster, local):
        raise ArithmeticError("the wheels came off")


def hang_on(rank: Rank, cluster: int) -> None:
    if rank.place.cluster == cluster:
        time.sleep(1000)


def _pids(fleet: Fleet) -> list[int]:
    return [pid for ranks in fleet.run(who) for _, _, pid in ranks]


def test_cases_run_on_every_rank(fleets: Fleets) -> None:
    fleet = fleets(2, 1)
    first, second = fleet.run(who), fleet.run(who)
    assert [[name for name, _, _ in ranks] for ranks in first] == [
        ["cluster ada rank 0", "cluster ada rank 1"],
        ["cluster bob rank 0"],
    ]
    steps = {step for ranks in second for _, step, _ in ranks}
    assert steps == {first[0][0][1] + 1}


def test_failing_rank_is_named_and_fleet_ended() -> None:
    fleet = Fleet((1, 1))
    pids = _pids(fleet)
    with pytest.raises(FleetFailure, match="cluster bob rank 0 failed") as failure:
        fleet.run(fail_on, 1, 0)
    assert "the wheels came off" in str(failure.value)
    assert not fleet.alive
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_hanging_rank_shows_its_stack() -> None:
    fleet = Fleet((1, 1))
    pids = _pids(fleet)
    with pytest.raises(FleetFailure, match="cluster ada rank 0 did not answer within 2 s") as failure:
        fleet.run(hang_on, 0, timeout_s=2.0)
    assert "in hang_on" in str(failure.value)
    assert not any(psutil.pid_exists(pid) for pid in pids)

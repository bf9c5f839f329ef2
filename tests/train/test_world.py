"""Which cluster a process belongs to, read from its launcher's environment."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from moe_fragment.topology import TopologyError
from moe_fragment.train.world import World, WorldError, find_world, free_port
from tests.fleet.harness import topology_of


def find(environment: dict[str, str], **options: Any) -> World:
    arguments = {"cluster": None, "coordinator": None, "heartbeat_timeout_s": 5.0, "quorum_timeout_s": 60.0}
    return find_world(topology_of((2, 1)), environment=environment, **{**arguments, **options})


def environment(rank: int, size: int, port: int = 1) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }


@pytest.mark.parametrize(
    ("launcher", "options", "sentence"),
    [
        (
            {},
            {},
            "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set; start this script with the deepspeed launcher",
        ),
        (
            environment(0, 2),
            {},
            r"one launcher was started with 2 ranks, the topology has 3 \(2 \+ 1\); for one clus",
        ),
        (environment(0, 8), {}, "one launcher was started with 8 ranks, the topology has 3"),
        (
            environment(0, 1),
            {"cluster": "ada"},
            "cluster ada was started with 1 ranks, the topology gives it 2",
        ),
        (
            environment(0, 1),
            {"cluster": "bob"},
            "cluster bob does not know where the coordinator is; give --coordin",
        ),
    ],
)
def test_wrong_environment(launcher: dict[str, str], options: dict[str, Any], sentence: str) -> None:
    """DeepSpeedExamples#575: a hostfile that was not found gives one host's ranks, which is noticed here."""
    with pytest.raises(WorldError, match=f"^{sentence}"):
        find(launcher, **options)


def test_unknown_cluster() -> None:
    with pytest.raises(TopologyError, match="unknown cluster 'cyd', expected one of ada, bob"):
        find(environment(0, 1), cluster="cyd")


def test_one_launcher_per_cluster_keeps_its_environment() -> None:
    launcher = environment(1, 2)
    world = find(launcher, cluster="ada", coordinator="host:5")
    assert (world.cluster, world.local_rank, world.size, world.coordinator) == ("ada", 1, 2, "host:5")
    assert launcher == environment(1, 2)
    world.leave()


def test_port_of_another_run() -> None:
    """pytorch#126510: the second run on a machine is told what to give, not EADDRINUSE alone."""
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        sentence = (
            f"port {port} of localhost is taken, perhaps by another run; give the deepspeed launcher another"
        )
        with pytest.raises(WorldError, match=f"^{sentence} --master_port"):
            find(environment(0, 3, port))


def test_one_launcher_for_the_fleet_splits_its_world() -> None:
    """accelerate#1291, #2780: clusters of unequal size."""
    port = free_port()
    launchers = [environment(rank, 3, port) for rank in range(3)]
    worlds = [find(launcher) for launcher in launchers]  # rank 0 first: it hosts what the others connect to
    assert [(world.cluster, world.local_rank, world.size) for world in worlds] == [
        ("ada", 0, 2),
        ("ada", 1, 2),
        ("bob", 0, 1),
    ]
    assert {world.coordinator for world in worlds} == {f"localhost:{port}"}
    ranks = [(launcher["RANK"], launcher["WORLD_SIZE"], launcher["LOCAL_SIZE"]) for launcher in launchers]
    assert ranks == [("0", "2", "2"), ("1", "2", "2"), ("0", "1", "1")]
    assert launchers[0]["MASTER_PORT"] == launchers[1]["MASTER_PORT"] != launchers[2]["MASTER_PORT"]
    for world in reversed(worlds):
        world.leave()


def test_other_ranks_do_not_join_the_run_that_has_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 learns that the port is taken; a rank of its launcher would be one too many in the other run."""
    port = free_port()
    other = find(environment(0, 3, port))
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(
        WorldError, match=f"^port {port} belongs to another run; give the deepspeed launcher another"
    ):
        find(environment(2, 3, port))
    assert other.store is not None
    assert not other.store.check(["rendezvous/bob"])
    for _ in range(2):
        other.store.add("left", 1)
    other.leave()

"""The three ways to launch a fleet, as a person types them: the same training, clear endings, nothing left behind.

The fleet is 2 + 1 ranks. Everything that has to run to its end is started at once in one fixture, which is itself the
test that runs on one machine do not collide (pytorch#126510).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from moe_fragment.observe import RunLog
from moe_fragment.train.checkpoint import is_merged
from moe_fragment.train.world import free_port
from tests.fleet.commands import (
    PRETRAIN,
    RUN_S,
    Command,
    address_of,
    belonging_to,
    one_cluster,
    ranks_of,
    until,
)
from tests.train.runs import DEEPSPEED, EVERYWHERE, recipe_for

STEPS = 6
QUICK = {"heartbeat_timeout": "5 s", "exchange_timeout": "15 s", "quorum_timeout": "30 s"}
LIMIT_S = 300.0
"""Far more than any test needs, for machines that are busy with other things."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Directory of all recipes and runs here; no process that names it may outlive the tests."""
    home = tmp_path_factory.mktemp("launch")
    yield home
    left = belonging_to(home)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for command in Command.running:
        command.process.wait()
    assert left == []


@pytest.fixture(autouse=True)
def nothing_left(home: Path) -> Iterator[None]:
    """After every test, no process and no shared memory; a process that has been told to end gets a moment."""
    yield
    until(lambda: not belonging_to(home), 5.0, lambda: f"still there: {belonging_to(home)}")
    logs = [*home.glob("*.out"), *home.glob("*/*/launcher.log")]
    ports = {
        port for log in logs for port in re.findall(r"--master_port=(\d+)", log.read_text(errors="replace"))
    }
    assert [name for name in os.listdir("/dev/shm") if ports & set(name.split("_"))] == []


def write(
    home: Path,
    name: str,
    *,
    sizes: tuple[int, ...] = (2, 1),
    fabric: Any = None,
    sections: dict[str, Any] | None = None,
    **train: Any,
) -> Path:
    """A recipe file in `home`."""
    fields = {"steps": STEPS, "checkpoint_every": 2, "eval_every": 3, **train}
    sections = {"fabric": fabric or {}, **(sections or {})}
    recipe = recipe_for(home, name=name, sizes=sizes, sections=sections, **fields)
    path = home / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def losses(home: Path, name: str) -> dict[str, list[float]]:
    """Loss of every step by cluster; a step in the making does not count."""
    found: dict[str, list[float]] = {}
    for path in sorted((home / name).glob("*/metrics.jsonl")):
        lines = path.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        found[path.parent.name] = [row["loss"] for row in rows if "loss" in row]
    return found


@pytest.fixture(scope="module")
def complete(home: Path) -> dict[str, list[Command]]:
    """The same recipe under its three ways of launching, all at once, after they have ended."""
    one, two, three = (write(home, name) for name in ("launched", "together", "apart"))
    launched = Command(home, "moe-fragment", "launch", one, "--json")
    port = free_port()
    together = Command(home, "deepspeed", "--num_gpus", 3, "--master_port", port, PRETRAIN, "--recipe", two)
    coordinator = Command(home, "moe-fragment", "coordinator", "--clusters", 2, "--json")
    address = address_of(coordinator)
    clusters = [one_cluster(home, three, name, ranks, address) for name, ranks in (("bob", 1), ("ada", 2))]
    found = {"launched": [launched], "together": [together], "apart": clusters}
    for commands in found.values():
        for command in commands:
            assert command.ends() == 0, command.said
    coordinator.process.terminate()
    assert coordinator.ends(10.0) == 0
    return found


@pytest.mark.timeout(LIMIT_S)
def test_three_ways_of_launching_do_the_same_training(complete: dict[str, list[Command]], home: Path) -> None:
    expected = losses(home, "launched")
    assert {name: len(values) for name, values in expected.items()} == {"ada": STEPS, "bob": STEPS}
    for name in ("together", "apart"):
        found = losses(home, name)
        difference = max(
            abs(x - y) for key in expected for x, y in zip(expected[key], found[key], strict=True)
        )
        print(f"LAUNCH {name} {difference:.1e}")
        assert difference <= 1e-6


def test_launch_says_what_happened(complete: dict[str, list[Command]], home: Path) -> None:
    found = complete["launched"][0].json
    last = [losses(home, "launched")[name][-1] for name in ("ada", "bob")]
    assert Path(found["run_dir"]) == home / "launched"
    assert (found["steps"], found["tokens"]) == (STEPS, STEPS * 5 * 16)
    assert found["final_loss"] == pytest.approx((3 * last[0] + 2 * last[1]) / 5)
    assert found["clusters"] == ["ada", "bob"]
    assert set(found["wan_bytes"]) == {"dispatch", "combine", "trunk", "heal"}
    assert min(found["wan_bytes"][channel] for channel in ("dispatch", "combine", "trunk")) > 0
    assert found["emulated"] is False
    assert "evaluation loss" in complete["launched"][0].err.read_text()


@pytest.mark.timeout(60)
def test_report_has_the_promised_numbers(complete: dict[str, list[Command]], home: Path) -> None:
    report = Command(home, "moe-fragment", "report", home / "together", "--json")
    assert report.ends(30.0) == 0, report.said
    found = report.json
    numbers = (
        "final_loss",
        "eval_loss",
        "steps",
        "tokens",
        "tokens_per_second",
        "remote_fraction",
        "dedup_ratio",
    )
    assert all(found[name] > 0 for name in numbers)
    assert set(found["wan_bytes"]) >= {"dispatch", "combine", "trunk"}
    for cluster in ("ada", "bob"):
        assert {"compute_s", "local_wait_s", "wan_wait_s"} <= found["per_cluster"][cluster].keys()
    assert found["emulated"] is False


@pytest.mark.timeout(60)
def test_launch_of_a_complete_run_has_nothing_to_do(complete: dict[str, list[Command]], home: Path) -> None:
    started = time.monotonic()
    again = Command(home, "moe-fragment", "launch", home / "launched.yaml", "--json")
    assert again.ends(45.0) == 0, again.said
    print(f"LAUNCH again {time.monotonic() - started:.1f} s")
    assert again.json == complete["launched"][0].json


@pytest.mark.timeout(LIMIT_S)
def test_interrupted_launch_leaves_nothing_and_goes_on(home: Path) -> None:
    """SIGTERM, Ctrl-C in the life that goes on, then `kill -9`: no process is left, and the next life goes on."""
    recipe = write(home, "interrupted", sizes=(1, 1), steps=4000, checkpoint_every=5)
    checkpoints = home / "interrupted" / "bob" / "checkpoints"
    last, saved = 0, [0]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        command = Command(home, "moe-fragment", "launch", recipe, "--quiet")
        until(lambda: max(steps_in(checkpoints)) > last, RUN_S, lambda: command.said)  # noqa: B023
        command.process.send_signal(number)
        killed = number == signal.SIGKILL
        assert command.ends(20.0) == (-number if killed else 130)
        said = (
            "moe-fragment: interrupted; the same command goes on from the last checkpoint, if there is one\n"
        )
        assert command.said == ("" if killed else said)
        limit_s = 20.0 if killed else 2.0  # ranks look every 2 s whether their launch is there
        until(lambda: not belonging_to(home), limit_s, lambda: f"still there: {belonging_to(home)}")
        last = max(set(steps_in(checkpoints)) & set(steps_in(home / "interrupted" / "ada" / "checkpoints")))
        saved.append(last)
    lines = (home / "interrupted" / "bob" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["step"] for event in events if event["kind"] == "resumed"] == saved[1:3]


def steps_in(checkpoints: Path) -> list[int]:
    """Steps of the finished checkpoints there, and 0."""
    names = [path.name for path in checkpoints.glob("step-*")]
    return [0, *(int(name[5:]) for name in names if name[5:].isdigit())]


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("way", ["launch", "one launcher", "pipeline"])
def test_killed_rank_ends_the_launch_and_is_named(home: Path, way: str) -> None:
    """Within seconds, with a code that is not 0, by name; also a rank that has nobody beside it in its cluster, and a
    stage of a pipeline, whose neighbour waits for it.
    """
    name = f"killed-{way.split()[0]}"
    recipe = write(home, name, steps=4000, checkpoint_every=5, sizes=(2, 1))
    if way == "pipeline":
        sections = {"deepspeed": {"config": str(DEEPSPEED / "pipeline2-zero1-fp32.json")}}
        recipe = write(home, name, steps=4000, sizes=(2, 2), accumulation=4, sections=sections)
        command = Command(home, "moe-fragment", "launch", recipe, "--quiet")
        victim, sentence = ("ada", 1), r"rank 1 of cluster ada \(pid PID on [^)]*\) died"
    elif way == "launch":
        command = Command(home, "moe-fragment", "launch", recipe, "--quiet")
        victim, sentence = ("bob", 0), "cluster bob ended because its rank 0 was killed \\(SIGKILL\\)"
    else:
        words = ("--num_gpus", 3, "--master_port", free_port(), PRETRAIN, "--recipe", recipe)
        command = Command(home, "deepspeed", *words)
        victim, sentence = ("", 1), r"rank 1 of cluster ada \(pid PID on [^)]*\) died"
    until(lambda: len(losses(home, name).get("bob", [])) > 2, RUN_S, lambda: command.said)
    pid = ranks_of(home, name)[victim]
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert command.ends(25.0) not in (0, None)
    print(f"KILLED {way} {time.monotonic() - killed:.1f} s")
    assert re.search(sentence.replace("PID", str(pid)), command.said), command.said


@pytest.mark.timeout(LIMIT_S)
def test_lost_cluster_costs_no_step(home: Path) -> None:
    """The other cluster saves where it stands before it gives up, and says who is missing."""
    quick = {"exchange_timeout": "4 s", "quorum_timeout": "6 s", "heartbeat_timeout": "2 s", "max_retries": 0}
    recipe = write(home, "lost", sizes=(1, 1), steps=4000, checkpoint_every=0, fabric=quick)
    coordinator = Command(home, "moe-fragment", "coordinator", "--clusters", 2, "--json")
    address = address_of(coordinator)
    try:
        ada, bob = (one_cluster(home, recipe, name, 1, address) for name in ("ada", "bob"))
        until(lambda: losses(home, "lost").get("ada"), RUN_S, lambda: ada.said)
        os.killpg(bob.process.pid, signal.SIGKILL)
        assert ada.ends(90.0) == 1, ada.said
        assert re.search("^moe-fragment: ", ada.said, re.MULTILINE), ada.said
        saved = [int(path.name[5:]) for path in (home / "lost" / "ada" / "checkpoints").iterdir()]
        assert saved == [len(losses(home, "lost")["ada"])]
    finally:
        coordinator.process.terminate()
        coordinator.ends(10.0)


@pytest.mark.timeout(LIMIT_S)
def test_cluster_lost_while_a_fragment_is_under_way_gets_its_state_back(home: Path) -> None:
    """The merge fails, the other cluster saves what it has, and gives it in the next life to the one without."""
    link = {"between": ["ada", "bob"], "bandwidth": "1 Mbit/s", "rtt": "5 ms"}
    sections = {
        **EVERYWHERE,
        "sync": {"strategy": "streaming_diloco", "every": 24, "fragments": 1, "overlap": 20},
        "topology": {"links": [link]},
    }
    quick = {
        "heartbeat_timeout": "2 s",
        "exchange_timeout": "16 s",
        "quorum_timeout": "18 s",
        "emulate": True,
    }
    recipe = write(
        home,
        "unfinished",
        sizes=(1, 1),
        sections=sections,
        fabric=quick,
        steps=96,
        model="qwen3",
        checkpoint_every=0,
        eval_every=0,
    )

    def clusters(address: str) -> list[Command]:
        return [one_cluster(home, recipe, name, 1, address) for name in ("ada", "bob")]

    coordinators = [Command(home, "moe-fragment", "coordinator", "--clusters", 2, "--json") for _ in range(2)]
    try:
        ada, bob = clusters(address_of(coordinators[0]))
        until(lambda: len(losses(home, "unfinished").get("ada", [])) > 26, RUN_S, lambda: ada.said)
        os.killpg(bob.process.pid, signal.SIGKILL)
        assert ada.ends(90.0) == 1, ada.said
        (saved,) = steps_in(home / "unfinished" / "ada" / "checkpoints")[1:]
        shutil.rmtree(home / "unfinished" / "bob")
        for command in clusters(address_of(coordinators[1])):
            assert command.ends() == 0, command.said
    finally:
        for coordinator in coordinators:
            coordinator.process.terminate()
            coordinator.ends(10.0)
    log = RunLog(home / "unfinished")
    kinds = {cluster: list(events["kind"]) for cluster, events in log.events.groupby("cluster")}
    assert "sync_failed" in kinds["ada"], "the kill was to hit a fragment under way"
    assert "healed" in kinds["bob"]
    assert log.steps.groupby("cluster")["step"].agg(["min", "max"]).to_dict("index") == {
        "ada": {"min": 1, "max": 96},
        "bob": {"min": saved + 1, "max": 96},
    }
    assert all(is_merged(home / "unfinished" / name, 96) for name in ("ada", "bob"))


@pytest.mark.timeout(LIMIT_S)
def test_clusters_that_cannot_meet_say_so(home: Path) -> None:
    """All at once: a cluster that never comes, two that were given different recipes, a port that is taken."""
    slow = {"exchange_timeout": "12 s", "quorum_timeout": "14 s", "join_timeout": "20 s"}
    recipe = write(home, "unmet", sizes=(1, 1), fabric=slow)
    coordinators = [Command(home, "moe-fragment", "coordinator", "--clusters", 2, "--json") for _ in range(2)]
    lonely, meeting = map(address_of, coordinators)
    port = lonely.rpartition(":")[2]
    commands = {
        "alone": one_cluster(home, recipe, "ada", 1, lonely),
        "ada": one_cluster(home, recipe, "ada", 1, meeting),
        "bob": one_cluster(home, recipe, "bob", 1, meeting, "train.learning_rate=0.5"),
        "coordinator": Command(home, "moe-fragment", "coordinator", "--clusters", 2, "--port", port),
        "together": Command(
            home, "deepspeed", "--num_gpus", 2, "--master_port", port, PRETRAIN, "--recipe", recipe
        ),
    }
    sentences = {
        "alone": "cluster bob did not join within 20 s (fabric.join_timeout); 1 of 2 clusters are here",
        "ada": "clusters ada and bob differ in recipe train.learning_rate: 0.01 against 0.5",
        "bob": "clusters bob and ada differ in recipe train.learning_rate: 0.5 against 0.01",
        "coordinator": f"the coordinator cannot listen on port {port}",
        "together": f"port {port} of 127.0.0.1 is taken, perhaps by another run; give the deepspeed launcher another "
        "--master_port",
    }
    for name, command in commands.items():
        assert command.ends(RUN_S) not in (0, None), name
        assert f"moe-fragment: {sentences[name]}" in command.said, command.said
    for coordinator in coordinators:
        coordinator.process.terminate()
        coordinator.ends(10.0)

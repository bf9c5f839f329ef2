"""Emulated links: rate, delay, jitter and loss per direction, and time that passes while the caller computes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
import torch

from moe_fragment.fabric import Fabric
from moe_fragment.fabric.emulation import LinkEmulator, lossy_rate
from moe_fragment.topology import Topology
from tests.fabric.pair import fabrics, together

SLACK_S = 0.02
"""Calls themselves take time, more so on a busy machine."""
Emulators = Callable[..., LinkEmulator]


def topology(forth: dict[str, str], back: dict[str, str] | None = None) -> Topology:
    """Clusters ada and bob with these links."""
    return Topology.from_dict(
        {
            "clusters": [{"name": "ada", "processes": 1}, {"name": "bob", "processes": 1}],
            "links": [
                {"from": "ada", "to": "bob", **forth},
                {"from": "bob", "to": "ada", **(back or forth)},
            ],
        }
    )


@pytest.fixture
def emulators() -> Iterator[Emulators]:
    """Make emulators that share one fleet's table, closed afterwards."""
    made: list[LinkEmulator] = []
    key = uuid4().hex

    def make(fleet: Topology, cluster: int = 0, *, side: bool = False) -> LinkEmulator:
        made.append(LinkEmulator(fleet, cluster, key=key, side=side))
        return made[-1]

    yield make
    for emulator in made:
        emulator.close()


SLOW = {"bandwidth": "8 Mbit/s", "one_way": "50 ms"}


def test_a_message_takes_its_bytes_and_the_delay(emulators: Emulators) -> None:
    link = emulators(topology(SLOW))
    began = time.monotonic()
    assert link.reserve(1, 100_000) - began == pytest.approx(0.1 + 0.05, abs=SLACK_S)


def test_tokens_share_the_link_with_a_long_transfer(emulators: Emulators) -> None:
    """They do not queue behind what the side rail sends; while that lasts, each gets half of the rate."""
    fleet = topology(SLOW)
    main, side = emulators(fleet), emulators(fleet, side=True)
    began = time.monotonic()
    assert side.reserve(1, 10_000_000) - began == pytest.approx(10.0 + 0.05, abs=SLACK_S)
    assert main.reserve(1, 100_000) - began == pytest.approx(0.2 + 0.05, abs=SLACK_S)
    assert side.reserve(1, 100_000) - began == pytest.approx(10.1 + 0.05, abs=SLACK_S)


def test_concurrent_senders_share_the_rate(emulators: Emulators) -> None:
    """Two gateways of one cluster: the second message leaves when the first has left; the delay is not queued for."""
    fleet = topology(SLOW)
    one, other = emulators(fleet), emulators(fleet)
    began = time.monotonic()
    assert one.reserve(1, 100_000) - began == pytest.approx(0.15, abs=SLACK_S)
    assert other.reserve(1, 100_000) - began == pytest.approx(0.25, abs=SLACK_S)


def test_directions_are_independent(emulators: Emulators) -> None:
    fleet = topology(SLOW, {"bandwidth": "80 Mbit/s", "one_way": "5 ms"})
    forth, back = emulators(fleet, 0), emulators(fleet, 1)
    began = time.monotonic()
    forth.reserve(1, 1_000_000)
    assert back.reserve(0, 100_000) - began == pytest.approx(0.01 + 0.005, abs=SLACK_S)


def test_jitter_is_bounded(emulators: Emulators) -> None:
    link = emulators(topology({"bandwidth": "100 Gbit/s", "one_way": "10 ms", "jitter": "30 ms"}))
    delays = []
    for _ in range(200):
        began = time.monotonic()
        delays.append(link.reserve(1, 1) - began)
    delays.sort()
    assert delays[0] >= 0.010
    assert delays[-5] <= 0.040 + SLACK_S
    assert delays[-5] - delays[0] > 0.020


def test_loss_lowers_the_rate() -> None:
    """Mathis: 1460 bytes a round trip times sqrt(1.5 / loss)."""
    assert lossy_rate(0.0, 0.1) == float("inf")
    assert lossy_rate(0.015, 0.1) == pytest.approx(146_000.0)


def test_a_transfer_hides_behind_computation() -> None:
    """Its exposed time shrinks by what the caller computes meanwhile; both add up to the whole."""
    fleet = topology({"bandwidth": "1 Gbit/s", "one_way": "200 ms"})

    def travel(busy_s: float) -> Callable[[Fabric], Any]:
        def act(fabric: Fabric) -> Any:
            counts = [0, 0]
            counts[1 - fabric.cluster] = 1
            fabric.begin_step(0)
            fabric.clock.reset()
            transfer = fabric.open_route(torch.zeros(1, 8, dtype=torch.uint8), counts)
            time.sleep(busy_s)  # any work that is not the fabric's
            transfer.wait()
            clock = fabric.clock.reset()
            return clock.exposed_s, clock.hidden_s

        return act

    for busy_s in (0.0, 0.15, 0.4):
        clusters = fabrics(2, topology=fleet, key=uuid4().hex)
        for exposed_s, hidden_s in together(clusters, travel(busy_s)):
            assert exposed_s == pytest.approx(max(0.0, 0.2 - busy_s), abs=5 * SLACK_S)
            assert exposed_s + hidden_s == pytest.approx(0.2, abs=5 * SLACK_S)
        for fabric in clusters:
            fabric.close()

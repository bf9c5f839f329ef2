"""Two or more clusters of one rank each as threads of one process, joined by queues instead of sockets."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from moe_fragment.fabric.emulation import LinkEmulator
from moe_fragment.fabric.fabric import Fabric
from moe_fragment.fabric.lanes import Lane, LaneLayout
from moe_fragment.fabric.membership import FleetError
from moe_fragment.fabric.meter import ByteMeter
from moe_fragment.fabric.rails import Peers, Rail
from moe_fragment.topology import Topology

NAMES = ("ada", "bob", "cyd", "dan", "eve", "fay", "gus", "hal")
EAGER_BYTES = 1 << 14
QUORUM_S = 30.0
Wires = dict[tuple[int, int, int], "queue.Queue[torch.Tensor]"]


class _Received:
    def __init__(self, wire: queue.Queue[torch.Tensor], into: torch.Tensor) -> None:
        self._wire, self._into = wire, into

    def wait(self, timeout: timedelta) -> None:
        try:
            message = self._wire.get(timeout=timeout.total_seconds())
        except queue.Empty:
            raise RuntimeError("Timed out waiting for a message") from None
        self._into[: message.numel()] = message


class _Sent:
    def wait(self, timeout: timedelta) -> None:
        """Queues take everything."""


class Network:
    """The queues of one fleet, new ones for each generation of connections."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.committed = [0] * size
        """Meetings that each cluster has committed, as torchft counts steps."""
        self._lock = threading.Lock()
        self._generations: dict[int, Wires] = {}

    def wires(self, generation: int) -> Wires:
        """By (from, to, tag)."""
        with self._lock:
            if generation not in self._generations:
                places = range(self.size)
                self._generations[generation] = {
                    (a, b, tag): queue.Queue() for a in places for b in places for tag in range(4)
                }
            return self._generations[generation]


def _unchanged(message: torch.Tensor) -> torch.Tensor | None:
    return message


class QueueGroup:
    """What a rail needs of a process group; `intercept` may change or swallow an outgoing message."""

    def __init__(self, network: Network, rank: int) -> None:
        self.peers = Peers(tuple(range(network.size)), rank)
        self.generation = 0
        self.intercept: Callable[[torch.Tensor], torch.Tensor | None] = _unchanged
        self._network = network
        self._wires: Wires | None = None
        self.stale = False
        """Whether there are newer connections than these."""
        self.connect()

    def refresh(self) -> None:
        """Take the queues of the newest configuration, if these are not."""
        if self.stale:
            self.connect()

    def connect(self) -> None:
        """Fresh queues, without what was under way."""
        self.stale = False
        self.generation += 1
        self._wires = self._network.wires(self.generation)
        self.intercept = _unchanged

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Any:
        """Start sending."""
        wires = self._connected()
        message = self.intercept(tensors[0].clone())
        if message is not None:
            wires[self.peers.rank, dst_rank, tag].put(message)
        return _Sent()

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> Any:
        """Start receiving."""
        return _Received(self._connected()[src_rank, self.peers.rank, tag], tensors[0])

    def drop(self) -> None:
        """Forget the queues."""
        self._wires = None

    def _connected(self) -> Wires:
        if self._wires is None:
            raise RuntimeError("process group not initialized")
        return self._wires


class _Member:
    """A membership that never changes; after a failure the next quorum connects anew."""

    def __init__(self, groups: list[QueueGroup], network: Network) -> None:
        self._groups = groups
        self._network = network
        self._failed = False

    def quorum(self) -> None:
        """Wait for everybody."""
        try:
            self._network.barrier.wait(QUORUM_S)
            apart = len(set(self._network.committed)) > 1
            self._network.barrier.wait(QUORUM_S)  # nobody commits before all have looked
        except threading.BrokenBarrierError:
            raise FleetError("the clusters did not meet") from None
        if apart:
            raise FleetError("the clusters are a step apart")
        if self._failed:
            main, side = self._groups
            main.connect()
            side.stale = True
        self._failed = False

    def commit(self, ok: bool) -> bool:
        """Nobody objects."""
        self._failed = not ok
        self._network.committed[self._groups[0].peers.rank] += ok
        return ok

    def close(self) -> None:
        """Nothing to leave."""


def fabrics(
    size: int, *, timeout_s: float = 10.0, topology: Topology | None = None, key: str = ""
) -> list[Fabric]:
    """Connected fabrics of `size` clusters; with a topology their links are emulated."""
    names = NAMES[:size]
    networks = Network(size), Network(size)
    found = []
    for index in range(size):
        meter = ByteMeter()
        emulator = LinkEmulator(topology, index, key=key) if topology is not None else None
        fabric = Fabric(
            cluster=index,
            names=names,
            lane=Lane(LaneLayout(0, (0,)), 0, None),
            control=None,
            meter=meter,
            emulated=topology is not None,
        )
        groups = [QueueGroup(network, index) for network in networks]
        rail, side = (
            Rail(
                group,
                names=names,
                meter=meter,
                timeout_s=timeout_s,
                eager_bytes=EAGER_BYTES,
                emulator=emulator,
            )
            for group in groups
        )
        fabric.attach(rail, _Member(groups, networks[0]), (emulator,), side)  # type: ignore[arg-type]
        found.append(fabric)
    return found


def together(fabrics_C: list[Fabric], act: Callable[[Fabric], Any]) -> list[Any]:
    """Run `act` on every cluster at once, each in a thread of its own; returns results in order, or raises."""
    results: list[Any] = [None] * len(fabrics_C)
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            results[index] = act(fabrics_C[index])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(fabrics_C))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "the clusters wait for each other"
    return results


def group_of(fabric: Fabric, *, side: bool = False) -> QueueGroup:
    """The queues under a fabric's rail, or under its side rail."""
    rail = fabric._side if side else fabric._rail
    assert rail is not None
    group = rail.group
    assert isinstance(group, QueueGroup)
    return group

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
from moe_fragment.fabric.meter import ByteMeter
from moe_fragment.fabric.rails import Peers, Rail
from moe_fragment.topology import Topology

NAMES = ("ada", "bob", "cyd")
EAGER_BYTES = 1 << 14
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


class QueueGroup:
    """What a rail needs of a process group; `intercept` may change or swallow an outgoing message."""

    def __init__(self, wires: Wires, rank: int, size: int) -> None:
        self.peers = Peers(tuple(range(size)), rank)
        self.generation = 1
        self.intercept: Callable[[torch.Tensor], torch.Tensor | None] = lambda message: message
        self._wires: Wires | None = wires

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
    """A membership that never changes."""

    def quorum(self) -> None:
        """Everybody is here."""

    def commit(self, ok: bool) -> bool:
        """Nobody objects."""
        return ok

    def close(self) -> None:
        """Nothing to leave."""


def fabrics(
    size: int, *, timeout_s: float = 10.0, topology: Topology | None = None, key: str = ""
) -> list[Fabric]:
    """Connected fabrics of `size` clusters; with a topology their links are emulated."""
    names = NAMES[:size]
    wires: Wires = {(a, b, tag): queue.Queue() for a in range(size) for b in range(size) for tag in (0, 1)}
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
        rail = Rail(
            QueueGroup(wires, index, size),
            names=names,
            meter=meter,
            timeout_s=timeout_s,
            eager_bytes=EAGER_BYTES,
            emulator=emulator,
        )
        fabric.attach(rail, _Member(), keep=(emulator,))  # type: ignore[arg-type]
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


def group_of(fabric: Fabric) -> QueueGroup:
    """The queues under a fabric's rail."""
    assert fabric._rail is not None
    group = fabric._rail.group
    assert isinstance(group, QueueGroup)
    return group

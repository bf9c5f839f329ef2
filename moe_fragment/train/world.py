"""Which cluster this process belongs to, and the intra-cluster world it must join.

Two ways to be started by the deepspeed launcher: one launcher per cluster (`--cluster NAME`), then its environment is
the cluster's world already; or one launcher for the whole fleet, then this process's place in the launcher's world says
which cluster it is in, and the environment is rewritten to that cluster's own world before DeepSpeed looks at it.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from moe_fragment.fabric import Coordinator, FleetError
from moe_fragment.topology import Topology

_LEAVE_S = 30.0


class WorldError(ValueError):
    """The launcher's environment does not fit the topology."""


@dataclass
class World:
    """This process's place: cluster name, rank in the cluster, its size, and the coordinator's address.

    Under one launcher also the launcher-wide store, the number of ranks in it, and the coordinator if hosted here.
    """

    cluster: str
    local_rank: int
    size: int
    coordinator: str
    store: dist.TCPStore | None = None
    ranks: int = 0
    hosted: Coordinator | None = None

    def leave(self) -> None:
        """End of a run: whoever hosts the coordinator waits until all the others are done with it."""
        if self.store is None:
            return
        self.store.add("left", 1)
        if self.hosted is not None:
            with contextlib.suppress(dist.DistError):
                deadline = time.monotonic() + _LEAVE_S
                while self.store.add("left", 0) < self.ranks and time.monotonic() < deadline:
                    time.sleep(0.05)
            self.hosted.close()


def find_world(
    topology: Topology,
    *,
    cluster: str | None,
    coordinator: str | None,
    heartbeat_timeout_s: float,
    quorum_timeout_s: float,
    environment: MutableMapping[str, str] = os.environ,
) -> World:
    """Read the launcher's environment; under one launcher for the fleet, rewrite it to this cluster's world.

    Args:
        topology: the fleet.
        cluster: from the command line; None when one launcher runs the fleet.
        coordinator: address from the command line, else the topology's.
        heartbeat_timeout_s, quorum_timeout_s: for a coordinator started here.
        environment: read and changed.

    Raises:
        WorldError: not started by a launcher, a wrong number of ranks, or no coordinator known.
    """
    missing = [
        name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment
    ]
    if missing:
        raise WorldError(
            f"{', '.join(missing)} not set; start this script with the deepspeed launcher or use `moe-fragment launch`"
        )
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    address = coordinator or topology.coordinator
    if cluster is not None:
        index = topology.index(cluster)
        if size != topology.sizes[index]:
            raise WorldError(
                f"cluster {cluster} was started with {size} ranks, the topology gives it {topology.sizes[index]}"
            )
        if address is None:
            raise WorldError(
                f"cluster {cluster} does not know where the coordinator is; give --coordinator host:port or set "
                f"topology.coordinator (start one with `moe-fragment coordinator`)"
            )
        return World(cluster, rank, size, address)
    if size != topology.world_size:
        raise WorldError(
            f"one launcher was started with {size} ranks, the topology has {topology.world_size} "
            f"({' + '.join(map(str, topology.sizes))}); for one cluster of it give --cluster NAME"
        )
    return _split_world(topology, rank, address, heartbeat_timeout_s, quorum_timeout_s, environment)


def _split_world(
    topology: Topology,
    rank: int,
    address: str | None,
    heartbeat_timeout_s: float,
    quorum_timeout_s: float,
    environment: MutableMapping[str, str],
) -> World:
    first = 0
    index = 0
    while rank >= first + topology.sizes[index]:
        first += topology.sizes[index]
        index += 1
    name, local_rank = topology.names[index], rank - first
    hosted = None
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    if rank == 0:
        try:
            hosted = Coordinator(
                len(topology.names),
                host=host,
                port=port,
                heartbeat_timeout_s=heartbeat_timeout_s,
                join_timeout_s=quorum_timeout_s,
            )
        except FleetError as error:
            raise WorldError(
                f"port {port} of {host} is taken, perhaps by another run; give the deepspeed launcher another "
                f"--master_port ({error})"
            ) from None
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=120))
    _check_launcher(store, rank, port)
    if local_rank == 0:
        store.set(f"rendezvous/{name}", f"{_own_address(host)}:{free_port()}")
    master, _, master_port = store.get(f"rendezvous/{name}").decode().rpartition(":")
    environment.update(
        RANK=str(local_rank),
        WORLD_SIZE=str(topology.sizes[index]),
        LOCAL_SIZE=str(min(topology.sizes[index], int(environment.get("LOCAL_SIZE", topology.sizes[index])))),
        MASTER_ADDR=master,
        MASTER_PORT=master_port,
    )
    return World(
        name,
        local_rank,
        topology.sizes[index],
        address or f"{host}:{port}",
        store,
        topology.world_size,
        hosted,
    )


def _check_launcher(store: dist.TCPStore, rank: int, port: int) -> None:
    """Refuse the store of another run: that the port is taken only rank 0 notices, and the others must not join there.

    Ranks of one launcher on one host are children of one process.
    """
    host, launcher = socket.gethostname(), os.getppid()
    if rank == 0:
        store.set("launcher", f"{host} {launcher}")
    try:
        their_host, _, theirs = store.get("launcher").decode().rpartition(" ")
    except dist.DistError:
        their_host, theirs = host, "none"
    if their_host == host and theirs != str(launcher):
        raise WorldError(
            f"port {port} belongs to another run; give the deepspeed launcher another --master_port"
        )


def _own_address(master: str) -> str:
    """How other hosts reach this one: loopback when the launcher's master is, else this host's name."""
    with contextlib.suppress(OSError):
        if socket.gethostbyname(master).startswith("127."):
            return master
    return socket.gethostname()


def release_shared_buffers() -> None:
    """Take away the names of DeepSpeed's shared-memory buffers; collective, right after `init_distributed`.

    Its CPU collectives leave a buffer of 69 MB per rank in /dev/shm for ever. Every rank has mapped all of them by now,
    and without a name they go with the last process, even if that is killed.
    """
    address, port, rank = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"))
    own = Path("/dev/shm") / f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}"
    if own.exists():
        dist.barrier()
        own.unlink(missing_ok=True)


def free_port() -> int:
    """A TCP port that is free now, and likely to be when somebody listens on it.

    It lies below those that Linux gives to outgoing connections, any of which could take it meanwhile, and is drawn at
    random, so that launches in the same instant do not agree on one.

    Raises:
        OSError: none of a hundred was free.
    """
    draw = random.SystemRandom()
    for _ in range(100):
        port = draw.randrange(20_000, 32_768)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise OSError("no free TCP port was found between 20000 and 32767")

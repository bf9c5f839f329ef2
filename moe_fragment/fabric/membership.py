"""Who is in the fleet: torchft's lighthouse, managers on the gateways, and a cross-cluster store.

The coordinator is one small process: a TCP store (where clusters meet and compare what they run) and torchft's
lighthouse (which decides the quorum). Each cluster adds a store of its own, hosted by its first gateway, that torchft
uses to exchange addresses; DeepSpeed's rendezvous is never involved. torchft's healing is not used here: a fleet starts
from equal weights, and a cluster that falls a step behind is told so.

torchft's servers listen on all interfaces without encryption: links between clusters belong inside a VPN.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

os.environ.setdefault("RUST_LOG", "warn")  # torchft's servers write every quorum to standard error otherwise
from torchft.coordination import LighthouseServer
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from moe_fragment.fabric.emulation import table_path
from moe_fragment.fabric.rails import Peers, first_line

logging.getLogger("torchft.manager").setLevel(logging.ERROR)  # it warns about NCCL on every gloo quorum

_POLL_S = 0.2


class FleetError(RuntimeError):
    """The fleet cannot start or go on; the message names the cluster and what to do."""


class Coordinator:
    """Lighthouse and cross-cluster store of one fleet.

    Args:
        clusters: how many clusters must be present for a quorum.
        host: name or address under which the clusters reach this process.
        port: of the store; 0 takes a free one.
        heartbeat_timeout_s: silence after which a cluster leaves the membership.
        join_timeout_s: how long a quorum waits for clusters that are alive but late.

    Raises:
        FleetError: the port is taken.
    """

    def __init__(
        self,
        clusters: int,
        *,
        host: str = "localhost",
        port: int = 0,
        heartbeat_timeout_s: float = 5.0,
        join_timeout_s: float = 60.0,
    ) -> None:
        try:
            socket.getaddrinfo(host, None)
        except OSError as error:
            raise FleetError(
                f"the coordinator's host {host} cannot be resolved: {error.strerror or error}"
            ) from None
        try:
            self.store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
        except (RuntimeError, dist.DistNetworkError) as error:
            raise FleetError(f"the coordinator cannot listen on port {port}: {first_line(error)}") from error
        self._fleet = uuid.uuid4().hex
        self.store.set("fleet", self._fleet)
        self._lighthouse = LighthouseServer(
            bind="[::]:0",
            min_replicas=clusters,
            join_timeout_ms=int(join_timeout_s * 1e3),
            heartbeat_timeout_ms=int(heartbeat_timeout_s * 1e3),
        )
        lighthouse_port = self._lighthouse.address().rsplit(":", 1)[1]
        self.store.set("lighthouse", f"http://{host}:{lighthouse_port}")
        self.address = f"{host}:{self.store.port}"

    def close(self) -> None:
        """Stop the lighthouse; the store ends with the process."""
        self._lighthouse.shutdown()
        table_path(self._fleet).unlink(missing_ok=True)  # left behind by ranks that were killed


def connect_store(address: str, timeout_s: float) -> dist.TCPStore:
    """Client of the coordinator's store at `host:port`.

    Raises:
        FleetError: nobody answers there within `timeout_s`.
    """
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
    except (RuntimeError, dist.DistNetworkError) as error:
        raise FleetError(f"no coordinator answers at {address} within {timeout_s:g} s") from error


def join_fleet(
    store: dist.TCPStore, name: str, names: tuple[str, ...], facts: dict[str, Any], timeout_s: float
) -> None:
    """Wait until every cluster is there, and refuse the fleet when they do not run the same thing.

    Args:
        store: the coordinator's.
        name: this cluster.
        names: all clusters of the topology, in order.
        facts: what must agree, by name (recipe, versions, tokenizer, data), as JSON-able values.
        timeout_s: longest wait.

    Raises:
        FleetError: a cluster did not appear (named), the name is taken, or a fact differs (named, both values).
    """
    if store.add(f"present/{name}", 1) != 1:
        raise FleetError(
            f"cluster {name} has joined this fleet already: another launcher runs it too, or the coordinator is left "
            f"over from an earlier start (it serves one start of one fleet)"
        )
    store.set(f"facts/{name}", json.dumps(facts))
    deadline = time.monotonic() + timeout_s
    missing = list(names)
    while missing:
        missing = [other for other in missing if not store.check([f"facts/{other}"])]
        if missing and time.monotonic() > deadline:
            raise FleetError(
                f"cluster {' and '.join(missing)} did not join within {timeout_s:g} s (fabric.join_timeout); "
                f"{len(names) - len(missing)} of {len(names)} clusters are here"
            )
        if missing:
            time.sleep(_POLL_S)
    for other in names:
        theirs = json.loads(store.get(f"facts/{other}"))
        for fact, mine in facts.items():
            if theirs.get(fact) != mine:
                raise FleetError(
                    f"clusters {name} and {other} differ in {fact}: {mine!r} against {theirs.get(fact)!r}"
                )


class FabricGroup(ProcessGroupGloo):
    """torchft's reconfigurable gloo group that remembers which cluster each of its ranks is.

    Args:
        timeout: for connecting.
        address: name or address of this host that peers connect to; left to itself, gloo would offer whatever the
            machine's name resolves to, often loopback.
        side: make a second set of connections with each configuration, `side_group`.
    """

    def __init__(self, timeout: timedelta, address: str, *, side: bool = False) -> None:
        super().__init__(timeout=timeout)
        self._address = address
        self.side_group = SideGroup(self) if side else None
        self.peers = Peers((0,), 0)
        self.generation = 0
        """Counts the quorums this group was configured for."""

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Called by the manager for each new quorum; `global_ranks` carries the cluster indices."""
        self.drop()
        super().configure(
            store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
        )
        assert global_ranks is not None
        assert group_world_size is not None
        self.generation += 1
        self.peers = Peers(tuple(member // group_world_size for member in global_ranks), rank)

    def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        if self.side_group is not None:
            self.side_group.offer(self._connect(dist.PrefixStore("side", store), rank, world_size))
        return self._connect(store, rank, world_size)

    def refresh(self) -> None:
        """The manager configures it; its connections are always the newest."""

    def _connect(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
        group = dist.ProcessGroup(store, rank, world_size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._timeout
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        where = {"interface": interface} if interface else {"hostname": self._address}
        options._devices = [dist.ProcessGroupGloo.create_device(**where)]
        backend = dist.ProcessGroupGloo(store, rank, world_size, options)
        backend._set_sequence_number_for_group()
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        return group

    def drop(self) -> None:
        """Let go of the connections without aborting, so that peers see them closed at once."""
        self._pg = None


class SideGroup:
    """Connections between the same gateways as `main`'s, configured with them.

    What is under way on them outlives a failed step: connections of a new configuration are taken by `refresh`, at the
    beginning of the next transfer, and the old ones stay until then.
    """

    def __init__(self, main: FabricGroup) -> None:
        self._main = main
        self.generation = 0
        self.connected: dist.ProcessGroup | None = None
        self._offered: dist.ProcessGroup | None = None

    @property
    def peers(self) -> Peers:
        """As the main group's."""
        return self._main.peers

    def offer(self, connected: dist.ProcessGroup) -> None:
        """What `refresh` is to take."""
        self._offered = connected

    def refresh(self) -> None:
        """Take the connections of the newest configuration, if these are not."""
        if self._offered is not None:
            self.connected, self._offered = self._offered, None
            self.generation += 1

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Any:
        """Start sending."""
        return self._group().send(tensors, dst_rank, tag)

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> Any:
        """Start receiving."""
        return self._group().recv(tensors, src_rank, tag)

    def _group(self) -> dist.ProcessGroup:
        if self.connected is None:
            raise RuntimeError("the side rail is not connected")
        return self.connected

    def drop(self) -> None:
        """Let go of these connections; the main group's stay."""
        self.connected = self._offered = None


class Member:
    """One gateway's membership: a torchft manager and the rail's process group.

    Args:
        store: the coordinator's.
        own_store: address of this cluster's own store.
        rail: which rail this gateway is on (torchft's group rank).
        rails: number of rails (torchft's group world size).
        name, index: of the cluster.
        clusters: how many clusters a step needs.
        address: at which other clusters reach this gateway.
        exchange_timeout_s, quorum_timeout_s: see `FabricConfig`.
        side: also connect a side group.
    """

    def __init__(
        self,
        store: dist.TCPStore,
        *,
        own_store: tuple[str, int],
        rail: int,
        rails: int,
        name: str,
        index: int,
        clusters: int,
        address: str,
        exchange_timeout_s: float,
        quorum_timeout_s: float,
        side: bool = False,
    ) -> None:
        self.group = FabricGroup(timedelta(seconds=exchange_timeout_s), address, side=side)
        self.store = store
        self._clusters = clusters
        self._manager = Manager(
            pg=self.group,
            load_state_dict=None,
            state_dict=None,
            min_replica_size=clusters,
            use_async_quorum=False,
            timeout=timedelta(seconds=exchange_timeout_s),
            quorum_timeout=timedelta(seconds=quorum_timeout_s),
            connect_timeout=timedelta(seconds=exchange_timeout_s),
            rank=rail,
            world_size=rails,
            store_addr=own_store[0],
            store_port=own_store[1],
            lighthouse_addr=store.get("lighthouse").decode(),
            replica_id=f"{index:04d}_{name}_{index}",
            hostname=address,
            init_sync=False,
        )

    @property
    def step(self) -> int:
        """Steps this fleet has committed."""
        return self._manager.current_step()

    def resume_at(self, step: int) -> None:
        """Continue a run whose fleet has committed `step` steps."""
        self._manager.load_state_dict({"step": step, "batches_committed": step * self._clusters})

    def quorum(self) -> None:
        """Meet the other clusters at the beginning of a step; (re)configures the rail if membership changed.

        Raises:
            FleetError: the quorum did not come together in time, or the rail could not be connected.
        """
        try:
            self._manager.start_quorum(allow_heal=False)
        except Exception as error:  # torchft raises RuntimeError, TimeoutError and its own
            raise FleetError(
                f"the clusters did not meet for step {self.step}: {first_line(error)}"
            ) from error
        if (trouble := self._manager.errored()) is not None:
            raise FleetError(f"the rail could not be connected for step {self.step}: {first_line(trouble)}")
        if (present := self._manager.num_participants()) < self._clusters:
            raise FleetError(
                f"only {present} of {self._clusters} clusters are at step {self.step} of the fleet; the others are a "
                f"step apart, because one heard the verdict on a step and another did not"
            )

    def commit(self, ok: bool) -> bool:
        """Vote inside the cluster; True when every gateway of it says ok. Counts the step."""
        if not ok:
            self._manager.report_error(RuntimeError("the fleet discards this step"))
        return self._manager.should_commit()

    def close(self) -> None:
        """Leave the fleet."""
        self.group.drop()
        if self.group.side_group is not None:
            self.group.side_group.drop()
        self._manager.shutdown(wait=False)


def reachable_address(configured: str) -> str:
    """Where others reach this host: the cluster's address if it is this host's, else this host's name.

    `GLOO_SOCKET_IFNAME` in the environment overrides it for the rails.
    """
    try:
        with socket.create_server((configured, 0)):
            return configured
    except OSError:
        return socket.gethostname()


def free_store(address: str) -> dist.TCPStore:
    """A cluster's own store on a free port of this host."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)

"""Puts one rank on the fabric: its lane, its gateway's membership, and the first meeting with the other clusters."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from moe_fragment.fabric.config import FabricConfig
from moe_fragment.fabric.emulation import LinkEmulator
from moe_fragment.fabric.fabric import Fabric
from moe_fragment.fabric.lanes import Lane, LaneLayout
from moe_fragment.fabric.membership import (
    FleetError,
    Member,
    connect_store,
    free_store,
    join_fleet,
    reachable_address,
)
from moe_fragment.fabric.meter import ByteMeter
from moe_fragment.fabric.rails import Rail, RailGroup
from moe_fragment.topology import Topology

_LOCAL_S = 1800.0
"""How much longer than for other clusters ranks of one cluster wait for each other."""


def connect(
    topology: Topology,
    config: FabricConfig,
    *,
    cluster: str,
    coordinator: str,
    facts: dict[str, Any],
    side: bool = False,
    stages: int = 1,
) -> Fabric:
    """Join the fleet; collective over the fleet.

    The default `torch.distributed` group must exist and hold exactly the ranks of `cluster`.

    Args:
        topology: the fleet.
        config: time-outs and emulation.
        cluster: name of this rank's cluster.
        coordinator: `host:port` of the coordinator's store.
        facts: what all clusters must agree on, by name; see `join_fleet`.
        side: whether gateways also get a side rail, for trunk syncs that outlast steps.
        stages: of the pipeline in every cluster, whose ranks are numbered stage by stage; 1 for none.

    Raises:
        FleetError: the coordinator does not answer, a cluster does not appear, or clusters disagree.
        ValueError: the default group has another size than the topology says, or ranks or rails cannot be divided among
            the stages.
    """
    index = topology.index(cluster)
    size, rank = dist.get_world_size(), dist.get_rank()
    if size != topology.sizes[index]:
        raise ValueError(
            f"cluster {cluster} runs {size} ranks, but the topology gives it {topology.sizes[index]}"
        )
    rails = topology.num_rails
    if size % stages or rails % stages:
        raise ValueError(f"{size} ranks and {rails} rails cannot be divided among {stages} stages")
    patience = timedelta(seconds=config.join_timeout_s + _LOCAL_S)
    layout = LaneLayout.of(rank, size, rails, stages)
    lanes = LaneLayout.all(size, rails, stages)
    lane_groups = [
        dist.new_group(list(lane.members), timeout=patience, backend="gloo") if size > rails else None
        for lane in lanes
    ]
    lane = Lane(layout, rank, lane_groups[layout.rail] if len(layout.members) > 1 else None)
    control = dist.new_group(list(range(size)), timeout=patience, backend="gloo") if size > 1 else None

    fabric = Fabric(
        cluster=index,
        names=topology.names,
        lane=lane,
        control=control,
        meter=ByteMeter(),
        join_timeout_s=config.join_timeout_s,
        emulated=config.emulate,
        near=_by_distance(topology, cluster),
        gateways=tuple(lane.gateway for lane in lanes),
        stage=rank // (size // stages) if stages > 1 else None,
    )
    fabric.everyone(_join, fabric, topology, config, cluster, coordinator, facts, side)
    return fabric


def _by_distance(topology: Topology, cluster: str) -> tuple[int, ...]:
    """Indices of all clusters by latency there and back, the cluster itself first."""

    def round_trip_s(other: int) -> float:
        name = topology.names[other]
        if name == cluster:
            return -1.0
        return topology.link(cluster, name).one_way_s + topology.link(name, cluster).one_way_s

    return tuple(sorted(range(len(topology.names)), key=round_trip_s))


def _join(
    fabric: Fabric,
    topology: Topology,
    config: FabricConfig,
    cluster: str,
    coordinator: str,
    facts: dict[str, Any],
    side: bool,
) -> None:
    if not fabric.lane.is_gateway:
        fabric.share_address(None)
        return
    index = topology.index(cluster)
    address = reachable_address(topology.clusters[index].address)
    own_store = None
    error: Exception | None = None
    try:
        store = connect_store(coordinator, config.exchange_timeout_s)
        if dist.get_rank() == 0:
            join_fleet(store, cluster, topology.names, facts, config.join_timeout_s)
            own_store = free_store(address)
    except Exception as caught:
        error = caught
    shared = fabric.share_address((address, own_store.port) if own_store is not None else None)
    if error is not None:
        raise error
    if shared is None:
        raise FleetError("the first gateway of this cluster could not join the fleet")
    member = Member(
        store,
        own_store=shared,
        rail=fabric.lane.layout.rail,
        rails=topology.num_rails,
        name=cluster,
        index=index,
        clusters=len(topology.names),
        address=address,
        exchange_timeout_s=config.exchange_timeout_s,
        quorum_timeout_s=config.quorum_timeout_s,
        side=side,
    )
    emulators: list[LinkEmulator | None] = [None, None]
    if config.emulate:
        key = store.get("fleet").decode()
        emulators = [LinkEmulator(topology, index, key=key, seed=config.seed, side=at > 0) for at in (0, 1)]
    groups: list[RailGroup] = [member.group]
    if member.group.side_group is not None:
        groups.append(member.group.side_group)
    rails = [
        Rail(
            group,
            names=topology.names,
            meter=fabric.meter,
            timeout_s=timeout_s,
            eager_bytes=config.eager_bytes,
            emulator=emulator,
        )
        # What is to outlast steps may take as long as a start may: a dead peer closes its connections at once.
        for group, emulator, timeout_s in zip(
            groups, emulators, (config.exchange_timeout_s, config.join_timeout_s), strict=False
        )
    ]
    fabric.attach(rails[0], member, keep=(store, own_store, *emulators), side=rails[1] if side else None)

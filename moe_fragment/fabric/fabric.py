"""The cross-cluster fabric of one rank: routes for tokens, collectives for whole vectors, and the fleet's verdict.

All transfers run on one background thread in the order they were submitted, over host memory: tokens fly while the
caller computes, and `Transfer.wait()` says how long that was hidden and how long it was not. Intra-cluster work that
belongs to a transfer (lanes) uses groups of its own, never DeepSpeed's. A trunk sync that is to outlast steps has
connections and a thread of its own (the side rail), so that tokens never queue behind it.

A failed exchange raises nowhere: `healthy` turns false, later exchanges of the step return no rows or zeros, and
`verdict()` tells every rank of every cluster that the step is to be discarded.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_fragment.fabric.collectives import all_reduce
from moe_fragment.fabric.emulation import LinkEmulator
from moe_fragment.fabric.lanes import Lane
from moe_fragment.fabric.mail import Mailbox
from moe_fragment.fabric.membership import FleetError, Member
from moe_fragment.fabric.meter import ByteMeter
from moe_fragment.fabric.rails import ExchangeError, Rail, first_line
from moe_fragment.fabric.routes import Route, RouteTable
from moe_fragment.fabric.transfer import Transfer, WaitClock
from moe_fragment.fabric.verdict import FAILED, Verdict

log = logging.getLogger(__name__)
T = TypeVar("T")


class Fabric:
    """Cross-cluster communication of one rank.

    Args:
        cluster: index of this rank's cluster.
        names: of all clusters, in order.
        lane: this rank's lane.
        control: host-memory group of all ranks of this cluster, or None for a cluster of one rank.
        meter: byte counters (counted on gateways).
        join_timeout_s: longest wait for another cluster outside steps.
        emulated: whether links are emulated; goes into the run log.
        near: indices of all clusters, nearest first; default by index.
        gateways: local rank of each rail's gateway, by rail; default the first rank alone.
        stage: of the cluster's pipeline that this rank runs; None without one.
    """

    def __init__(
        self,
        *,
        cluster: int,
        names: tuple[str, ...],
        lane: Lane,
        control: dist.ProcessGroup | None,
        meter: ByteMeter,
        join_timeout_s: float = 600.0,
        emulated: bool = False,
        near: tuple[int, ...] = (),
        gateways: tuple[int, ...] = (0,),
        stage: int | None = None,
    ) -> None:
        self.cluster = cluster
        self.names = names
        self.near = near or tuple(range(len(names)))
        self.lane = lane
        self.gateways = gateways
        self.stage = stage
        self.emulated = emulated
        self._join_timeout = timedelta(seconds=join_timeout_s)
        self.control = control
        self.meter = meter
        self.clock = WaitClock()
        self.failure: ExchangeError | None = None
        self._rail: Rail | None = None
        self._side: Rail | None = None
        self._member: Member | None = None
        self._keep: tuple[Any, ...] = ()
        self._routes = RouteTable(
            lane, len(names), on_failure=self._fail, healthy=lambda: self.failure is None
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fabric")
        self._side_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="side")

    def attach(
        self, rail: Rail, member: Member, keep: tuple[Any, ...] = (), side: Rail | None = None
    ) -> None:
        """Make this rank a gateway; `keep` holds what must live as long (stores, the link table)."""
        self._rail, self._side, self._member, self._keep = rail, side, member, keep
        self._routes.rail = rail

    @property
    def clusters(self) -> int:
        """Number of clusters in the fleet."""
        return len(self.names)

    @property
    def is_gateway(self) -> bool:
        """Whether this rank is on a rail itself."""
        return self._rail is not None

    @property
    def local_rank(self) -> int:
        """This rank's place in its cluster."""
        return dist.get_rank(self.control) if self.control is not None else 0

    @property
    def local_ranks(self) -> int:
        """How many ranks this cluster has."""
        return dist.get_world_size(self.control) if self.control is not None else 1

    # -- steps -------------------------------------------------------------------------------------------------

    def resume_at(self, step: int) -> None:
        """Tell torchft that the fleet has committed `step` steps."""
        if self._member is not None:
            self._member.resume_at(step)

    def begin_step(self, step: int) -> None:
        """Meet the other clusters for fleet step `step`; collective over the fleet.

        Raises:
            FleetError: a cluster is missing or the fleet is at another step.
        """
        self.failure = None
        started = time.monotonic()
        self.everyone(self._meet)
        self.clock.exposed_s += time.monotonic() - started
        if self._rail is not None:
            assert self._member is not None
            try:
                self._rail.begin_step(step)
            except Exception as error:  # a peer that died since the quorum: the step fails like any other
                self._fail(ExchangeError(f"the rail of step {step} broke: {first_line(error)}"))

    def _meet(self) -> None:
        if self._member is not None:
            self._member.quorum()
            assert self._rail is not None
            time.sleep(self._rail.emulated_round_trip_s)

    def everyone(self, act: Callable[..., None], *arguments: Any) -> None:
        """Run `act` on this rank; when it raises on one rank of the cluster, all of them raise."""
        error: Exception | None = None
        try:
            act(*arguments)
        except Exception as caught:
            error = caught
        heard = next(filter(None, self.cluster_gather(str(error) if error else None)), None)
        if error is None and heard:
            raise FleetError(heard)
        if error is not None:
            raise error

    def verdict(self, outcome: int, values: list[float]) -> Verdict:
        """Tell everybody how the step went here, and learn how it went elsewhere; collective over the fleet.

        Every rail carries the vector, so that each gateway proves that its rail still works.

        Args:
            outcome: of this rank; the worst of the cluster is sent.
            values: this cluster's numbers (the same on all its ranks), exchanged bit for bit.
        """
        mine = self.cluster_min(outcome if self.failure is None else FAILED)
        heard = self._submit(self._exchange_verdict, mine, values).wait()
        worst = self.cluster_min(FAILED if heard is None else min(int(row[0]) for row in heard))
        rows = heard if heard is not None else [[0.0] * (1 + len(values))] * self.clusters
        if self.control is not None:
            rows = self._broadcast(rows)
        return Verdict(worst, [row[1:] for row in rows])

    def _exchange_verdict(self, outcome: int, values: list[float]) -> list[list[float]] | None:
        row = torch.tensor([float(outcome), *values], dtype=torch.float64)
        if self._rail is None:
            return [row.tolist()] * self.clusters
        if self.failure is not None:
            return None
        data = row.view(torch.uint8)
        try:
            heard = self._rail.exchange(
                "verdict", [data] * self.clusters, "control", [data.numel()] * self.clusters
            )
        except ExchangeError as error:
            self._fail(error)
            return None
        heard[self.cluster] = data
        return [
            part.clone().view(torch.float64).tolist()
            if part.numel()
            else [float(FAILED), *[0.0] * len(values)]
            for part in heard
        ]

    def cause(self) -> str | None:
        """What failed since `begin_step` on the first rank of this cluster where something did; collective over it."""
        found = self.cluster_gather(str(self.failure) if self.failure is not None else None)
        return next(filter(None, found), None)

    def commit(self, ok: bool) -> bool:
        """Close the step with torchft's vote inside the cluster; True when all its gateways agree on ok."""
        agreed = self._member.commit(ok) if self._member is not None else ok
        return bool(self.cluster_min(int(agreed)))

    def _fail(self, error: ExchangeError) -> None:
        # The traceback's frames would keep the failed transfers, and with them the connections, alive.
        self.failure = error.with_traceback(None)
        error.__cause__ = error.__context__ = None
        log.warning("%s", error)
        if self._rail is not None:
            self._rail.drop()

    # -- tokens ------------------------------------------------------------------------------------------------

    def open_route(
        self, rows: torch.Tensor, sent_C: list[int], channel: str = "dispatch", where: str = ""
    ) -> Transfer[tuple[Route, torch.Tensor]]:
        """Start sending `rows` (uint8 [sum(sent_C), b], host memory, grouped by destination cluster).

        `where` is what an error names, besides the stage of a pipeline.
        """
        if self.stage is not None:
            where = f"stage {self.stage}, {where}"
        return self._submit(self._routes.open, rows, sent_C, channel, where)

    def forward(self, route: Route, rows: torch.Tensor, channel: str) -> Transfer[torch.Tensor]:
        """Start sending new rows along `route`: uint8 [route.sent, b] in, uint8 [route.arrived, b] out."""
        return self._submit(self._routes.forward, route, rows, channel)

    def reverse(self, route: Route, rows: torch.Tensor, channel: str) -> Transfer[torch.Tensor]:
        """Start answering along `route`: uint8 [route.arrived, b] in, uint8 [route.sent, b] out."""
        return self._submit(self._routes.reverse, route, rows, channel)

    # -- whole vectors -----------------------------------------------------------------------------------------

    @property
    def everybody(self) -> tuple[int, ...]:
        """Indices of all clusters."""
        return tuple(range(self.clusters))

    def collective(
        self, act: Callable[..., T], *arguments: Any, side_step: int | None = None
    ) -> Transfer[tuple[bool, T | None]]:
        """Start `act(rail, cluster, clusters, *arguments)`, one of `fabric.collectives`; gateways only.

        Args:
            act: communicates over the rail it is given.
            arguments: what it takes.
            side_step: run it on the side rail, where it may outlast steps, as of this fleet step; after a `begin_step`.

        Returns:
            whether it went well, and its result. A failure on the rail fails the step, one on the side rail nothing.
        """
        if side_step is not None:
            return self._submit(self._side_collective, act, arguments, side_step, thread=self._side_thread)
        return self._submit(self._collective, act, arguments)

    def _collective(self, act: Callable[..., T], arguments: tuple[Any, ...]) -> tuple[bool, T | None]:
        assert self._rail is not None, "only gateways communicate over a rail"
        if self.failure is not None:
            return False, None
        try:
            return True, act(self._rail, self.cluster, self.clusters, *arguments)
        except ExchangeError as error:
            self._fail(error)
            return False, None

    def _side_collective(
        self, act: Callable[..., T], arguments: tuple[Any, ...], step: int
    ) -> tuple[bool, T | None]:
        """On the side rail's thread, so that a transfer begins when the one before it is through."""
        assert self._side is not None, "the fabric was connected without a side rail"
        try:
            self._side.begin_step(step)
            return True, act(self._side, self.cluster, self.clusters, *arguments)
        except (
            Exception
        ) as error:  # besides ExchangeError, whatever a group says whose peer died since the quorum
            log.warning("a transfer of step %s on the side rail failed: %s", step, first_line(error))
            self._side.drop()
            return False, None

    def mailbox(self) -> Mailbox:
        """Messages over the side rail's connections, after a `begin_step`; gateways only, and instead of
        `begin_side`."""
        assert self._side is not None, "the fabric was connected without a side rail"
        side = self._side
        side.group.refresh()
        return Mailbox(side.group, names=self.names, meter=self.meter, emulator=side.emulator)

    def fleet_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a small host tensor over all ranks of the fleet, over the first rail; collective over the fleet.

        The result is the same to the bit everywhere. After a failure it is undefined and the step is discarded.
        """
        self.cluster_sum(values)
        if self._rail is not None and self.lane.layout.rail == 0:
            flat = values.reshape(-1)
            self.collective(all_reduce, flat, "control", self.everybody).wait()
            values = flat.view(values.shape)
        if self.control is not None:
            dist.broadcast(values, src=0, group=self.control)
        return values

    # -- inside the cluster ------------------------------------------------------------------------------------

    def cluster_gather(self, value: Any) -> list[Any]:
        """One picklable value per rank of this cluster, in rank order."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.local_ranks
        dist.all_gather_object(values, value, group=self.control)
        return values

    def cluster_min(self, value: int) -> int:
        """Smallest `value` over the ranks of this cluster."""
        if self.control is None:
            return value
        data = torch.tensor([value], dtype=torch.int64)
        started = time.monotonic()
        dist.all_reduce(data, op=dist.ReduceOp.MIN, group=self.control)
        self.clock.local_s += time.monotonic() - started
        return int(data)

    def cluster_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a host tensor over the ranks of this cluster, in place."""
        if self.control is not None:
            started = time.monotonic()
            dist.all_reduce(values, group=self.control)
            self.clock.local_s += time.monotonic() - started
        return values

    def gather(self, key: str, value: Any) -> list[Any]:
        """One JSON-able value per cluster, in order, through the coordinator's store; collective over the fleet.

        Args:
            key: a name that is used once.
            value: of this cluster, as its first rank has it.

        Raises:
            FleetError: a cluster did not answer within the join time-out.
        """
        heard: list[Any] = []
        self.everyone(self._gather, key, value, heard)
        return self._broadcast(heard) if self.control is not None else heard

    def _gather(self, key: str, value: Any, heard: list[Any]) -> None:
        if self._member is None or self.lane.layout.rail:
            return
        store = self._member.store
        store.set(f"{key}/{self.cluster}", json.dumps(value))
        for index, name in enumerate(self.names):
            try:
                store.wait([f"{key}/{index}"], self._join_timeout)
            except dist.DistStoreError:
                raise FleetError(
                    f"cluster {name} did not say its {key} within {self._join_timeout.total_seconds():g} s "
                    f"(fabric.join_timeout)"
                ) from None
            heard.append(json.loads(store.get(f"{key}/{index}")))

    def share_address(self, address: tuple[str, int] | None) -> tuple[str, int] | None:
        """The first gateway's (host, port), on every rank of this cluster."""
        return self._broadcast(address) if self.control is not None else address

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def _submit(
        self, act: Callable[..., T], *arguments: Any, thread: ThreadPoolExecutor | None = None
    ) -> Transfer[T]:
        def timed() -> tuple[T, float]:
            started = time.monotonic()
            result = act(*arguments)
            return result, time.monotonic() - started

        return Transfer((thread or self._thread).submit(timed), self.clock)

    def close(self) -> None:
        """Finish what is under way and leave the fleet."""
        self._thread.shutdown(wait=True)
        self._side_thread.shutdown(wait=True)
        if self._member is not None:
            self._member.close()
        for held in self._keep:
            if isinstance(held, LinkEmulator):
                held.close()

"""Routes: the way a batch of rows took to the other clusters, kept so that answers and gradients go the same way.

Dispatch opens a route and sends rows along it, combine comes back along it; in backward, the gradient of combine goes
forward and the gradient of dispatch comes back. How many rows arrive follows from the size of the first message.

How it does not deadlock: the steps of a transfer are (1) lane members tell each other their counts, (2) rows are
gathered at the gateway, (3) gateways exchange rows, (4) the gateway tells its lane what arrived, (5) rows are
scattered. Steps 1, 2, 4 and 5 happen on every member whatever became of 3: a failed exchange is "no rows arrived"
(forward) or zeros (reverse), never an exception half-way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from moe_fragment.fabric.lanes import Lane
from moe_fragment.fabric.rails import ExchangeError, Rail


@dataclass
class Route:
    """Row counts of one opened way; `sent_C` and `arrived_C` are this rank's own."""

    sent_C: list[int]
    arrived_C: list[int] = field(default_factory=list)
    lane_sent_LC: list[list[int]] = field(default_factory=list)
    gateway_arrived_C: list[int] = field(default_factory=list)
    failed: bool = False
    where: str = ""
    """What it is about, for errors."""

    @property
    def sent(self) -> int:
        """Rows this rank sends along the route."""
        return sum(self.sent_C)

    @property
    def arrived(self) -> int:
        """Rows that arrive at this rank."""
        return sum(self.arrived_C)

    def located(self, error: ExchangeError) -> ExchangeError:
        """An error with the word on where it happened."""
        return ExchangeError(f"{self.where}: {error}") if self.where else error


class RouteTable:
    """Moves rows along routes for one rank: its lane always, its rail if it is a gateway.

    Args:
        lane: the ranks that share this rank's gateway.
        clusters: number of clusters in the fleet.
        on_failure: told about a failed exchange; `healthy()` then stays false until the next step.
    """

    def __init__(
        self,
        lane: Lane,
        clusters: int,
        *,
        on_failure: Callable[[ExchangeError], None],
        healthy: Callable[[], bool],
    ) -> None:
        self.rail: Rail | None = None
        """Set on gateways."""
        self._lane = lane
        self._clusters = clusters
        self._on_failure = on_failure
        self._healthy = healthy

    def open(
        self, rows: torch.Tensor, sent_C: list[int], channel: str, where: str = ""
    ) -> tuple[Route, torch.Tensor]:
        """Open a route with `rows` (uint8 [sum(sent_C), b], grouped by destination cluster) and send them along it.

        `where` is named by errors of the route.

        Returns:
            the route and the rows that arrived, uint8 [route.arrived, b], grouped by source cluster.
        """
        route = Route(sent_C, lane_sent_LC=self._lane.all_gather(sent_C), where=where)
        return route, self._forward(route, rows, channel, opening=True)

    def forward(self, route: Route, rows: torch.Tensor, channel: str) -> torch.Tensor:
        """Send new rows along an opened route: uint8 [route.sent, b] in, uint8 [route.arrived, b] out."""
        return self._forward(route, rows, channel, opening=False)

    def _forward(self, route: Route, rows: torch.Tensor, channel: str, *, opening: bool) -> torch.Tensor:
        row_bytes = rows.shape[1]
        members = self._lane.gather(rows, [sum(counts) for counts in route.lane_sent_LC])
        arrived: list[torch.Tensor] | None = None
        if self.rail is not None:
            arrived = self._rail_forward(route, members, row_bytes, channel, opening=opening)
        if opening:
            self._announce(route, ok=arrived is not None)
        parts: list[torch.Tensor] = []
        if self._lane.is_gateway:
            total = sum(route.gateway_arrived_C)
            if arrived is None:
                everything = torch.zeros((total, row_bytes), dtype=torch.uint8)
            else:
                everything = join([part.view(-1, row_bytes) for part in arrived])
            bounds = [self._lane.share(total, position) for position in range(self._lane.size)]
            parts = [everything[low:high] for low, high in bounds]
        return self._lane.scatter(parts, route.arrived, row_bytes)

    def _rail_forward(
        self, route: Route, members: list[torch.Tensor], row_bytes: int, channel: str, *, opening: bool
    ) -> list[torch.Tensor] | None:
        assert self.rail is not None
        send_C = group_by_cluster(members, route.lane_sent_LC, self._clusters)
        if route.failed or not self._healthy():
            return None
        try:
            expect_C = None if opening else [count * row_bytes for count in route.gateway_arrived_C]
            arrived_C = self.rail.exchange("dispatch", send_C, channel, expect_C)
            if any(part.numel() % row_bytes for part in arrived_C):
                sizes = [part.numel() for part in arrived_C]
                raise ExchangeError(
                    f"clusters sent {sizes} bytes, which are no rows of {row_bytes} bytes each"
                )
        except ExchangeError as error:
            self._on_failure(route.located(error))
            return None
        if opening:
            route.gateway_arrived_C = [part.numel() // row_bytes for part in arrived_C]
        return arrived_C

    def _announce(self, route: Route, *, ok: bool) -> None:
        """Tell the lane what arrived at its gateway, and cut each member's share out of it."""
        if self._lane.is_gateway and not ok:
            route.gateway_arrived_C = [0] * self._clusters
        report = [int(ok), *route.gateway_arrived_C] if self._lane.is_gateway else None
        ok_flag, *totals_C = self._lane.broadcast(report, 1 + self._clusters)
        route.failed = not ok_flag
        low, high = self._lane.share(sum(totals_C))
        route.arrived_C = []
        start = 0
        for total in totals_C:
            route.arrived_C.append(max(0, min(high, start + total) - max(low, start)))
            start += total

    def reverse(self, route: Route, rows: torch.Tensor, channel: str) -> torch.Tensor:
        """Answer along a route: uint8 [route.arrived, b] in, uint8 [route.sent, b] out, in the order they were sent.

        A failed exchange answers with zeros.
        """
        row_bytes = rows.shape[1]
        shares = [
            self._lane.share(sum(route.gateway_arrived_C), position) for position in range(self._lane.size)
        ]
        members = self._lane.gather(rows, [high - low for low, high in shares])
        parts: list[torch.Tensor] = []
        if self.rail is not None:
            parts = self._rail_reverse(route, members, row_bytes, channel)
        return self._lane.scatter(parts, route.sent, row_bytes)

    def _rail_reverse(
        self, route: Route, members: list[torch.Tensor], row_bytes: int, channel: str
    ) -> list[torch.Tensor]:
        assert self.rail is not None
        totals = [sum(column) for column in zip(*route.lane_sent_LC, strict=True)]
        answers: list[torch.Tensor] | None = None
        if not route.failed and self._healthy():
            everything = join(members)
            send_C = list(torch.split(everything, route.gateway_arrived_C))
            try:
                answers = self.rail.exchange(
                    "combine",
                    [part.reshape(-1) for part in send_C],
                    channel,
                    [total * row_bytes for total in totals],
                )
            except ExchangeError as error:
                self._on_failure(route.located(error))
        if answers is None:
            return [torch.zeros((sum(counts), row_bytes), dtype=torch.uint8) for counts in route.lane_sent_LC]
        return split_by_member(answers, route.lane_sent_LC, row_bytes)


def join(parts: list[torch.Tensor]) -> torch.Tensor:
    """Parts end to end; the part itself when it is the only one with anything in it."""
    filled = [part for part in parts if part.numel()]
    return filled[0] if len(filled) == 1 else torch.cat(parts)


def group_by_cluster(
    members: list[torch.Tensor], counts_LC: list[list[int]], clusters: int
) -> list[torch.Tensor]:
    """Members' rows (each grouped by cluster) as one flat uint8 buffer per cluster, members in order."""
    split = [torch.split(rows, counts) for rows, counts in zip(members, counts_LC, strict=True)]
    return [join([pieces[cluster] for pieces in split]).reshape(-1) for cluster in range(clusters)]


def split_by_member(
    answers_C: list[torch.Tensor], counts_LC: list[list[int]], row_bytes: int
) -> list[torch.Tensor]:
    """Inverse of `group_by_cluster`: per member uint8 [n, row_bytes] in the order it sent its rows."""
    per_cluster = [
        torch.split(answer.view(-1, row_bytes), [counts[cluster] for counts in counts_LC])
        for cluster, answer in enumerate(answers_C)
    ]
    return [join([pieces[member] for pieces in per_cluster]) for member in range(len(counts_LC))]

"""A lane: the ranks of one cluster that use the same gateway, over the cluster's fast local network.

With R rails, local rank r belongs to the lane of gateway r mod R. If a cluster runs a pipeline, its ranks are numbered
stage by stage, each stage has the same number of rails of its own, and the rule holds within it: tokens meet those of
the same layers. A lane of one rank (every rank its own gateway) moves nothing. All methods are collective over the lane
and issued in the same order by all its ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class LaneLayout:
    """Which lane a rank is on: `members` are local ranks, the first is the gateway."""

    rail: int
    members: tuple[int, ...]

    @staticmethod
    def of(local_rank: int, cluster_size: int, rails: int, stages: int = 1) -> LaneLayout:
        """The lane of `local_rank` in a cluster of `cluster_size` ranks, `rails` gateways and `stages`."""
        width, own_rails = cluster_size // stages, rails // stages
        stage, place = divmod(local_rank, width)
        first, end = stage * width + place % own_rails, (stage + 1) * width
        return LaneLayout(stage * own_rails + place % own_rails, tuple(range(first, end, own_rails)))

    @staticmethod
    def all(cluster_size: int, rails: int, stages: int = 1) -> tuple[LaneLayout, ...]:
        """The lanes of a cluster, by rail."""
        found = {
            lane.rail: lane
            for lane in (LaneLayout.of(rank, cluster_size, rails, stages) for rank in range(cluster_size))
        }
        return tuple(found[rail] for rail in range(rails))

    @property
    def gateway(self) -> int:
        """Local rank of the lane's gateway."""
        return self.members[0]


class Lane:
    """Row matrices (uint8 [n, b]) between a gateway and the other ranks of its lane.

    Args:
        layout: who is on the lane.
        local_rank: of this process, within its cluster (equals its rank in the default group).
        group: host-memory (gloo) group of the lane's members, None for a lane of one.
    """

    def __init__(self, layout: LaneLayout, local_rank: int, group: dist.ProcessGroup | None) -> None:
        self.layout = layout
        self.size = len(layout.members)
        self.position = layout.members.index(local_rank)
        self.is_gateway = self.position == 0
        self._group = group

    def share(self, total: int, position: int | None = None) -> tuple[int, int]:
        """Rows [low, high) of `total` arriving rows that the member at `position` computes: an even split."""
        position = self.position if position is None else position
        return total * position // self.size, total * (position + 1) // self.size

    def all_gather(self, values: list[int]) -> list[list[int]]:
        """Every member's `values` (all of one length), in member order."""
        if self.size == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.int64)
        gathered = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(gathered, mine, group=self._group)
        return [row.tolist() for row in gathered]

    def broadcast(self, values: list[int] | None, length: int) -> list[int]:
        """The gateway's `values`, on every member."""
        if self.size == 1:
            assert values is not None
            return values
        data = torch.tensor(values if self.is_gateway else [0] * length, dtype=torch.int64)
        dist.broadcast(data, src=self.layout.members[0], group=self._group)
        return data.tolist()

    def gather(self, rows: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
        """Collect every member's rows at the gateway.

        Args:
            rows: uint8 [n, b] of this member.
            counts: number of rows of each member, known to all.

        Returns:
            at the gateway, one uint8 [counts[i], b] per member; elsewhere an empty list.
        """
        if self.size == 1:
            return [rows]
        if not self.is_gateway:
            if rows.numel():
                dist.send(rows.contiguous(), dst=self.layout.members[0], group=self._group)
            return []
        parts = [rows] + [rows.new_empty((count, rows.shape[1])) for count in counts[1:]]
        works = [
            dist.irecv(part, src=member, group=self._group)
            for part, member in zip(parts[1:], self.layout.members[1:], strict=True)
            if part.numel()
        ]
        for work in works:
            assert work is not None
            work.wait()
        return parts

    def scatter(self, parts: list[torch.Tensor], count: int, row_bytes: int) -> torch.Tensor:
        """Hand part i to member i; returns this member's uint8 [count, row_bytes]."""
        if self.size == 1:
            return parts[0]
        if not self.is_gateway:
            mine = torch.empty((count, row_bytes), dtype=torch.uint8)
            if mine.numel():
                dist.recv(mine, src=self.layout.members[0], group=self._group)
            return mine
        for part, member in zip(parts[1:], self.layout.members[1:], strict=True):
            if part.numel():
                dist.send(part.contiguous(), dst=member, group=self._group)
        return parts[0]

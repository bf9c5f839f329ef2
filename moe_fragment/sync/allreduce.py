"""The exact trunk sync: hierarchical all-reduce of gradients, every step.

DeepSpeed has already reduced the gradient inside each cluster and left every rank with the runs it owns. The canonical
vector is cut into one interval per rail; ranks hand their runs to the gateways, each gateway sums its interval with the
other clusters over its rail, and the sums go back. Per cluster 2 (C - 1) / C of the vector crosses each way, whatever
the number of ranks (hierarchical all-reduce).

How it does not deadlock: inside a cluster every rank sends to the gateways in rail order and gateways receive in rank
order, with all receives posted before any send is waited for; gateways then reduce, whatever became of it, and send
back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_fragment.fabric import Fabric
from moe_fragment.sync.canonical import Run, interval, merge


@dataclass(frozen=True)
class _Slice:
    """A piece of a run that falls into one rail's interval: where in the flat buffer, where in the interval."""

    flat: int
    position: int
    offset: int
    size: int


def _slices(runs: Sequence[Run], low: int, high: int) -> list[_Slice]:
    found = []
    for run in runs:
        start, end = max(run.start, low), min(run.start + run.size, high)
        if start < end:
            found.append(_Slice(run.flat, run.position + start - run.start, start - low, end - start))
    return found


class TrunkAllReduce:
    """Sums a canonical vector over all clusters; collective over the fleet.

    Args:
        fabric: of this rank.
        runs: which ranges of the vector this rank owns; over the ranks of a cluster they cover it exactly once.
        total: elements of the vector.
        rails: number of rails.
        local_rank, local_ranks: this rank and its cluster's size.
        group: host-memory group of the cluster's ranks, None for one rank.
        dtype: of the flat buffers and on the wire.

    Raises:
        ValueError: the runs of the cluster leave a gap or overlap.
    """

    def __init__(
        self,
        fabric: Fabric,
        runs: Sequence[Run],
        *,
        total: int,
        rails: int,
        local_rank: int,
        local_ranks: int,
        group: dist.ProcessGroup | None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._fabric = fabric
        self._dtype = dtype
        self._rank = local_rank
        self._group = group
        mine = merge(runs)
        layouts: list[list[Run]] = [mine]
        if group is not None:
            layouts = [[] for _ in range(local_ranks)]
            dist.all_gather_object(layouts, mine, group=group)
        _check_cover([run for layout in layouts for run in layout], total)
        self._send = [_slices(mine, *interval(total, rail, rails)) for rail in range(rails)]
        self._receive: list[list[_Slice]] = []
        self._buffer = self._empty(0)
        if fabric.is_gateway:
            low, high = interval(total, local_rank, rails)
            self._receive = [_slices(layout, low, high) for layout in layouts]
            self._buffer = self._empty(high - low)

    def reduce(self, flats: Sequence[torch.Tensor]) -> float:
        """Sum this rank's runs over the clusters, in place.

        Args:
            flats: 1-D buffers the runs point into, any device.

        Returns:
            the squared L2 norm of the summed interval on gateways (in fp64, the same on every cluster), else 0.
        """
        self._collect(flats)
        squared = 0.0
        if self._fabric.is_gateway:
            self._fabric.all_reduce(self._buffer).wait()
            squared = float(self._buffer.double().square().sum())
        self._distribute(flats)
        return squared

    def _collect(self, flats: Sequence[torch.Tensor]) -> None:
        packed = [self._pack(flats, slices) for slices in self._send]
        arrived = self._local_exchange(packed, [_length(slices) for slices in self._receive])
        for slices, data in zip(self._receive, arrived, strict=True):
            start = 0
            for piece in slices:
                self._buffer[piece.offset : piece.offset + piece.size] = data[start : start + piece.size]
                start += piece.size

    def _distribute(self, flats: Sequence[torch.Tensor]) -> None:
        packed = [
            torch.cat([self._buffer[piece.offset : piece.offset + piece.size] for piece in slices])
            if slices
            else self._empty(0)
            for slices in self._receive
        ]
        arrived = self._local_exchange(packed, [_length(slices) for slices in self._send])
        for slices, data in zip(self._send, arrived, strict=True):
            start = 0
            for piece in slices:
                flats[piece.flat][piece.position : piece.position + piece.size] = data[
                    start : start + piece.size
                ]
                start += piece.size

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype)

    def _pack(self, flats: Sequence[torch.Tensor], slices: list[_Slice]) -> torch.Tensor:
        if not slices:
            return self._empty(0)
        return torch.cat(
            [flats[piece.flat][piece.position : piece.position + piece.size] for piece in slices]
        ).cpu()

    def _local_exchange(self, send: list[torch.Tensor], expect: list[int]) -> list[torch.Tensor]:
        """Send tensor i to local rank i, receive `expect[i]` elements from local rank i."""
        started = time.monotonic()
        arrived = [self._empty(size) for size in expect]
        works = []
        for peer, data in enumerate(arrived):
            if peer == self._rank:
                arrived[peer] = send[peer]
            elif data.numel():
                works.append(dist.irecv(data, src=peer, group=self._group))
        for peer, data in enumerate(send):
            if peer != self._rank and data.numel():
                works.append(dist.isend(data, dst=peer, group=self._group))
        for work in works:
            assert work is not None
            work.wait()
        self._fabric.clock.local_s += time.monotonic() - started
        return arrived


def _length(slices: list[_Slice]) -> int:
    return sum(piece.size for piece in slices)


def _check_cover(runs: list[Run], total: int) -> None:
    end = 0
    for run in sorted(runs, key=lambda run: run.start):
        if run.start != end:
            raise ValueError(
                f"the ranks of this cluster hold element {min(run.start, end)} twice or not at all"
            )
        end += run.size
    if end != total:
        raise ValueError(f"the ranks of this cluster hold {end} elements of a vector of {total}")

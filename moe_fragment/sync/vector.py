"""One canonical vector between the ranks of a cluster, which own runs of it, and the gateways, which own intervals.

The vector is cut into one interval per rail. `collect` brings each gateway its interval, whatever ranks hold it under
whatever ZeRO stage; `distribute` takes it back, also to ranks that hold a second copy of something, such as a tied
embedding on the last stage of a pipeline. All that crosses between clusters is about intervals.

How it does not deadlock: inside a cluster every rank sends to the gateways in rail order and gateways receive in rank
order, with all receives posted before any send is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from moe_fragment.fabric import Fabric
from moe_fragment.sync.canonical import CanonicalVector, Run, interval, merge


@dataclass(frozen=True)
class _Slice:
    """A piece of a run that falls into one rail's interval: where in the flat buffer, where in the interval."""

    flat: int
    position: int
    offset: int
    size: int


@dataclass(frozen=True)
class _Way:
    """What travels between this rank and each rank of the cluster, by local rank."""

    own: list[list[_Slice]]
    """Of this rank's buffers, to and from the other as a gateway."""
    theirs: list[list[_Slice]]
    """Of the other's buffers, to and from this one as a gateway."""


def _slices(runs: Sequence[Run], low: int, high: int) -> list[_Slice]:
    found = []
    for run in runs:
        start, end = max(run.start, low), min(run.start + run.size, high)
        if start < end:
            found.append(_Slice(run.flat, run.position + start - run.start, start - low, end - start))
    return found


class RailVector:
    """A canonical vector over this cluster's ranks; every method is collective over the cluster.

    Args:
        fabric: of this rank.
        vector: which parameters, and where in the vector.
        runs: which ranges of the vector this rank owns; over the ranks of a cluster they cover it exactly once.
        mirrors: ranges that this rank has copies of besides.
        dtype: of the flat buffers and of the intervals.

    Raises:
        ValueError: the runs of the cluster leave a gap or overlap.
    """

    def __init__(
        self,
        fabric: Fabric,
        vector: CanonicalVector,
        runs: Sequence[Run],
        *,
        mirrors: Sequence[Run] = (),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.fabric = fabric
        self.vector = vector
        self.dtype = dtype
        layouts: list[tuple[list[Run], list[Run]]] = fabric.cluster_gather((merge(runs), merge(mirrors)))
        _check_cover([run for owned, _ in layouts for run in owned], vector.size)
        self.low = self.high = 0
        """This gateway's interval; empty on other ranks."""
        if fabric.is_gateway:
            self.low, self.high = interval(vector.size, fabric.lane.layout.rail, len(fabric.gateways))
        self._owned = self._way([owned for owned, _ in layouts])
        self._held = self._way([[*owned, *copied] for owned, copied in layouts])

    def _way(self, layouts: Sequence[Sequence[Run]]) -> _Way:
        """Between ranks with these runs, by local rank, and the gateways."""
        rails = {gateway: rail for rail, gateway in enumerate(self.fabric.gateways)}
        mine = layouts[self.fabric.local_rank]
        own = [
            _slices(mine, *interval(self.vector.size, rails[rank], len(rails))) if rank in rails else []
            for rank in range(len(layouts))
        ]
        return _Way(own, [_slices(layout, self.low, self.high) for layout in layouts])

    @property
    def size(self) -> int:
        """Elements of this gateway's interval; 0 on other ranks."""
        return self.high - self.low

    def pieces(self) -> Iterator[tuple[str, int, int, int]]:
        """(parameter, offset in it, elements, offset in the interval) of everything in this gateway's interval."""
        for name, start in self.vector.starts.items():
            first, last = max(start, self.low), min(start + self.vector.sizes[name], self.high)
            if first < last:
                yield name, first - start, last - first, first - self.low

    @torch.no_grad()
    def collect(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """This gateway's interval of what the cluster's ranks hold in `flats`: 1-D in host memory, a fresh copy.

        Args:
            flats: 1-D buffers the runs point into, any device.
        """
        buffer = self._empty(self.size)
        packed = [self._pack(flats, slices) for slices in self._owned.own]
        arrived = self._exchange(packed, [_length(slices) for slices in self._owned.theirs])
        for slices, data in zip(self._owned.theirs, arrived, strict=True):
            start = 0
            for piece in slices:
                buffer[piece.offset : piece.offset + piece.size] = data[start : start + piece.size]
                start += piece.size
        return buffer

    @torch.no_grad()
    def distribute(self, interval: torch.Tensor, flats: Sequence[torch.Tensor]) -> None:
        """Inverse of `collect`, into `flats`.

        Args:
            interval: what `collect` returned here, changed.
            flats: written where the runs and mirrors of this rank are.
        """
        packed = [
            torch.cat([interval[piece.offset : piece.offset + piece.size] for piece in slices])
            if slices
            else self._empty(0)
            for slices in self._held.theirs
        ]
        arrived = self._exchange(packed, [_length(slices) for slices in self._held.own])
        for slices, data in zip(self._held.own, arrived, strict=True):
            start = 0
            for piece in slices:
                flats[piece.flat][piece.position : piece.position + piece.size] = data[
                    start : start + piece.size
                ]
                start += piece.size

    def _empty(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self.dtype)

    def _pack(self, flats: Sequence[torch.Tensor], slices: list[_Slice]) -> torch.Tensor:
        if not slices:
            return self._empty(0)
        return torch.cat(
            [flats[piece.flat][piece.position : piece.position + piece.size] for piece in slices]
        ).cpu()

    def _exchange(self, send: list[torch.Tensor], expect: list[int]) -> list[torch.Tensor]:
        """Send tensor i to local rank i, receive `expect[i]` elements from local rank i."""
        started = time.monotonic()
        arrived = [self._empty(size) for size in expect]
        works = []
        for peer, data in enumerate(arrived):
            if peer == self.fabric.local_rank:
                arrived[peer] = send[peer]
            elif data.numel():
                works.append(dist.irecv(data, src=peer, group=self.fabric.control))
        for peer, data in enumerate(send):
            if peer != self.fabric.local_rank and data.numel():
                works.append(dist.isend(data, dst=peer, group=self.fabric.control))
        for work in works:
            assert work is not None
            work.wait()
        self.fabric.clock.local_s += time.monotonic() - started
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

"""Collectives of whole vectors over a rail: all-reduce, all-gather, butterfly, and one round of mixing.

All of them run among some of the fleet's clusters (the replica set of what they carry), in ascending order of index;
gateways of the other clusters call them too and pass the time. Results are the same to the bit on every cluster that
takes part. They raise `ExchangeError` where a message does not come; `Fabric.collective` turns that into a failed step.

n clusters take part, S is the size of the vector in bytes. What leaves one of them:

| collective | bytes | message delays |
|---|---|---|
| all-reduce (reduce-scatter, all-gather) | 2 (n - 1) / n S | 2 |
| all-gather | (n - 1) S | 1 |
| butterfly, n = 2^m | m S | m |
| butterfly, others | at most (1 + floor(log2 n)) S | 2 + floor(log2 n) |
| mixing round | S | 1 |
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from moe_fragment.fabric.rails import Rail

Among = Sequence[int]
"""Indices of the clusters that take part, ascending."""


def all_reduce(
    rail: Rail,
    cluster: int,
    clusters: int,
    vector: torch.Tensor,
    channel: str,
    among: Among,
    wire: torch.dtype | None = None,
) -> None:
    """Sum `vector` (1-D, host memory) in place: each cluster sums one piece in cluster order and hands it round.

    What travels is rounded to `wire`, contributions and sums; the adding is in the vector's own dtype.
    """
    if cluster not in among:
        _idle(rail, clusters, channel, 2)
        return
    bounds = [vector.numel() * index // len(among) for index in range(len(among) + 1)]
    wire = wire or vector.dtype
    rounded = vector.to(wire)
    pieces = dict(zip(among, (rounded[low:high] for low, high in pairwise(bounds)), strict=True))
    own, size = pieces[cluster], wire.itemsize
    empty = as_bytes(vector[:0])
    heard = rail.exchange(
        "trunk",
        [as_bytes(pieces[peer]) if peer in pieces else empty for peer in range(clusters)],
        channel,
        [own.numel() * size] * clusters,
        to=among,
        source=among,
    )
    heard[cluster] = as_bytes(own).clone()
    total = torch.zeros_like(own, dtype=vector.dtype)
    for peer in among:
        total += from_bytes(heard[peer], wire)
    own.copy_(total)
    heard = rail.exchange(
        "trunk",
        [as_bytes(own)] * clusters,
        channel,
        [pieces[peer].numel() * size if peer in pieces else 0 for peer in range(clusters)],
        to=among,
        source=among,
    )
    for peer, piece in pieces.items():
        if peer != cluster:
            piece.copy_(from_bytes(heard[peer], wire))
    if rounded is not vector:
        vector.copy_(rounded)


def all_gather(
    rail: Rail, cluster: int, clusters: int, payload: torch.Tensor, channel: str, among: Among
) -> list[torch.Tensor]:
    """Every participant's payload (uint8 1-D, of any size), by cluster index; empty for those who take no part."""
    if cluster not in among:
        return _idle(rail, clusters, channel, 1)
    heard = rail.exchange("trunk", [payload] * clusters, channel, to=among, source=among)
    heard[cluster] = payload
    return heard


def butterfly(
    rail: Rail, cluster: int, clusters: int, vector: torch.Tensor, channel: str, among: Among
) -> None:
    """Sum `vector` in place by recursive doubling: in round j, clusters whose positions differ in bit j add up.

    Beyond the largest power of two, clusters hand their vector to a partner first and get the sum from it last
    (Rabenseifner and Traff 2004 call it the fold).
    """
    count = len(among)
    power = 1 << (count.bit_length() - 1)
    position = among.index(cluster) if cluster in among else None
    folds = power < count
    if folds:
        _fold(rail, clusters, vector, channel, among, position, power, back=False)
    for bit in range(power.bit_length() - 1):
        if position is None or position >= power:
            _idle(rail, clusters, channel, 1)
            continue
        partner = among[position ^ (1 << bit)]
        vector += _swap(rail, clusters, vector, channel, to=partner, source=partner)
    if folds:
        _fold(rail, clusters, vector, channel, among, position, power, back=True)


def mixing_round(
    rail: Rail, cluster: int, clusters: int, vector: torch.Tensor, channel: str, among: Among, number: int
) -> None:
    """Average `vector` in place with that of one other cluster, another one each round (one-peer exponential graph).

    Round j sends to the cluster 2^j places further and takes from the one 2^j places back, so that the mean over
    clusters never changes; with 2^m clusters, m rounds in a row average exactly (Ying et al., arXiv 2110.13363).
    """
    count = len(among)
    if cluster not in among or count == 1:
        _idle(rail, clusters, channel, 1)
        return
    position = among.index(cluster)
    step = 1 << (number % (count - 1).bit_length())
    to, source = among[(position + step) % count], among[(position - step) % count]
    vector.add_(_swap(rail, clusters, vector, channel, to=to, source=source)).mul_(0.5)


def _swap(
    rail: Rail, clusters: int, vector: torch.Tensor, channel: str, *, to: int | None, source: int | None
) -> torch.Tensor:
    """Send the vector to one cluster and receive another from one; empty when `source` is None."""
    size = vector.numel() * vector.element_size()
    heard = rail.exchange(
        "trunk",
        [as_bytes(vector)] * clusters,
        channel,
        [size] * clusters,
        to=() if to is None else (to,),
        source=() if source is None else (source,),
    )
    return from_bytes(heard[source], vector.dtype) if source is not None else vector[:0]


def _fold(
    rail: Rail,
    clusters: int,
    vector: torch.Tensor,
    channel: str,
    among: Among,
    position: int | None,
    power: int,
    *,
    back: bool,
) -> None:
    """Clusters beyond the power of two give their vector to a partner, or get it back."""
    extra = len(among) - power
    if position is None or extra <= position < power:
        _idle(rail, clusters, channel, 1)
        return
    outside = position >= power
    partner = among[position - power if outside else position + power]
    gives = outside != back
    heard = _swap(
        rail, clusters, vector, channel, to=partner if gives else None, source=None if gives else partner
    )
    if gives:
        return
    if back:
        vector.copy_(heard)
    else:
        vector += heard


def _idle(rail: Rail, clusters: int, channel: str, exchanges: int) -> list[torch.Tensor]:
    """Take part in the numbering of exchanges only."""
    nothing = [torch.empty(0, dtype=torch.uint8)] * clusters
    for _ in range(exchanges):
        nothing = rail.exchange("trunk", nothing, channel, to=(), source=())
    return nothing


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory as uint8 [numel * element_size]."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def from_bytes(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of `as_bytes`, 1-D; copies when the bytes do not start on a boundary of `dtype`."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)

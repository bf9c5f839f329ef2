"""Sync state in canonical pieces, so that any number of ranks and rails reads what any other wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from moe_fragment.sync.vector import RailVector

OUTER, VELOCITY = "outer_weight", "outer_velocity"
"""Global copy of the trunk, and outer momentum."""
FEEDBACK, LOST = "error_feedback", "error_pending"
"""What a codec has lost so far, and what it will have lost when the sync under way is merged."""
SERVED, SERVED_VELOCITY = "served_weight", "served_velocity"
"""Global copy and outer momentum of the syncer of an asynchronous strategy, on the cluster that hosts it."""
IN_FLIGHT = "in_flight"
"""A mean pseudo-gradient that is to be applied at a later step."""

Piece = tuple[str, str, int, torch.Tensor]
"""(kind, parameter, offset in it, values)"""

Reader = Callable[[str, str, int, int], torch.Tensor]
"""(kind, parameter, offset, size) -> fp32 [size]"""


def pieces_of(vector: RailVector, kind: str, interval: torch.Tensor) -> Iterator[Piece]:
    """A gateway's interval by parameter."""
    for name, offset, size, at in vector.pieces():
        yield kind, name, offset, interval[at : at + size]


def read_interval(vector: RailVector, kind: str, read: Reader) -> torch.Tensor:
    """This gateway's interval, put together from stored pieces."""
    interval = torch.empty(vector.size, dtype=torch.float32)
    for name, offset, size, at in vector.pieces():
        interval[at : at + size] = read(kind, name, offset, size)
    return interval


def checksum(values: torch.Tensor, first: int) -> int:
    """A number that two fp32 vectors share only if they are equal to the bit; parts of a vector add up.

    Each element's bits are multiplied by its place and summed in 64-bit integers, which wrap.

    Args:
        values: fp32 1-D, any device.
        first: place of its first element in the whole vector.
    """
    places = torch.arange(first + 1, first + 1 + values.numel(), device=values.device)
    return int((values.detach().view(torch.int32).long() * places).sum())

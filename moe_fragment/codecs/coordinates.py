"""Where the values of a sparse payload belong, and whether that can be."""

from __future__ import annotations

import torch


def checked(inside: torch.Tensor, block_of: torch.Tensor, block: int, size: int) -> torch.Tensor:
    """Coordinates int64 [m] of values that are `inside` [m] of their blocks, which are the `block_of` [m]-th.

    Raises:
        ValueError: beyond its block or the vector of `size`, or not ascending, so that one might count twice.
    """
    coordinates = block_of * block + inside
    if len(coordinates) and (inside.amax() >= block or coordinates[-1] >= size):
        raise ValueError(
            f"corrupt payload: an index beyond its block of {block} or the vector of {size} values"
        )
    if (coordinates.diff() <= 0).any():
        raise ValueError("corrupt payload: the indices do not ascend")
    return coordinates

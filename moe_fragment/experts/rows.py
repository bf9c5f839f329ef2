"""One row per (token, destination), whatever a destination is: another cluster, or a rank of this one.

Legend: T tokens, K experts per token, D model width, N rows, sorted by destination.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Rows(NamedTuple):
    """What leaves for `destinations` places."""

    token_N: torch.Tensor
    """Token of each row."""
    meant_NK: torch.Tensor
    """Which of its experts are at the row's destination."""
    sent: torch.Tensor
    """Rows by destination, int64 [destinations]."""


def group_rows(where_TK: torch.Tensor, destinations: int, nowhere: int) -> Rows:
    """Rows for the places of each token's experts.

    Args:
        where_TK: place of each chosen expert, in [0, destinations).
        destinations: how many places there are.
        nowhere: a place that gets no row.
    """
    wanted = torch.zeros(where_TK.shape[0], destinations, dtype=torch.bool, device=where_TK.device)
    wanted.scatter_(1, where_TK, True)
    wanted[:, nowhere] = False
    place_N, token_N = wanted.t().nonzero(as_tuple=True)
    return Rows(token_N, where_TK[token_N] == place_N[:, None], wanted.sum(dim=0))


def add_rows(
    total_TD: torch.Tensor, token_N: torch.Tensor, rows_ND: torch.Tensor, sent: Sequence[int]
) -> None:
    """Add each row to its token, in place.

    Destination by destination: from one, no token comes twice, so no result depends on the order of atomics.
    """
    for tokens, rows in zip(token_N.split(sent), rows_ND.split(sent), strict=True):
        total_TD.index_add_(0, tokens, rows)

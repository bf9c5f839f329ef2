"""The exchange that this package does not use: one row per (token, expert), from the same fabric primitives.

A row carries a hidden vector and one expert id; the expert's unweighted output comes back and the sender applies the
routing weight. It overlaps as `moe_fragment.experts` does: local experts compute while rows fly, in both directions.

Legend: T tokens, K experts per token, D model width, P pairs for other clusters, M rows that arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from moe_fragment.codecs import RowLayout
from moe_fragment.experts import LayerPlacement
from moe_fragment.experts.interface import experts
from moe_fragment.fabric import Fabric, Transfer


@dataclass
class Leg:
    """One way of the exchange: how rows start there, how their gradients start back, what is under way."""

    vectors: RowLayout
    there: Callable[[torch.Tensor], Transfer[Any]]
    back: Callable[[torch.Tensor], Transfer[Any]]
    arrived: Callable[[Any], torch.Tensor]
    pending: Transfer[Any] | None = None

    def wait(self) -> Any:
        """Result of the transfer under way."""
        assert self.pending is not None
        return self.pending.wait()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, leg: Leg) -> torch.Tensor:
        ctx.leg = leg
        leg.pending = leg.there(rows)
        return rows.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_ticket: torch.Tensor) -> Any:
        (gradient,) = ctx.leg.vectors.unpack(ctx.leg.wait(), torch.device("cpu"))
        return gradient, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, leg: Leg) -> torch.Tensor:
        ctx.leg = leg
        return leg.arrived(leg.wait())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.leg.pending = ctx.leg.back(ctx.leg.vectors.pack(gradient))
        return gradient.new_empty(0), None


def experts_forward(
    module: Any,
    fabric: Fabric,
    tables: LayerPlacement,
    hidden_TD: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
) -> torch.Tensor:
    """The same result as `cross_cluster_experts_forward`, by pairs.

    Args:
        module: experts module with this cluster's experts.
        fabric: of this rank.
        tables: owner and local slot of each expert.
        hidden_TD, ids_TK, weights_TK: as transformers hands them over.
    """
    top_k = ids_TK.shape[1]
    owner_S = tables.owner_E[ids_TK.reshape(-1)]
    remote_P = (owner_S != fabric.cluster).nonzero().squeeze(1)
    remote_P = remote_P[owner_S[remote_P].argsort(stable=True)]
    sent_C = torch.bincount(owner_S[remote_P], minlength=fabric.clusters).tolist()
    token_P = remote_P // top_k
    ids_P1 = ids_TK.reshape(-1, 1)[remote_P]
    width = hidden_TD.shape[1]
    vectors = RowLayout(((width, hidden_TD.dtype),))
    dispatched = RowLayout(((width, hidden_TD.dtype), (1, torch.int16)))
    held: dict[str, Any] = {}

    def arrived(result: Any) -> torch.Tensor:
        held["route"], packed = result
        rows_MD, held["ids_M1"] = dispatched.unpack(packed, hidden_TD.device)
        return rows_MD

    out = Leg(
        vectors,
        there=lambda rows: fabric.open_route(dispatched.pack(rows, ids_P1), sent_C),
        back=lambda packed: fabric.reverse(held["route"], packed, "dispatch"),
        arrived=arrived,
    )
    home = Leg(
        vectors,
        there=lambda rows: fabric.reverse(held["route"], vectors.pack(rows), "combine"),
        back=lambda packed: fabric.forward(held["route"], packed, "combine"),
        arrived=lambda packed: vectors.unpack(packed, hidden_TD.device)[0],
    )
    ticket = _Start.apply(hidden_TD.index_select(0, token_P), out)
    local_TD = experts(module, hidden_TD, tables.slot_E[ids_TK], weights_TK)
    rows_MD = _Wait.apply(ticket, out)
    ones_M1 = torch.ones(len(rows_MD), 1, dtype=weights_TK.dtype)
    outputs_MD = experts(module, rows_MD, tables.slot_E[held["ids_M1"].long()], ones_M1)
    back_PD = _Wait.apply(_Start.apply(outputs_MD, home), home)
    return local_TD.index_add(0, token_P, back_PD * weights_TK.reshape(-1, 1)[remote_P])

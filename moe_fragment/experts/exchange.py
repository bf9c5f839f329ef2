"""Dispatch and combine as autograd functions over a fabric route.

Each direction is a pair of nodes, one that starts the transfer and one that waits for it, joined by an empty "ticket"
tensor, so that whatever the caller computes between the two overlaps with the transfer. In backward the roles swap: the
waiting node starts the gradient's way back and the starting node waits for it. Autograd runs nodes in reverse order of
creation, so the local experts' backward, created between dispatch's two nodes, runs while row gradients fly.

Dispatch sends hidden vectors, expert ids and routing weights along a new route; its backward brings the gradients of
vectors and weights back. Combine answers along the route; its backward goes forward along it. No row counts are
exchanged again, not by the recompute of a checkpointed layer either: it sends its rows along the first forward's route,
so that what arrives has the same shape even after a failed exchange.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_fragment.codecs import RowLayout
from moe_fragment.experts.rows import add_rows
from moe_fragment.fabric import Fabric, Route, Transfer

ID_DTYPE = torch.int16
"""Expert ids on the wire; a layer has fewer than 32,768 experts."""


class Exchange:
    """One layer's exchange in one forward: the route and what is under way.

    Args:
        fabric: of this rank.
        width: D, width of a hidden vector.
        top_k: K, experts per token.
        dtype: of hidden vectors, weights_dtype of routing weights; both travel as they are.
        where: layer and micro-batch, which an error names.
        repeats: the forward that this one recomputes: rows take its route, and the same pairs are computed even when
            they do not arrive. None opens a route.
    """

    def __init__(
        self,
        fabric: Fabric,
        *,
        width: int,
        top_k: int,
        dtype: torch.dtype,
        weights_dtype: torch.dtype,
        where: str = "",
        repeats: Exchange | None = None,
    ) -> None:
        self.fabric = fabric
        self.where = where
        self.vectors = RowLayout(((width, dtype),))
        self.dispatched = RowLayout(((width, dtype), (top_k, ID_DTYPE), (top_k, weights_dtype)))
        self.gradients = RowLayout(((width, dtype), (top_k, weights_dtype)))
        self.route: Route | None = repeats.route if repeats is not None else None
        self.spent = False
        """Whether it has been recomputed, or its backward is through."""
        self.pending: Transfer[Any] | None = None
        self.ids_MK: torch.Tensor | None = repeats.ids_MK if repeats is not None else None

    def wait(self) -> Any:
        """Result of the transfer under way."""
        assert self.pending is not None, "no transfer is under way"
        transfer, self.pending = self.pending, None
        return transfer.wait()

    def token_dispatch(
        self, rows_ND: torch.Tensor, ids_NK: torch.Tensor, weights_NK: torch.Tensor, sent_C: list[int]
    ) -> torch.Tensor:
        """Start sending rows (grouped by destination cluster); returns the ticket for `dispatched_rows`."""
        return _DispatchStart.apply(rows_ND, weights_NK, ids_NK, sent_C, self)

    def dispatched_rows(self, ticket: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Wait for the rows of the other clusters: vectors [M, D], global expert ids [M, K], weights [M, K]."""
        rows_MD, weights_MK = _DispatchWait.apply(ticket, self)
        assert self.ids_MK is not None
        return rows_MD, self.ids_MK, weights_MK

    def token_combine(self, rows_MD: torch.Tensor) -> torch.Tensor:
        """Start sending each arrived row's weighted expert sum back; returns the ticket for `combined_rows`."""
        return _CombineStart.apply(rows_MD, self)

    def combined(
        self, ticket: torch.Tensor, local_TD: torch.Tensor, token_N: torch.Tensor, sent_C: list[int]
    ) -> torch.Tensor:
        """Wait for the answers (in the order the rows were sent) and add them to the local sums, [T, D]."""
        return _CombineWait.apply(ticket, local_TD, token_N, sent_C, self)


class _DispatchStart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows_ND: torch.Tensor,
        weights_NK: torch.Tensor,
        ids_NK: torch.Tensor,
        sent_C: list[int],
        exchange: Exchange,
    ) -> torch.Tensor:
        ctx.exchange, ctx.device = exchange, rows_ND.device
        packed = exchange.dispatched.pack(rows_ND, ids_NK, weights_NK)
        if exchange.route is None:
            exchange.pending = exchange.fabric.open_route(packed, sent_C, where=exchange.where)
        else:
            assert exchange.route.sent_C == sent_C, "a recompute must route as its forward did"
            exchange.pending = exchange.fabric.forward(exchange.route, packed, "dispatch")
        return rows_ND.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_ticket_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        grad_rows_ND, grad_weights_NK = exchange.gradients.unpack(exchange.wait(), ctx.device)
        exchange.spent = True
        return grad_rows_ND, grad_weights_NK, None, None, None


class _DispatchWait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.exchange = exchange
        packed = exchange.wait()
        if exchange.route is None:
            exchange.route, packed = packed
        rows_MD, ids_MK, weights_MK = exchange.dispatched.unpack(packed, ticket.device)
        if exchange.ids_MK is None:
            exchange.ids_MK = ids_MK.long()
        return rows_MD, weights_MK

    @staticmethod
    def backward(ctx: Any, grad_rows_MD: torch.Tensor, grad_weights_MK: torch.Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        assert exchange.route is not None
        packed = exchange.gradients.pack(grad_rows_MD, grad_weights_MK)
        exchange.pending = exchange.fabric.reverse(exchange.route, packed, "dispatch")
        return grad_rows_MD.new_empty(0), None


class _CombineStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: torch.Tensor, exchange: Exchange) -> torch.Tensor:
        ctx.exchange, ctx.device = exchange, rows_MD.device
        assert exchange.route is not None
        exchange.pending = exchange.fabric.reverse(exchange.route, exchange.vectors.pack(rows_MD), "combine")
        return rows_MD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_ticket_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        exchange: Exchange = ctx.exchange
        (grad_rows_MD,) = exchange.vectors.unpack(exchange.wait(), ctx.device)
        return grad_rows_MD, None


class _CombineWait(torch.autograd.Function):
    """Keeps its indices out of autograd's saved tensors: a checkpointed layer's recompute then stops before combine."""

    @staticmethod
    def forward(
        ctx: Any,
        ticket: torch.Tensor,
        local_TD: torch.Tensor,
        token_N: torch.Tensor,
        sent_C: list[int],
        exchange: Exchange,
    ) -> torch.Tensor:
        ctx.exchange, ctx.token_N = exchange, token_N
        (rows_ND,) = exchange.vectors.unpack(exchange.wait(), ticket.device)
        total_TD = local_TD.clone()
        add_rows(total_TD, token_N, rows_ND, sent_C)
        return total_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: torch.Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        assert exchange.route is not None
        grad_TD = grad_TD.contiguous()
        packed = exchange.vectors.pack(grad_TD.index_select(0, ctx.token_N))
        exchange.pending = exchange.fabric.forward(exchange.route, packed, "combine")
        return grad_TD.new_empty(0), grad_TD, None, None, None

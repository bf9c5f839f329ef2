"""The way of one layer's tokens to their experts and back, in named stages; only `token_*` communicate.

Legend: T tokens of this rank, K experts per token, D model width, E experts, C clusters, N rows sent to other
clusters (one per token and remote cluster), M rows that arrived from other clusters.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from moe_fragment.experts.exchange import Exchange
from moe_fragment.experts.parallel import ExpertParallel, ParallelPath
from moe_fragment.experts.rows import group_rows
from moe_fragment.experts.statistics import ExpertStatistics, in_recompute
from moe_fragment.fabric import Fabric
from moe_fragment.placement import Placement


@dataclass(frozen=True)
class LayerPlacement:
    """Lookup tables of one layer on one cluster: which cluster computes each expert, and local slot of the own ones."""

    owner_E: torch.Tensor
    slot_E: torch.Tensor
    local: int

    @staticmethod
    def of(placement: Placement, layer: int, cluster: int, near: Sequence[int]) -> LayerPlacement:
        """For decoder layer `layer` of `placement`; foreign experts get the sentinel slot `local`.

        Of a replicated expert a cluster uses its own copy, else the first in `near` (clusters by distance).
        """
        experts = placement.experts_of(layer, cluster)
        distance = {other: place for place, other in enumerate(near)} | {cluster: -1}
        owner_E = torch.tensor(
            [
                min(placement.holders(layer, expert), key=lambda holder: distance[holder])
                for expert in range(placement.num_experts)
            ]
        )
        slot_E = torch.full((placement.num_experts,), len(experts))
        slot_E[list(experts)] = torch.arange(len(experts))
        return LayerPlacement(owner_E, slot_E, len(experts))

    def to(self, device: torch.device) -> LayerPlacement:
        """The same tables on `device`."""
        return LayerPlacement(self.owner_E.to(device), self.slot_E.to(device), self.local)


@dataclass(frozen=True)
class Dispatch:
    """What leaves this rank: per row its token, expert ids (-1 where not meant) and the rows per cluster."""

    token_N: torch.Tensor
    ids_NK: torch.Tensor
    meant_NK: torch.Tensor
    sent_C: list[int]
    owner_TK: torch.Tensor


class ExpertPath:
    """Stages of the expert path of one MoE layer.

    Args:
        fabric: of this rank.
        placement: tables of this layer.
        index: decoder layer, for errors.
        layer: position among the MoE layers, for statistics.
        statistics: counters shared by all layers of the model.
        parallel: how the cluster's experts are spread over its ranks; None where each rank holds them all.
    """

    def __init__(
        self,
        fabric: Fabric,
        placement: LayerPlacement,
        *,
        index: int = 0,
        layer: int,
        statistics: ExpertStatistics,
        parallel: ExpertParallel | None = None,
    ) -> None:
        self.fabric = fabric
        self.placement = placement
        self.index = index
        self.layer = layer
        self.statistics = statistics
        self.local_path: ParallelPath | None = None
        """To the cluster's ranks that hold the experts; None where this one holds them all."""
        if parallel is not None:
            self.local_path = ParallelPath(parallel, placement.local, fabric.clock)
        self.local_only = False
        """Whether tokens stay: each uses the experts of this cluster among those it chose (`exchange: local`)."""
        self._exchanges: list[weakref.ref[Exchange]] = []
        """Those whose backward is to come, in order; they live as long as their autograd graphs."""

    def keep_local(
        self, ids_TK: torch.Tensor, weights_TK: torch.Tensor, *, training: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the chosen experts those of this cluster: local slots [T, K] (the sentinel for others), and routing
        weights [T, K], raised to what all chosen ones had together.

        A router that knows about clusters chooses from them only; a stock one does not, and a token none of whose
        experts is here passes the layer by.
        """
        slots_TK = self._tables(ids_TK.device).slot_E[ids_TK]
        here_TK = slots_TK < self.placement.local
        kept_TK = weights_TK * here_TK
        total_T1, kept_T1 = weights_TK.sum(dim=-1, keepdim=True), kept_TK.sum(dim=-1, keepdim=True)
        whole_T1 = here_TK.all(dim=-1, keepdim=True)
        scale_T1 = torch.where(whole_T1, 1.0, total_T1 / torch.where(kept_T1 == 0, 1.0, kept_T1))
        if training and not in_recompute():
            self.statistics.count_local(
                self.layer, ids_TK=ids_TK, here_TK=here_TK, cluster=self.fabric.cluster
            )
        return slots_TK, kept_TK * scale_T1

    def _tables(self, device: torch.device) -> LayerPlacement:
        """The lookup tables, where the tokens are."""
        if self.placement.owner_E.device != device:
            self.placement = self.placement.to(device)
        return self.placement

    def dispatch_preprocess(self, ids_TK: torch.Tensor, *, training: bool) -> Dispatch:
        """Decide which tokens go where: one row per (token, remote cluster), grouped by cluster."""
        owner_TK = self._tables(ids_TK.device).owner_E[ids_TK]
        token_N, meant_NK, sent = group_rows(owner_TK, self.fabric.clusters, nowhere=self.fabric.cluster)
        ids_NK = torch.where(meant_NK, ids_TK[token_N], -1)
        dispatch = Dispatch(token_N, ids_NK, meant_NK, sent.tolist(), owner_TK)
        if training and not in_recompute():
            self.statistics.count(
                self.layer,
                owner_TK=owner_TK,
                ids_TK=ids_TK,
                sent_C=dispatch.sent_C,
                cluster=self.fabric.cluster,
            )
        return dispatch

    def token_dispatch(
        self, dispatch: Dispatch, hidden_TD: torch.Tensor, weights_TK: torch.Tensor
    ) -> tuple[Exchange, torch.Tensor]:
        """Start sending; returns the exchange and its ticket."""
        repeated = self._repeated() if in_recompute() else None
        exchange = Exchange(
            self.fabric,
            width=hidden_TD.shape[1],
            top_k=weights_TK.shape[1],
            dtype=hidden_TD.dtype,
            weights_dtype=weights_TK.dtype,
            where=f"layer {self.index}, micro-batch {self.statistics.micro_batch}",
            repeats=repeated,
        )
        if torch.is_grad_enabled() and not in_recompute():
            self._exchanges = [held for held in self._exchanges if _awaits_backward(held())]
            self._exchanges.append(weakref.ref(exchange))
        rows_ND = hidden_TD.index_select(0, dispatch.token_N)
        weights_NK = weights_TK.index_select(0, dispatch.token_N) * dispatch.meant_NK
        return exchange, exchange.token_dispatch(rows_ND, dispatch.ids_NK, weights_NK, dispatch.sent_C)

    def _repeated(self) -> Exchange | None:
        """The forward that a recompute repeats: micro-batches go backward in the order in which they went forward.

        None under reentrant checkpointing, whose first forward leaves no graph: its recompute is the real forward.
        """
        for held in self._exchanges:
            exchange = held()
            if exchange is not None and _awaits_backward(exchange):
                exchange.spent = True
                return exchange
        return None

    def dispatch_postprocess(
        self, exchange: Exchange, ticket: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Wait for the rows of the other clusters: vectors [M, D], local slots [M, K], weights [M, K]."""
        rows_MD, ids_MK, weights_MK = exchange.dispatched_rows(ticket)
        slots_MK = self.placement.slot_E[ids_MK.clamp_min(0)]
        return rows_MD, torch.where(ids_MK < 0, self.placement.local, slots_MK), weights_MK

    def local_slots(self, ids_TK: torch.Tensor) -> torch.Tensor:
        """Local slots of the chosen experts, [T, K]; the sentinel where the expert lives elsewhere."""
        return self.placement.slot_E[ids_TK]

    def token_combine(self, exchange: Exchange, sums_MD: torch.Tensor) -> torch.Tensor:
        """Start answering with each arrived row's weighted expert sum; returns the ticket."""
        return exchange.token_combine(sums_MD)

    def combine_postprocess(
        self, dispatch: Dispatch, exchange: Exchange, ticket: torch.Tensor, local_TD: torch.Tensor
    ) -> torch.Tensor:
        """Wait for the answers and add them to this cluster's own sums: [T, D]."""
        return exchange.combined(ticket, local_TD, dispatch.token_N, dispatch.sent_C)


def _awaits_backward(exchange: Exchange | None) -> bool:
    return exchange is not None and not exchange.spent

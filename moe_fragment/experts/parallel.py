"""Expert parallelism inside a cluster: its experts are spread over its ranks, each on one of them.

A token, of this rank or arrived from another cluster, travels once to every rank here that holds any of its experts;
that rank applies the routing weights, sums, and one vector comes back. It is what `path.py` does between clusters,
without hiding anything behind computation: the network inside a cluster is fast.

Legend: T tokens, K experts per token, D model width, S slots (the cluster's experts of a layer, then one for none), R
ranks of the cluster, N rows sent (one per token and rank), M rows that arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from moe_fragment.codecs import RowLayout
from moe_fragment.experts.rows import add_rows, group_rows
from moe_fragment.fabric import WaitClock
from moe_fragment.placement.policies import apportion

SLOT_DTYPE = torch.int16
Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows [M, D], own slots [M, K], weights [M, K]) -> weighted sums [M, D]"""


class ExpertParallel:
    """Which rank of a cluster holds which of its experts: consecutive ones, as many as its share.

    Args:
        rank: this rank's place in the cluster.
        shares: of all its ranks, relative to each other, positive; none goes without an expert where there are enough.
        group: of all its ranks; None for the default group.
    """

    def __init__(self, rank: int, shares: Sequence[float], group: dist.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.shares = tuple(map(Fraction, shares))
        self.group = group

    def counts(self, experts: int) -> list[int]:
        """How many of a layer's `experts` each rank holds."""
        return apportion(experts, self.shares)

    def own(self, experts: Sequence[int]) -> tuple[int, ...]:
        """Of a cluster's experts in a layer, those of this rank."""
        bounds = [0, *accumulate(self.counts(len(experts)))]
        return tuple(experts[bounds[self.rank] : bounds[self.rank + 1]])


class ParallelPath:
    """The way of one layer's tokens to the ranks of a cluster and back.

    Args:
        parallel: of the cluster.
        experts: how many of the layer it holds.
        clock: waits are booked there, as local ones.
    """

    def __init__(self, parallel: ExpertParallel, experts: int, clock: WaitClock) -> None:
        self._parallel = parallel
        self._clock = clock
        self._ranks = len(parallel.shares)
        counts = parallel.counts(experts)
        first = sum(counts[: parallel.rank])
        self._rank_S = torch.tensor(
            [rank for rank, count in enumerate(counts) for _ in range(count)] + [self._ranks]
        )
        slots_S = torch.arange(experts + 1) - first
        self._slot_S = torch.where(self._rank_S == parallel.rank, slots_S, counts[parallel.rank])

    def __call__(
        self, hidden_TD: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor, compute: Compute
    ) -> torch.Tensor:
        """Weighted sums over the chosen experts of this cluster, [T, D]; collective over its ranks.

        Args:
            hidden_TD: tokens.
            slots_TK: the cluster's slots of the chosen experts.
            weights_TK: routing weights.
            compute: this rank's experts.
        """
        self._rank_S, self._slot_S = self._rank_S.to(slots_TK.device), self._slot_S.to(slots_TK.device)
        rank_TK = self._rank_S[slots_TK]
        token_N, meant_NK, sent = group_rows(rank_TK, self._ranks + 1, nowhere=self._ranks)
        slots_NK = torch.where(meant_NK, slots_TK[token_N], len(self._slot_S) - 1)
        shuffle = _Shuffle(sent[: self._ranks], token_N, self._parallel.group, self._clock)
        rows_MD, weights_MK, slots_MK = _Dispatch.apply(
            hidden_TD.index_select(0, token_N),
            weights_TK.index_select(0, token_N) * meant_NK,
            slots_NK,
            shuffle,
        )
        sums_MD = compute(rows_MD, self._slot_S[slots_MK.long()], weights_MK)
        return _Combine.apply(sums_MD, len(hidden_TD), shuffle)


class _Shuffle:
    """Who sends how many rows to whom, of one exchange."""

    def __init__(
        self,
        sent_R: torch.Tensor,
        token_N: torch.Tensor,
        group: dist.ProcessGroup | None,
        clock: WaitClock,
    ) -> None:
        self.token_N = token_N
        self.group = group
        self.clock = clock
        arrived_R = torch.empty_like(sent_R)
        self._all_to_all(arrived_R, sent_R)
        self.sent_R: list[int] = sent_R.tolist()
        self.arrived_R: list[int] = arrived_R.tolist()

    def there(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Matrices [N, ...] to [M, ...], together."""
        return self._move(parts, self.sent_R, self.arrived_R)

    def back(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Matrices [M, ...] to [N, ...], together."""
        return self._move(parts, self.arrived_R, self.sent_R)

    def _move(
        self, parts: Sequence[torch.Tensor], sent: list[int], arrived: list[int]
    ) -> tuple[torch.Tensor, ...]:
        layout = RowLayout(tuple((part.shape[1], part.dtype) for part in parts))
        packed = layout.join(*parts)
        moved = packed.new_empty(sum(arrived), layout.row_bytes)
        self._all_to_all(moved, packed, arrived, sent)
        return layout.unpack(moved, packed.device)

    def _all_to_all(
        self,
        moved: torch.Tensor,
        rows: torch.Tensor,
        arrived: list[int] | None = None,
        sent: list[int] | None = None,
    ) -> None:
        started = time.monotonic()
        dist.all_to_all_single(moved, rows, arrived, sent, group=self.group)
        self.clock.local_s += time.monotonic() - started


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_ND: torch.Tensor, weights_NK: torch.Tensor, slots_NK: torch.Tensor, shuffle: _Shuffle
    ) -> Any:
        ctx.shuffle = shuffle
        rows_MD, weights_MK, slots_MK = shuffle.there(rows_ND, weights_NK, slots_NK.to(SLOT_DTYPE))
        ctx.mark_non_differentiable(slots_MK)
        return rows_MD, weights_MK, slots_MK

    @staticmethod
    def backward(ctx: Any, grad_rows_MD: torch.Tensor, grad_weights_MK: torch.Tensor, _slots: Any) -> Any:
        grad_rows_ND, grad_weights_NK = ctx.shuffle.back(grad_rows_MD, grad_weights_MK)
        return grad_rows_ND, grad_weights_NK, None, None


class _Combine(torch.autograd.Function):
    """Saves no tensor: a checkpointed layer's recompute stops before the last of them."""

    @staticmethod
    def forward(ctx: Any, sums_MD: torch.Tensor, tokens: int, shuffle: _Shuffle) -> torch.Tensor:
        ctx.shuffle = shuffle
        (rows_ND,) = shuffle.back(sums_MD)
        total_TD = rows_ND.new_zeros(tokens, rows_ND.shape[1])
        add_rows(total_TD, shuffle.token_N, rows_ND, shuffle.sent_R)
        return total_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: torch.Tensor) -> Any:
        (grad_MD,) = ctx.shuffle.there(grad_TD.index_select(0, ctx.shuffle.token_N))
        return grad_MD, None, None

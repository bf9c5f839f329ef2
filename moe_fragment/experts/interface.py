"""`cross_cluster`: the experts implementation that transformers' MoE models call through its ExpertsInterface."""

from __future__ import annotations

import functools
from typing import Any

import torch

from moe_fragment.experts.path import ExpertPath

IMPLEMENTATION = "cross_cluster"
LOCAL_IMPLEMENTATION = "grouped_mm"
FP64_IMPLEMENTATION = "batched_mm"
"""torch's grouped matmul has no fp64, which is for comparisons only."""
ATTRIBUTE = "cross_cluster_path"
"""Where an experts module keeps its `ExpertPath`."""


def register() -> None:
    """Make `experts_implementation="cross_cluster"` known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, cross_cluster_experts_forward)


def cross_cluster_experts_forward(
    module: Any, hidden_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Compute the chosen experts of each token, on whichever clusters they live.

    Collective over the fleet, except under `exchange: local`: all ranks call it the same number of times, with any
    number of tokens, zero included.

    Args:
        module: experts module holding this cluster's experts only, or this rank's of them, prepared by `fragment`.
        hidden_TD: tokens [T, D].
        ids_TK: global expert ids [T, K], int64.
        weights_TK: routing weights [T, K].

    Returns:
        [T, D], the weighted sum of each token's experts. After a failed exchange remote contributions are zero; the
        step is then discarded fleet-wide.
    """
    path: ExpertPath = getattr(module, ATTRIBUTE)
    if path.local_only:
        slots_TK, kept_TK = path.keep_local(ids_TK, weights_TK, training=module.training)
        return cluster_experts(module, hidden_TD, slots_TK, kept_TK)
    dispatch = path.dispatch_preprocess(ids_TK, training=module.training)
    exchange, ticket = path.token_dispatch(dispatch, hidden_TD, weights_TK)
    local_TD = cluster_experts(module, hidden_TD, path.local_slots(ids_TK), weights_TK)
    rows_MD, slots_MK, row_weights_MK = path.dispatch_postprocess(exchange, ticket)
    sums_MD = cluster_experts(module, rows_MD, slots_MK, row_weights_MK)
    ticket = path.token_combine(exchange, sums_MD)
    return path.combine_postprocess(dispatch, exchange, ticket, local_TD)


def cluster_experts(
    module: Any, hidden_TD: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """Weighted sums over this cluster's experts by slot, [T, D]; collective over its ranks if they are spread."""
    path: ExpertPath = getattr(module, ATTRIBUTE)
    if path.local_path is None:
        return experts(module, hidden_TD, slots_TK, weights_TK)
    return path.local_path(hidden_TD, slots_TK, weights_TK, functools.partial(experts, module))


def experts(
    module: Any, hidden_TD: torch.Tensor, slots_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """This rank's experts through transformers' grouped matmul; the slot `num_experts` contributes nothing.

    Only the P pairs with a local slot are gathered and computed: transformers would carry the others along as rows of
    zeros. Indexed and summed such that no result depends on the order of atomics.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # A cluster or rank without experts still takes part in every exchange, backward included.
    if not module.num_experts:
        return hidden_TD * (0.0 * weights_TK.sum(dim=-1, keepdim=True)).to(hidden_TD.dtype)
    name = FP64_IMPLEMENTATION if hidden_TD.dtype == torch.float64 else LOCAL_IMPLEMENTATION
    token_P, choice_P = (slots_TK < module.num_experts).nonzero(as_tuple=True)
    outputs_PD = ALL_EXPERTS_FUNCTIONS[name](
        module,
        hidden_TD[token_P],
        slots_TK[token_P, choice_P].unsqueeze(1),
        weights_TK[token_P, choice_P].unsqueeze(1),
    )
    outputs_TKD = hidden_TD.new_zeros(*slots_TK.shape, hidden_TD.shape[1])
    pair_P = token_P * slots_TK.shape[1] + choice_P
    return outputs_TKD.flatten(0, 1).index_copy(0, pair_P, outputs_PD).view_as(outputs_TKD).sum(dim=1)

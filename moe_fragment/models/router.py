"""The router of FragmentMoe: scores, top-k, balance losses, and the auxiliary-loss-free bias.

All of it computes in fp32 (fp64 for an fp64 model) whatever the module's dtype and whether or not autocast is
on: in half precision, near-tied experts change places from one run to the next. Nothing here communicates;
loads of several ranks are summed by whoever calls `update_router_bias`.

Shapes: `B` batch, `S` sequence, `T` tokens (B * S), `D` model width, `E` experts, `K` experts per token, `L`
MoE layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from moe_fragment.models.configuration import FragmentMoeConfig

# DeepSeek-V3's guard against a zero sum of sigmoid scores; Dots1 and Glm4Moe use the same value.
_SIGMOID_SUM_EPS = 1e-20


class ExactBuffers(nn.Module):
    """A module whose own buffers keep their dtype when the model is cast (`.to(dtype)`, `.bfloat16()`).

    In bf16 a router bias of 1 swallows an update of 1e-3, and rotary frequencies lose whole positions.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        own = [buffer for buffer in self._buffers.values() if buffer is not None]

        def keep_dtype(tensor: Tensor) -> Tensor:
            out = fn(tensor)
            if out.dtype != tensor.dtype and any(tensor is buffer for buffer in own):
                return tensor.to(out.device)
            return out

        return super()._apply(keep_dtype, recurse)


class FragmentMoeRouter(ExactBuffers):
    """Choose `K` of `E` experts for each token.

    Attributes:
        weight: [E, D], in the model's dtype; used in fp32.
        e_score_correction_bias: [E] fp32, saved; present only with `config.router_bias`. Added to the scores
            for selection, never to the routing weights.
        tokens_per_expert: [E] int64, not saved: assignments of non-padding tokens in training since the last
            reset.
    """

    e_score_correction_bias: Tensor | None
    tokens_per_expert: Tensor

    def __init__(self, config: FragmentMoeConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_experts
        self.scoring = config.scoring
        self.norm_topk_prob = config.norm_topk_prob
        self.routed_scaling_factor = config.routed_scaling_factor
        self.bias_update_rate = config.router_bias_update_rate
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.router_bias else None
        self.register_buffer("e_score_correction_bias", bias)
        self.held: tuple[int, ...] | None = None
        """Ids of the experts to choose from; None for all."""
        counts = torch.zeros(config.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens.

        Args:
            hidden: [..., D], any float dtype.

        Returns:
            Raw logits [T, E] (-inf where `restrict` rules an expert out), routing weights [T, K] (both fp32, or fp64
            for an fp64 input), and expert ids [T, K] int64. The weights stay in fp32: every experts implementation
            multiplies them into the expert output before it casts back, and rounding them first (as Qwen3-MoE does in
            bf16) gains nothing.
        """
        hidden_TD = hidden.reshape(-1, hidden.shape[-1])
        exact = torch.promote_types(torch.promote_types(hidden.dtype, self.weight.dtype), torch.float32)
        with maybe_autocast(hidden.device.type, enabled=False):
            logits_TE = F.linear(hidden_TD.to(exact), self.weight.to(exact))
            elsewhere_E = self._elsewhere(logits_TE.device) if self.held is not None else None
            if elsewhere_E is not None:
                logits_TE = logits_TE.masked_fill(elsewhere_E, -torch.inf)
            scores_TE = self.scores(logits_TE)
            bias_E = self.e_score_correction_bias
            choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
            if elsewhere_E is not None:
                choice_TE = choice_TE.masked_fill(elsewhere_E, -torch.inf)
            # The order of the K experts decides the rounding of their sum. Stock sigmoid models do not sort,
            # stock softmax models do; following each keeps exported logits equal to the last bit.
            index_TK = torch.topk(choice_TE, self.top_k, dim=-1, sorted=self.scoring == "softmax").indices
            weights_TK = scores_TE.gather(-1, index_TK)
            if self.norm_topk_prob:
                eps = _SIGMOID_SUM_EPS if self.scoring == "sigmoid" else 0.0
                weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + eps)
            weights_TK = weights_TK * self.routed_scaling_factor
        return logits_TE, weights_TK, index_TK

    def restrict(self, held: tuple[int, ...] | None) -> None:
        """Choose from these experts only, as if there were no others; None for all.

        Raises:
            ValueError: they are fewer than each token is to have.
        """
        if held is not None and len(held) < self.top_k:
            raise ValueError(f"cannot choose {self.top_k} experts for each token from {len(held)}")
        self.held = held

    def _elsewhere(self, device: torch.device) -> Tensor:
        """[E] bool: the experts not to choose from."""
        assert self.held is not None
        elsewhere_E = torch.ones(self.num_experts, dtype=torch.bool, device=device)
        elsewhere_E[list(self.held)] = False
        return elsewhere_E

    def scores(self, logits_TE: Tensor) -> Tensor:
        """Unbiased scores [T, E] in (0, 1) from raw logits [T, E]."""
        return logits_TE.softmax(dim=-1) if self.scoring == "softmax" else logits_TE.sigmoid()

    @torch.no_grad()
    def count(self, index_TK: Tensor, token_mask_T: Tensor | None = None) -> None:
        """Add the assignments of non-padding tokens to `tokens_per_expert`; not while a backward recomputes.

        Args:
            index_TK: [T, K] expert ids.
            token_mask_T: [T] bool, False for padding; None when there is none.
        """
        if torch._C._current_graph_task_id() != -1:  # inside backward: activation checkpointing runs us again
            return
        self.tokens_per_expert += assignments(index_TK, self.num_experts, token_mask_T).sum(0).to(torch.int64)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, scoring={self.scoring}"


def assignments(index_TK: Tensor, num_experts: int, token_mask_T: Tensor | None = None) -> Tensor:
    """[T, E] fp32: 1 where a non-padding token goes to an expert. Dense: sums are deterministic on GPUs."""
    chosen_TE = torch.zeros(index_TK.shape[0], num_experts, dtype=torch.float32, device=index_TK.device)
    chosen_TE.scatter_(1, index_TK, 1.0)
    return chosen_TE if token_mask_T is None else chosen_TE * token_mask_T[:, None]


def balance_loss(scores_BSE: Tensor, index_BSK: Tensor, token_mask_BS: Tensor | None = None) -> Tensor:
    """Load-balancing loss of one layer, of each sequence by itself: `E * sum_e f_e P_e`.

    The form is Switch's (arXiv 2101.03961, eq. 4 to 6) within a sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17
    to 20): `f_e` is the number of assignments to expert e per token of the sequence, `P_e` its mean score after each
    token's scores are divided by their sum (which changes nothing for softmax). Perfectly uniform routing gives
    exactly K; a layer that collapses onto K experts gives up to E. Padding counts in neither.

    Sequences are averaged with their tokens as weights, so that a batch's loss is a sum over its sequences: cutting
    it into other micro-batches, over other ranks, changes nothing. Balance over the fleet's whole batch is the
    router bias's business.

    Args:
        scores_BSE: [B, S, E] unbiased scores, with gradient.
        index_BSK: [B, S, K] chosen experts.
        token_mask_BS: [B, S] bool, False for padding; None when there is none.

    Returns:
        Scalar of the scores' dtype; 0 when no token counts.
    """
    batch, length, num_experts = scores_BSE.shape
    share_BSE = scores_BSE / scores_BSE.sum(dim=-1, keepdim=True).clamp(min=_SIGMOID_SUM_EPS)
    chosen_TE = assignments(
        index_BSK.flatten(0, 1), num_experts, None if token_mask_BS is None else token_mask_BS.reshape(-1)
    )
    chosen_BE = chosen_TE.view(batch, length, num_experts).sum(1).to(share_BSE.dtype)
    if token_mask_BS is None:
        tokens_B = share_BSE.new_full((batch,), length)
    else:
        share_BSE = share_BSE * token_mask_BS[..., None]
        tokens_B = token_mask_BS.sum(1).to(share_BSE.dtype)
    # tokens * f * P, summed over experts, with f = chosen / tokens and P = share / tokens
    loss_B = num_experts * (chosen_BE * share_BSE.sum(1)).sum(-1) / tokens_B.clamp(min=1)
    return loss_B.sum() / tokens_B.sum().clamp(min=1)


def z_loss(logits_TE: Tensor, token_mask_T: Tensor | None = None) -> Tensor:
    """Router z-loss of one layer: mean of `logsumexp(logits)^2` (ST-MoE, arXiv 2202.08906, eq. 5).

    Args:
        logits_TE: [T, E] raw logits.
        token_mask_T: [T] bool, False for padding; None when there is none.
    """
    return _masked_mean(torch.logsumexp(logits_TE, dim=-1, keepdim=True).square(), token_mask_T).squeeze(0)


def _masked_mean(values_TX: Tensor, token_mask_T: Tensor | None) -> Tensor:
    if token_mask_T is not None:
        values_TX = values_TX * token_mask_T[:, None]
    return values_TX.sum(0) / _count(token_mask_T, values_TX.shape[0])


def _count(token_mask_T: Tensor | None, num_tokens: int) -> Tensor | int:
    return max(num_tokens, 1) if token_mask_T is None else token_mask_T.sum().clamp(min=1)


def routers(model: nn.Module) -> list[FragmentMoeRouter]:
    """The model's routers in layer order (of a pipeline stage: those it holds)."""
    return [module for module in model.modules() if isinstance(module, FragmentMoeRouter)]


def router_load(model: nn.Module) -> Tensor:
    """[L, E] int64: how many non-padding tokens went to each expert in training since `reset_router_load`.

    A copy, local to this rank: sum it over every rank that holds other tokens before `update_router_bias`.
    """
    found = routers(model)
    if not found:
        raise ValueError("router_load: the model has no FragmentMoe router")
    return torch.stack([router.tokens_per_expert for router in found])


def reset_router_load(model: nn.Module) -> None:
    """Forget the counted load: after each optimizer step, committed or discarded."""
    for router in routers(model):
        router.tokens_per_expert.zero_()


@torch.no_grad()
def update_router_bias(model: nn.Module, load_LE: Tensor) -> None:
    """Move every router's selection bias by one step towards balance (arXiv 2408.15664, algorithm 1).

    `bias += rate * sign(mean load - load)`, then minus its mean, so that it cannot drift. Call it once for
    each optimizer step, on every rank with the same load.

    Args:
        model: has at least one router, all with `router_bias`.
        load_LE: [L, E] tokens per expert over the whole step and the whole fleet; any real dtype.
    """
    found = routers(model)
    if not found or any(router.e_score_correction_bias is None for router in found):
        raise ValueError("update_router_bias: the model has no router bias; build it with router_bias=True")
    expected = (len(found), found[0].num_experts)
    if tuple(load_LE.shape) != expected:
        raise ValueError(f"update_router_bias: load has shape {tuple(load_LE.shape)}, expected {expected}")
    for router, load_E in zip(found, load_LE, strict=True):
        bias_E = router.e_score_correction_bias
        assert bias_E is not None
        assert bias_E.dtype == torch.float32, "the router bias was cast away from fp32"
        load_E = load_E.to(bias_E.device, torch.float64)
        bias_E += router.bias_update_rate * torch.sign(load_E.mean() - load_E).float()
        bias_E -= bias_E.mean()

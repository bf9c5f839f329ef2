"""The layers of FragmentMoe: norm, attention, experts, the mixture block, the decoder layer.

Attention, MLP and rotary embedding are transformers' own. Parallelism enters at one place only: the experts
function that `config._experts_implementation` names ("eager", "grouped_mm", "batched_mm", or a registered
one).

Shapes: `B` batch, `S` sequence, `T` tokens (B * S), `D` model width, `E` experts, `K` experts per token, `I`
expert width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.integrations import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeAttention,
    Qwen3MoeMLP,
    Qwen3MoeRotaryEmbedding,
)

from moe_fragment.models.configuration import FragmentMoeConfig
from moe_fragment.models.router import ExactBuffers, FragmentMoeRouter, balance_loss, z_loss


class FragmentMoeRMSNorm(nn.Module):
    """RMS normalisation over the last dimension, as Qwen3 computes it, but in fp64 for an fp64 model."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class FragmentMoeRotaryEmbedding(ExactBuffers, Qwen3MoeRotaryEmbedding):
    """Rotary tables from `config.rope_parameters`; the frequencies stay fp32 when the model is cast."""


class FragmentMoeAttention(Qwen3MoeAttention):
    """Grouped-query attention; `qk_norm` decides whether query and key heads are normalised."""

    def __init__(self, config: FragmentMoeConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert config.head_dim is not None
        for name in ("q_norm", "k_norm"):
            norm = (
                FragmentMoeRMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()
            )
            setattr(self, name, norm)


@use_experts_implementation
class FragmentMoeExperts(nn.Module):
    """All routed experts of a layer: `gate_up_proj` [E, 2I, D] (gate rows first), `down_proj` [E, D, I].

    `forward` is the plain reference ("eager"); the decorator sends calls to the configured implementation.
    """

    def __init__(self, config: FragmentMoeConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.hidden_dim = config.hidden_size
        self.intermediate_dim = config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(
            torch.empty(self.num_experts, 2 * self.intermediate_dim, self.hidden_dim)
        )
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, self.hidden_dim, self.intermediate_dim))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Weighted sum of each token's experts.

        Experts without a token still run on zero rows: their gradients are then zeros instead of missing, and
        the result stays connected to the graph. `unbind` because the backward of `weight[e]` allocates all of
        [E, ...].

        Args:
            hidden_states: [T, D].
            top_k_index: [T, K] expert ids; ids from `num_experts` on are skipped.
            top_k_weights: [T, K] routing weights.

        Returns:
            [T, D] in the dtype of `hidden_states`.
        """
        out_TD = torch.zeros_like(hidden_states)
        for expert, (gate_up, down) in enumerate(
            zip(self.gate_up_proj.unbind(), self.down_proj.unbind(), strict=True)
        ):
            slot, token = torch.where(top_k_index.t() == expert)
            gate, up = F.linear(hidden_states[token], gate_up).chunk(2, dim=-1)
            rows = F.linear(self.act_fn(gate) * up, down) * top_k_weights[token, slot, None]
            out_TD.index_add_(0, token, rows.to(out_TD.dtype))
        return out_TD


class FragmentMoeBlock(nn.Module):
    """Router, routed experts, and the shared experts that every token visits."""

    def __init__(self, config: FragmentMoeConfig) -> None:
        super().__init__()
        self.balance_coef = config.router_aux_loss_coef
        self.z_coef = config.router_z_loss_coef
        self.gate = FragmentMoeRouter(config)
        self.experts = FragmentMoeExperts(config)
        self.shared_experts: Qwen3MoeMLP | None = None
        if config.num_shared_experts:
            width = config.num_shared_experts * config.moe_intermediate_size
            self.shared_experts = Qwen3MoeMLP(config, intermediate_size=width)

    def forward(
        self,
        hidden_BSD: Tensor,
        token_mask: Tensor | None = None,
        with_aux: bool = False,
        count_load: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix experts.

        Args:
            hidden_BSD: [B, S, D].
            token_mask: [B, S] bool, False for padding (which is computed, but counts in no loss and no load).
            with_aux: compute the auxiliary loss.
            count_load: add to the router's `tokens_per_expert`.

        Returns:
            [B, S, D] and this layer's auxiliary loss, coefficients applied (None if both are 0 or not asked
            for).
        """
        mask_T = None if token_mask is None else token_mask.reshape(-1)
        logits_TE, weights_TK, index_TK = self.gate(hidden_BSD)
        if count_load:
            self.gate.count(index_TK, mask_T)
        aux_loss = self.aux_loss(logits_TE, index_TK, hidden_BSD.shape[:2], mask_T) if with_aux else None
        # The routed experts come last: when a checkpointed layer is recomputed, nothing after their inputs is
        # needed, and experts in other clusters are not asked for their answers again.
        shared_BSD = None if self.shared_experts is None else self.shared_experts(hidden_BSD)
        routed_TD = self.experts(hidden_BSD.reshape(-1, hidden_BSD.shape[-1]), index_TK, weights_TK)
        mixed_BSD = routed_TD.view_as(hidden_BSD)
        return mixed_BSD if shared_BSD is None else mixed_BSD + shared_BSD, aux_loss

    def aux_loss(
        self, logits_TE: Tensor, index_TK: Tensor, shape_BS: torch.Size, mask_T: Tensor | None
    ) -> Tensor | None:
        """Weighted balance loss plus weighted z-loss of this layer."""
        terms = []
        if self.balance_coef > 0:
            mask_BS = None if mask_T is None else mask_T.view(shape_BS)
            scores_TE = self.gate.scores(logits_TE)
            if self.gate.held is not None:  # balance among those that can be chosen
                held = torch.tensor(self.gate.held, device=logits_TE.device).sort().values
                scores_TE, index_TK = scores_TE[:, held], torch.searchsorted(held, index_TK)
            scores_BSE, index_BSK = (rows.view(*shape_BS, -1) for rows in (scores_TE, index_TK))
            terms.append(self.balance_coef * balance_loss(scores_BSE, index_BSK, mask_BS))
        if self.z_coef > 0:
            terms.append(self.z_coef * z_loss(logits_TE, mask_T))
        return torch.stack(terms).sum() if terms else None


class FragmentMoeDecoderLayer(GradientCheckpointingLayer):
    """Attention, then experts (a dense MLP in the first `first_k_dense` layers), each with a residual."""

    def __init__(self, config: FragmentMoeConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = FragmentMoeAttention(config, layer_idx)
        self.mlp: FragmentMoeBlock | Qwen3MoeMLP
        if layer_idx < config.first_k_dense:
            self.mlp = Qwen3MoeMLP(config, intermediate_size=config.intermediate_size)
        else:
            self.mlp = FragmentMoeBlock(config)
        self.input_layernorm = FragmentMoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = FragmentMoeRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_BSD: Tensor,
        attention_mask: Any = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        token_mask: Tensor | None = None,
        with_aux: bool = False,
        count_load: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """One layer.

        The auxiliary loss is an output and not a hook's catch, so that its gradient passes both kinds of
        activation checkpointing (the reentrant one cuts every other path).

        Args:
            hidden_BSD: [B, S, D], positional (reentrant checkpointing tracks only those).
            attention_mask: what `create_causal_mask` made for the attention implementation.
            position_embeddings: cosines and sines, [B or 1, S, head_dim] each.
            cache: key/value cache, updated in place.
            token_mask, with_aux, count_load: as in `FragmentMoeBlock.forward`.

        Returns:
            [B, S, D] and the layer's auxiliary loss or None.
        """
        attended_BSD, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_BSD),
            attention_mask=attention_mask,
            position_embeddings=position_embeddings,
            cache=cache,
            **kwargs,
        )
        hidden_BSD = hidden_BSD + attended_BSD
        normed_BSD = self.post_attention_layernorm(hidden_BSD)
        if isinstance(self.mlp, FragmentMoeBlock):
            mixed_BSD, aux_loss = self.mlp(normed_BSD, token_mask, with_aux, count_load)
            return hidden_BSD + mixed_BSD, aux_loss
        return hidden_BSD + self.mlp(normed_BSD), None

"""Which class of plain `transformers` computes the same as a FragmentMoe model, and with which tensors.

A trained FragmentMoe should open where moe_fragment was never heard of. For every setting below, a stock
model with the converted tensors gives logits equal to the last bit in fp32 (same experts and attention
implementation). Settings that no stock class computes are refused by name. Training terms (balance and
z-loss, the bias update) are not part of what a stock class is asked to reproduce.

In bf16 the two may round apart: stock softmax routers compute logits in bf16 and Qwen's round the routing
weights to it, ours are fp32 throughout. Stock sigmoid routers (Dots1, Glm4Moe) are fp32 as ours are.

| scoring | qk_norm | shared experts | stock class |
|---|---|---|---|
| softmax | yes | no | Qwen3-MoE |
| softmax | no | no, renormalised, no dense layers | Mixtral |
| softmax | no | otherwise | Qwen2-MoE |
| sigmoid | yes | any | Dots1 |
| sigmoid | no | any | Glm4Moe |
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Dots1Config,
    Glm4MoeConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from moe_fragment.models.configuration import FragmentMoeConfig

StateDict = dict[str, Tensor]

_SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attention_dropout",
    "num_experts_per_tok",
    "hidden_act",
    "initializer_range",
    "rms_norm_eps",
    "tie_word_embeddings",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "dtype",
)


def stock_equivalent(config: FragmentMoeConfig) -> tuple[PreTrainedConfig, Callable[[StateDict], StateDict]]:
    """The stock configuration that computes what `config` computes, and the conversion of its tensors.

    Args:
        config: of the FragmentMoe model.

    Returns:
        A configuration for `AutoModelForCausalLM.from_config`, and a function from the state dict of
        `FragmentMoeForCausalLM` to that of the stock model. The function copies no tensor that it does not
        change.

    Raises:
        ValueError: no stock class computes this; the message names the fields that stand in the way.
    """
    return _softmax(config) if config.scoring == "softmax" else _sigmoid(config)


def _softmax(config: FragmentMoeConfig) -> tuple[PreTrainedConfig, Callable[[StateDict], StateDict]]:
    obstacles = []
    if config.router_bias:
        obstacles.append("router_bias with scoring softmax")
    if config.routed_scaling_factor != 1:
        obstacles.append("routed_scaling_factor other than 1 with scoring softmax")
    if config.num_shared_experts and config.qk_norm:
        obstacles.append("num_shared_experts with scoring softmax and qk_norm")
    if config.attention_bias and not config.qk_norm:
        obstacles.append("attention_bias with scoring softmax and no qk_norm")
    _refuse(obstacles)
    if config.qk_norm:
        return Qwen3MoeConfig(
            **_common(config),
            intermediate_size=config.intermediate_size,
            moe_intermediate_size=config.moe_intermediate_size,
            num_experts=config.num_experts,
            norm_topk_prob=config.norm_topk_prob,
            attention_bias=config.attention_bias,
            mlp_only_layers=list(range(config.first_k_dense)),
            router_aux_loss_coef=float(config.router_aux_loss_coef),
        ), dict
    if config.norm_topk_prob and not config.first_k_dense and not config.num_shared_experts:
        return MixtralConfig(
            **_common(config),
            intermediate_size=config.moe_intermediate_size,
            num_local_experts=config.num_experts,
            router_aux_loss_coef=float(config.router_aux_loss_coef),
        ), dict
    return Qwen2MoeConfig(
        **_common(config),
        intermediate_size=config.intermediate_size,
        moe_intermediate_size=config.moe_intermediate_size,
        shared_expert_intermediate_size=config.num_shared_experts * config.moe_intermediate_size,
        num_experts=config.num_experts,
        norm_topk_prob=config.norm_topk_prob,
        qkv_bias=False,
        mlp_only_layers=list(range(config.first_k_dense)),
        router_aux_loss_coef=float(config.router_aux_loss_coef),
    ), partial(_to_qwen2_moe, config)


def _sigmoid(config: FragmentMoeConfig) -> tuple[PreTrainedConfig, Callable[[StateDict], StateDict]]:
    obstacles = []
    if config.attention_bias and not config.qk_norm:
        obstacles.append("attention_bias with scoring sigmoid and no qk_norm")
    if config.num_experts < 2:
        obstacles.append("num_experts below 2 with scoring sigmoid")
    _refuse(obstacles)
    sizes: dict[str, Any] = {
        "intermediate_size": config.intermediate_size,
        "moe_intermediate_size": config.moe_intermediate_size,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.num_shared_experts,
        "first_k_dense_replace": config.first_k_dense,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": float(config.routed_scaling_factor),
        "n_group": 1,
        "topk_group": 1,
        "attention_bias": config.attention_bias,
    }
    if config.qk_norm:
        stock: PreTrainedConfig = Dots1Config(**_common(config), **sizes, sliding_window=None)
    else:
        stock = Glm4MoeConfig(**_common(config), **sizes, use_qk_norm=False, num_mtp_layers=0)
        assert stock.rope_parameters is not None
        stock.rope_parameters["partial_rotary_factor"] = 1.0
    return stock, partial(_to_grouped_sigmoid, config)


def _common(config: FragmentMoeConfig) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in _SAME_NAME}
    fields["rope_parameters"] = dict(config.rope_parameters or {})
    return fields


def _refuse(obstacles: list[str]) -> None:
    if obstacles:
        raise ValueError(f"no stock transformers class computes {'; or '.join(obstacles)}")


def _to_qwen2_moe(config: FragmentMoeConfig, state: StateDict) -> StateDict:
    """Qwen2-MoE halves its shared expert by a gate: `sigmoid(w x) * shared(x)`.

    With w = 0 the gate is exactly 1/2, and doubling `down_proj` undoes it without rounding. Without shared
    experts theirs has width 0 and adds exactly 0.
    """
    out: StateDict = {}
    for name, tensor in state.items():
        renamed = name.replace(".mlp.shared_experts.", ".mlp.shared_expert.")
        out[renamed] = 2 * tensor if name.endswith(".mlp.shared_experts.down_proj.weight") else tensor
    for layer in range(config.first_k_dense, config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp."
        weight = state[prefix + "gate.weight"]
        out[prefix + "shared_expert_gate.weight"] = weight.new_zeros(1, config.hidden_size)
        if not config.num_shared_experts:
            out |= _empty_mlp(prefix + "shared_expert.", weight)
    return out


def _to_grouped_sigmoid(config: FragmentMoeConfig, state: StateDict) -> StateDict:
    """Dots1 and Glm4Moe always have a bias and shared experts: zeros, and width 0, where ours has none."""
    out = dict(state)
    for layer in range(config.first_k_dense, config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp."
        weight = state[prefix + "gate.weight"]
        if not config.router_bias:
            bias = torch.zeros(config.num_experts, dtype=torch.float32, device=weight.device)
            out[prefix + "gate.e_score_correction_bias"] = bias
        if not config.num_shared_experts:
            out |= _empty_mlp(prefix + "shared_experts.", weight)
    return out


def _empty_mlp(prefix: str, like_ED: Tensor) -> StateDict:
    """The tensors of an MLP of width 0, which adds exactly 0 to its input's stream."""
    width = like_ED.shape[-1]
    return {
        prefix + "gate_proj.weight": like_ED.new_empty(0, width),
        prefix + "up_proj.weight": like_ED.new_empty(0, width),
        prefix + "down_proj.weight": like_ED.new_empty(width, 0),
    }

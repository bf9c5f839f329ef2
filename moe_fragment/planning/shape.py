"""The shape of a mixture-of-experts transformer: the numbers that parameters and FLOPs follow from.

``ModelShape`` is what the catalogue and case files write; ``from_transformers`` reads it out of a configuration
dictionary such as ``config.json`` of a checkpoint. Not here: models whose layers differ in more than whether they
are dense, encoders, vision towers, multi-token-prediction heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError, model_validator

from moe_fragment.planning.quantities import Whole
from moe_fragment.schema import ConfigError, Count, FieldError, Section, explain


class ModelShape(Section):
    """One decoder; every feed-forward block is gated (three matrices), as in all models of the catalogue."""

    hidden_size: Count
    """Width of the residual stream."""
    num_layers: Count
    """Decoder layers, dense ones included."""
    num_heads: Count
    """Query heads."""
    num_kv_heads: Count
    """Key and value heads; not used by latent attention."""
    head_dim: Count | None = None
    """Width of a head; default ``hidden_size / num_heads``."""
    vocab_size: Count
    """Rows of the embedding."""
    num_experts: Whole = 0
    """Routed experts per layer; 0 for a dense model."""
    top_k: Whole = 0
    """Routed experts per token."""
    moe_intermediate_size: Count | None = None
    """Inner width of a routed expert."""
    shared_intermediate_size: Whole = 0
    """Inner width of all shared experts together; 0: none."""
    shared_gate: bool = False
    """The shared expert is scaled by a learned gate (Qwen2-MoE)."""
    intermediate_size: Count | None = None
    """Inner width of the feed-forward block of dense layers."""
    first_k_dense: Whole = 0
    """How many of the first layers are dense."""
    tie_word_embeddings: bool = False
    """The head reuses the embedding."""
    attention: Literal["gqa", "mla"] = "gqa"
    """Grouped-query, or DeepSeek's latent attention (arXiv:2405.04434, section 2.1)."""
    q_lora_rank: Whole = 0
    """Rank of latent queries; 0: queries are not compressed."""
    kv_lora_rank: Whole = 0
    """Rank of latent keys and values."""
    qk_nope: Whole = 0
    """Width per head of the part of queries and keys without rotary embedding (latent attention)."""
    qk_rope: Whole = 0
    """Width of the part with it; one key of that width serves all heads."""
    v_head_dim: Whole = 0
    """Width per head of values (latent attention)."""
    qk_norm: Literal["none", "per_head", "full"] = "none"
    """Norms of queries and keys: weights of a head's width, or of all heads together."""
    attn_bias: Literal["none", "qkv", "qkvo"] = "none"
    """Which attention projections have a bias."""
    sinks: bool = False
    """A learned attention sink per head (gpt-oss)."""
    expert_bias: bool = False
    """Projections of experts have biases."""
    router_bias: bool = False
    """The router has a bias per expert."""
    norms_per_layer: Count = 2
    """Norms over the residual stream per layer."""
    ln_bias: bool = False
    """Norms have a bias as well as a weight."""
    lm_head_bias: bool = False
    """The head has a bias."""

    @model_validator(mode="after")
    def _check(self) -> ModelShape:
        if self.first_k_dense > self.num_layers:
            raise FieldError("first_k_dense", f"expected at most num_layers ({self.num_layers})")
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            raise FieldError("top_k", f"expected 1 to num_experts ({self.num_experts}), got {self.top_k}")
        if self.top_k and not self.num_experts:
            raise FieldError("top_k", "expected nothing for a model without num_experts")
        if self.num_experts and self.moe_intermediate_size is None:
            raise FieldError("moe_intermediate_size", "required for a model with experts")
        if (self.first_k_dense or not self.num_experts) and self.intermediate_size is None:
            raise FieldError("intermediate_size", "required for a model with dense layers")
        if self.attention == "mla":
            for name in ("kv_lora_rank", "qk_nope", "qk_rope", "v_head_dim"):
                if not getattr(self, name):
                    raise FieldError(name, "required for latent attention (attention: mla)")
        else:
            if self.head_dim is None and self.hidden_size % self.num_heads:
                raise FieldError("head_dim", "required when num_heads does not divide hidden_size")
            if self.num_heads % self.num_kv_heads:
                raise FieldError("num_kv_heads", f"expected a divisor of num_heads ({self.num_heads})")
        return self

    @property
    def dense_layers(self) -> int:
        """Layers without experts."""
        return self.first_k_dense if self.num_experts else self.num_layers

    @property
    def head_width(self) -> int:
        """Width of a query head under grouped-query attention."""
        return self.head_dim or self.hidden_size // self.num_heads


_RENAMED = {
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads", "num_attention_heads"),
    "head_dim": ("head_dim",),
    "vocab_size": ("vocab_size",),
    "num_experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "top_k": ("num_experts_per_tok",),
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
    "shared_intermediate_size": ("shared_expert_intermediate_size",),
    "intermediate_size": ("intermediate_size",),
    "first_k_dense": ("first_k_dense_replace",),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "q_lora_rank": ("q_lora_rank",),
    "kv_lora_rank": ("kv_lora_rank",),
    "qk_nope": ("qk_nope_head_dim",),
    "qk_rope": ("qk_rope_head_dim",),
    "v_head_dim": ("v_head_dim",),
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"attn_bias": "qkv", "shared_gate": True},
    "qwen3_moe": {"qk_norm": "per_head"},
    "olmoe": {"qk_norm": "full"},
    "gpt_oss": {"attn_bias": "qkvo", "sinks": True, "expert_bias": True, "router_bias": True},
    "phimoe": {"ln_bias": True},
    "deepseek_v3": {"router_bias": True},
    "kimi_k2": {"router_bias": True},
}
"""What a family always has and its configuration does not say."""


def from_transformers(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a transformers configuration describes.

    What the configuration does not use (dropout, rotary scaling, ...) is not looked at.

    Args:
        config: as in ``config.json``; ``model_type`` decides what the family has without saying so.

    Raises:
        ConfigError: a number is missing or makes no sense, or layers differ in ways ``ModelShape`` cannot say.
    """
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ConfigError("mlp_only_layers: dense layers between expert layers are not supported")
    if config.get("moe_layer_freq", 1) != 1:
        raise ConfigError("moe_layer_freq: expected 1, other layouts of expert layers are not supported")
    shape: dict[str, Any] = {}
    for name, spellings in _RENAMED.items():
        found = next((config[word] for word in spellings if config.get(word) is not None), None)
        if found is not None:
            shape[name] = found
        elif ModelShape.model_fields[name].is_required():
            raise ConfigError(f"{spellings[0]}: required, but not given")
    shape.update(_FAMILIES.get(str(config.get("model_type")), {}))
    if shared := config.get("n_shared_experts"):
        shape["shared_intermediate_size"] = _product(shared, shape.get("moe_intermediate_size"))
    if shape.get("kv_lora_rank"):
        shape["attention"] = "mla"
        shape.pop("head_dim", None)
    if config.get("attention_bias") and "attn_bias" not in shape:
        shape["attn_bias"] = "qkvo"
    if config.get("lm_head_bias"):
        shape["lm_head_bias"] = True
    try:
        return ModelShape(**shape)
    except ValidationError as error:
        raise ConfigError(explain(error, "")) from None


def _product(experts: object, width: object) -> int:
    if isinstance(experts, int) and isinstance(width, int):
        return experts * width
    raise ConfigError(
        f"n_shared_experts: expected a whole number, and moe_intermediate_size, got {experts!r}"
    )

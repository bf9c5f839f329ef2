"""Configuration of FragmentMoe, the package's own mixture-of-experts transformer.

A Qwen3-MoE shaped decoder whose routing is a set of options: softmax or sigmoid scores, shared experts, a
per-layer balance loss, z-loss, the auxiliary-loss-free bias. `models.stock` says which of its settings a
class of plain `transformers` can express.
"""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import RopeParameters

SCORINGS = ("softmax", "sigmoid")

_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "moe_intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
)
_RATES = (
    "attention_dropout",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "router_z_loss_coef",
    "router_bias_update_rate",
)
_FLAGS = ("qk_norm", "attention_bias", "norm_topk_prob", "router_bias", "tie_word_embeddings")


@strict
class FragmentMoeConfig(PreTrainedConfig):
    """Every field of a FragmentMoe model; impossible settings raise `ValueError` with the field's name.

    Size:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        num_hidden_layers: decoder layers.
        intermediate_size: width of the MLP in the `first_k_dense` leading layers.
        moe_intermediate_size: width of one routed (or shared) expert.
        max_position_embeddings: longest sequence, tokens.

    Attention:
        num_attention_heads, num_key_value_heads: query heads, and key/value heads that share them (grouped
            queries).
        head_dim: width of a head; None means `hidden_size // num_attention_heads`.
        qk_norm: RMS-normalise each query and key head, as Qwen3 does.
        attention_bias: biases on all four projections.
        attention_dropout: probability, in training only.
        rope_parameters: as everywhere in transformers; None means the default rotation with theta 10,000.

    Experts:
        num_experts: routed experts in each MoE layer (`num_local_experts` reads the same field).
        num_experts_per_tok: experts that a token goes to.
        num_shared_experts: experts that every token goes to, one MLP of that many expert widths; 0 for none.
        first_k_dense: leading layers with a dense MLP instead of experts.

    Router:
        scoring: "softmax" over the experts (Mixtral, Qwen) or "sigmoid" of each (DeepSeek-V3).
        norm_topk_prob: divide the chosen scores by their sum.
        routed_scaling_factor: multiplies the routing weights afterwards.
        router_aux_loss_coef: weight of the balance loss, which is computed per layer and summed over layers;
            uniform routing costs exactly `num_experts_per_tok` a layer before this factor (Switch scaling).
        router_z_loss_coef: weight of the mean squared log-partition of the router, per layer (ST-MoE, eq. 5).
        router_bias: keep a bias per expert that steers selection only (arXiv 2408.15664). It is moved by
            `update_router_bias`, not by a gradient.
        router_bias_update_rate: the step of that bias for each optimizer step.
        output_router_logits: return the raw router logits of each MoE layer. Losses do not depend on it.
    """

    model_type = "moe_fragment"
    attribute_map: ClassVar[dict[str, str]] = {"num_local_experts": "num_experts"}
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]

    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 8
    intermediate_size: int = 1536
    moe_intermediate_size: int = 512
    max_position_embeddings: int = 4096
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int | None = None
    qk_norm: bool = True
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    rope_parameters: RopeParameters | dict | None = None
    num_experts: int = 16
    num_experts_per_tok: int = 2
    num_shared_experts: int = 0
    first_k_dense: int = 0
    scoring: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float | int = 1.0
    router_aux_loss_coef: float | int = 0.001
    router_z_loss_coef: float | int = 0.0
    router_bias: bool = False
    router_bias_update_rate: float | int = 0.001
    output_router_logits: bool = False
    hidden_act: str = "silu"
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_types()
        if self.head_dim is None:
            _require(
                self.hidden_size % self.num_attention_heads == 0,
                "hidden_size",
                f"{self.hidden_size} is no multiple of num_attention_heads; set head_dim",
            )
            self.head_dim = self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)
        self._check_values(self.head_dim)

    def _check_types(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if name != "head_dim" or value is not None:
                _require(type(value) is int and value >= 1, name, f"must be an integer from 1, got {value!r}")
        for name in ("num_shared_experts", "first_k_dense"):
            value = getattr(self, name)
            _require(type(value) is int and value >= 0, name, f"must be an integer from 0, got {value!r}")
        for name in _RATES:
            value = getattr(self, name)
            _require(
                type(value) in (int, float) and value >= 0, name, f"must be a number from 0, got {value!r}"
            )
        for name in _FLAGS:
            value = getattr(self, name)
            _require(type(value) is bool, name, f"must be true or false, got {value!r}")

    def _check_values(self, head_dim: int) -> None:
        _require(head_dim % 2 == 0, "head_dim", f"must be even for the rotary embedding, got {head_dim}")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"{self.num_key_value_heads} does not divide num_attention_heads {self.num_attention_heads}",
        )
        _require(
            self.first_k_dense < self.num_hidden_layers,
            "first_k_dense",
            f"must be below num_hidden_layers {self.num_hidden_layers}, got {self.first_k_dense}",
        )
        _require(
            self.num_experts_per_tok <= self.num_experts,
            "num_experts_per_tok",
            f"{self.num_experts_per_tok} is more than num_experts {self.num_experts}",
        )
        known = self.scoring in SCORINGS
        _require(known, "scoring", f"must be one of {', '.join(SCORINGS)}, got {self.scoring!r}")
        _require(
            self.hidden_act in ACT2FN, "hidden_act", f"{self.hidden_act!r} is no activation of transformers"
        )
        _require(self.routed_scaling_factor > 0, "routed_scaling_factor", "must be above 0")
        _require(self.attention_dropout < 1, "attention_dropout", "must be below 1")


def _require(ok: bool, field: str, expected: str) -> None:
    if not ok:
        raise ValueError(f"FragmentMoeConfig.{field}: {expected}")

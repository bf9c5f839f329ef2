"""How many parameters a model has, and where: in the trunk, in experts, at work for one token.

Plain counting, layer by layer, within 1.5 % of the published totals of 14 models (Mixtral to Kimi-K2) but for
Granite-3.0-1B, whose "1.3B" is rounded (2.7 %). Publishers count active parameters in different ways, so more than
one count is given.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_fragment.planning.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters (not bytes)."""

    total: int
    """All."""
    embedding: int
    """The input embedding."""
    head: int
    """The output head; 0 if it reuses the embedding."""
    attention: int
    """Attention of all layers, their query and key norms included."""
    one_expert: int
    """One routed expert."""
    experts: int
    """All routed experts of all layers."""
    active_experts: int
    """Routed experts one token passes through."""

    @property
    def trunk(self) -> int:
        """What every cluster holds: everything but routed experts."""
        return self.total - self.experts

    @property
    def active(self) -> int:
        """At work for one token, the input embedding and the head included."""
        return self.trunk + self.active_experts

    @property
    def active_without_embedding(self) -> int:
        """Like ``active``, the input embedding not counted (gpt-oss's convention) unless it is also the head."""
        return self.active - (self.embedding if self.head else 0)

    @property
    def matmul(self) -> int:
        """Active parameters that multiply something: the head counts, the look-up in the embedding does not."""
        return self.active_without_embedding


def count(shape: ModelShape) -> Parameters:
    """Count the parameters of ``shape``.

    Source: the models' own definitions; latent attention from DeepSeek-V2 (arXiv:2405.04434, appendix C).
    """
    norm = shape.hidden_size * (2 if shape.ln_bias else 1)
    layers, sparse = shape.num_layers, shape.num_layers - shape.dense_layers
    embedding = shape.vocab_size * shape.hidden_size
    head = 0 if shape.tie_word_embeddings else embedding
    if shape.lm_head_bias:
        head += shape.vocab_size
    attention = layers * (_latent_attention(shape) if shape.attention == "mla" else _grouped_attention(shape))
    one_expert = _expert(shape) if shape.num_experts else 0
    router = shape.hidden_size * shape.num_experts + (shape.num_experts if shape.router_bias else 0)
    shared = 3 * shape.hidden_size * shape.shared_intermediate_size
    shared += shape.hidden_size if shape.shared_gate else 0
    dense = shape.dense_layers * 3 * shape.hidden_size * (shape.intermediate_size or 0)
    experts = sparse * shape.num_experts * one_expert
    norms = (layers * shape.norms_per_layer + 1) * norm
    return Parameters(
        total=embedding + head + attention + norms + dense + sparse * (router + shared) + experts,
        embedding=embedding,
        head=head,
        attention=attention,
        one_expert=one_expert,
        experts=experts,
        active_experts=sparse * shape.top_k * one_expert,
    )


def _grouped_attention(shape: ModelShape) -> int:
    queries, keys = shape.num_heads * shape.head_width, shape.num_kv_heads * shape.head_width
    total = shape.hidden_size * (2 * queries + 2 * keys)
    if shape.attn_bias != "none":
        total += queries + 2 * keys
    if shape.attn_bias == "qkvo":
        total += shape.hidden_size
    if shape.qk_norm == "per_head":
        total += 2 * shape.head_width
    elif shape.qk_norm == "full":
        total += queries + keys
    return total + (shape.num_heads if shape.sinks else 0)


def _latent_attention(shape: ModelShape) -> int:
    queries = shape.num_heads * (shape.qk_nope + shape.qk_rope)
    if shape.q_lora_rank:
        total = shape.q_lora_rank * (shape.hidden_size + 1 + queries)  # 1: the norm between the two
    else:
        total = shape.hidden_size * queries
    total += shape.hidden_size * (shape.kv_lora_rank + shape.qk_rope) + shape.kv_lora_rank
    total += shape.kv_lora_rank * shape.num_heads * (shape.qk_nope + shape.v_head_dim)
    return total + shape.num_heads * shape.v_head_dim * shape.hidden_size


def _expert(shape: ModelShape) -> int:
    inner = shape.moe_intermediate_size or 0
    return 3 * shape.hidden_size * inner + (2 * inner + shape.hidden_size if shape.expert_bias else 0)

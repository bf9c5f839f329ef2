"""Tiny models, the same in every process that builds them."""

from __future__ import annotations

from typing import Any

import torch

VOCABULARY = 64
HIDDEN = 32
LAYERS = 2
EXPERTS = 8
EMBEDDING_SCALE, QUERY_KEY_SCALE, TIED_SCALE = 10.0, 0.3, 0.2
"""Embeddings of about unit size and soft attention: without them the gradients of the norms of queries and keys cancel
so far that one process's own fp32 is 1e-6 off. A head tied to such an embedding gets smaller vectors, for a loss of the
usual size."""
SIGNPOST = 8
"""Tokens below this number carry a mark by which `steer` recognises them."""


def build(kind: str, *, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model in training mode whose weights spread wide enough for routing to be far from uniform.

    Args:
        kind: `qwen3`, `mixtral` or `fragment` (shared expert, sigmoid scores, router bias, z-loss).
        dtype: of all parameters.
        options: configuration fields to change.
    """
    torch.manual_seed(0)
    model = _CLASSES[kind](options).to(dtype).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1
            parameter.add_(noise.to(dtype))
            if name.endswith("embed_tokens.weight"):
                parameter.mul_(EMBEDDING_SCALE)
            elif name == "model.norm.weight" and model.config.tie_word_embeddings:
                parameter.mul_(TIED_SCALE)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(QUERY_KEY_SCALE)
    return model


def _common(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.01,
        **options,
    }


def _qwen3(options: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": EXPERTS, "moe_intermediate_size": 24, "intermediate_size": 40}
    config = Qwen3MoeConfig(**_common({**sizes, "norm_topk_prob": True, **options}))
    return Qwen3MoeForCausalLM(config)


def _mixtral(options: dict[str, Any]) -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_common({"num_local_experts": EXPERTS, "intermediate_size": 24, **options}))
    return MixtralForCausalLM(config)


def _fragment(options: dict[str, Any]) -> Any:
    import moe_fragment.models.register  # noqa: F401
    from moe_fragment.models.configuration import FragmentMoeConfig
    from moe_fragment.models.modeling import FragmentMoeForCausalLM

    extras = {
        "num_experts": EXPERTS,
        "moe_intermediate_size": 24,
        "intermediate_size": 40,
        "num_shared_experts": 1,
        "scoring": "sigmoid",
        "routed_scaling_factor": 1.5,
        "router_bias": True,
        "router_bias_update_rate": 0.01,
        "router_z_loss_coef": 0.001,
    }
    return FragmentMoeForCausalLM(FragmentMoeConfig(**_common({**extras, **options})))


_CLASSES = {"qwen3": _qwen3, "mixtral": _mixtral, "fragment": _fragment}


@torch.no_grad()
def steer(model: Any, *, away_from: tuple[int, ...] = (), marked_to: int | None = None) -> None:
    """Bend a stock model's routers with two channels that the embedding makes nearly constant.

    Args:
        model: built by `build`, whole.
        away_from: experts that no token chooses.
        marked_to: expert that every token below `SIGNPOST` prefers to all others.
    """
    embedding = model.get_input_embeddings().weight
    embedding[:, :2] = 0.0
    # Three times the other channels: enough to steer by, and attention stays well conditioned.
    embedding[:, 0] = embedding[:SIGNPOST, 1] = 0.3 * EMBEDDING_SCALE
    for name, parameter in model.named_parameters():
        if name.endswith("post_attention_layernorm.weight"):
            parameter[:2] = 1.0
        elif name.endswith(("mlp.gate.weight", "mlp.router.weight")):
            parameter[:, :2] = 0.0
            parameter[list(away_from), 0] = -8.0
            if marked_to is not None:
                parameter[marked_to, 1] = 8.0
        elif name.endswith(("o_proj.weight", "down_proj", "down_proj.weight")):
            parameter[..., :2, :] = 0.0  # nothing but the embedding writes to the two channels


def whole_state(pieces: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """A whole model's parameters from canonical ones (`name` or `name#expert`)."""
    return {name: join(name, pieces) for name, _ in model.named_parameters()}


def join(name: str, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
    """One parameter from canonical pieces, experts stacked in the order of their global ids."""
    if name in pieces:
        return pieces[name]
    prefix = f"{name}#"
    experts = {int(key[len(prefix) :]): piece for key, piece in pieces.items() if key.startswith(prefix)}
    return torch.stack([experts[expert] for expert in range(len(experts))])

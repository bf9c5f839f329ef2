"""Tiny FragmentMoe models for every test here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import moe_fragment.models.register  # noqa: F401
from moe_fragment.models.configuration import FragmentMoeConfig
from moe_fragment.models.modeling import FragmentMoeForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 89,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}

MakeModel = Callable[..., FragmentMoeForCausalLM]


def tiny_config(**options: Any) -> FragmentMoeConfig:
    return FragmentMoeConfig(**{**TINY, **options})


@pytest.fixture
def make_model() -> MakeModel:
    """Build a tiny model in training mode; weights spread wide enough that routing is far from uniform."""

    def build(seed: int = 0, **options: Any) -> FragmentMoeForCausalLM:
        torch.manual_seed(seed)
        model = FragmentMoeForCausalLM(tiny_config(**options)).train()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        return model

    return build


@pytest.fixture
def tokens() -> torch.Tensor:
    """[3, 12] token ids."""
    return torch.randint(0, TINY["vocab_size"], (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def config() -> Callable[..., FragmentMoeConfig]:
    """`config(**options)`: a tiny configuration."""
    return tiny_config

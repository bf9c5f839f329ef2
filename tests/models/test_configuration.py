"""The configuration: defaults, aliases, and one clear error for each impossible field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from moe_fragment.models.configuration import FragmentMoeConfig


def test_round_trip_through_auto_config(config: Any, tmp_path: Path) -> None:
    first = config(router_bias=True, scoring="sigmoid", routed_scaling_factor=2.5, rope_theta=5e4)
    first.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is FragmentMoeConfig
    assert again.to_dict() | {"_name_or_path": ""} == first.to_dict()
    assert again.rope_parameters["rope_theta"] == 5e4


def test_head_dim_defaults_to_an_equal_split(config: Any) -> None:
    assert config().head_dim == 8
    assert config(head_dim=16).head_dim == 16
    assert config().num_local_experts == config().num_experts


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts_per_tok", 9),
        ("num_experts_per_tok", 0),
        ("num_experts", "8"),
        ("hidden_size", "wide"),
        ("hidden_size", 30),
        ("head_dim", 7),
        ("num_key_value_heads", 3),
        ("first_k_dense", 2),
        ("first_k_dense", -1),
        ("num_shared_experts", -1),
        ("scoring", "tanh"),
        ("hidden_act", "nothing"),
        ("routed_scaling_factor", 0),
        ("router_aux_loss_coef", -0.1),
        ("router_z_loss_coef", "1e-3"),
        ("attention_dropout", 1.0),
        ("router_bias", "yes"),
    ],
)
def test_impossible_fields_are_named(config: Any, field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"FragmentMoeConfig\.{field}: "):
        config(**{field: value})

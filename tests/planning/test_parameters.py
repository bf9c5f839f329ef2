"""Counting parameters and FLOPs: published totals, stock models, and shapes that make no sense."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from moe_fragment.planning.catalogue import models
from moe_fragment.planning.flops import attention_flops_per_token, training_flops_per_token
from moe_fragment.planning.parameters import count
from moe_fragment.planning.shape import ModelShape, from_transformers
from moe_fragment.schema import ConfigError

CATALOGUE = models()


@pytest.mark.parametrize("name", CATALOGUE)
def test_published_totals(name: str) -> None:
    row = CATALOGUE[name]
    counted = count(row.shape)
    assert row.published is not None
    slack = 0.03 if name == "Granite-3.0-1B-A400M" else 0.015  # it publishes "1B"
    assert counted.total == pytest.approx(row.published.total * 1e9, rel=slack)
    ways = (counted.active, counted.active_without_embedding, counted.active_without_embedding - counted.head)
    assert min(abs(way / (row.published.active * 1e9) - 1) for way in ways) < 0.11  # some publish one digit
    assert counted.trunk + counted.experts == counted.total


def test_deepseek_v3_to_the_parameter() -> None:
    counted = count(CATALOGUE["DeepSeek-V3"].shape)
    assert counted.one_expert == 3 * 7168 * 2048
    assert counted.experts == 58 * 256 * 3 * 7168 * 2048
    assert counted.total == 671_026_419_200  # without the multi-token-prediction layer


# Built by transformers in a process of its own, on the meta device.
COUNT = """
import json, sys, torch, transformers
transformers.logging.set_verbosity_error()
sizes = {}
for name, fields in json.load(sys.stdin).items():
    config = transformers.AutoConfig.for_model(**fields)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    buffers = sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    sizes[name] = [sum(p.numel() for p in model.parameters()) + buffers, config.to_dict()]
print(json.dumps(sizes, default=str))
"""
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "num_experts_per_tok": 2,
}
LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "n_routed_experts": 8,
}
DEEPSEEK = {
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "intermediate_size": 96,
}
STOCK: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "intermediate_size": 96, "num_local_experts": 6},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 6, "moe_intermediate_size": 24, "head_dim": 32},
    "qwen3_moe tied": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "moe_intermediate_size": 24,
        "head_dim": 32,
        "tie_word_embeddings": True,
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 6, "intermediate_size": 24},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 6, "intermediate_size": 24, "head_dim": 16},
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **LATENT,
        **DEEPSEEK,
        "q_lora_rank": None,
        "topk_group": 1,
        "n_group": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        **DEEPSEEK,
        "q_lora_rank": 20,
        "topk_group": 1,
        "n_group": 2,
    },
}


def test_stock_models_to_the_parameter() -> None:
    asked = {name: {**TINY, **fields} for name, fields in STOCK.items()}
    built = subprocess.run(
        [sys.executable, "-c", COUNT], input=json.dumps(asked), capture_output=True, text=True, timeout=100
    )
    assert built.returncode == 0, built.stderr
    for name, (parameters, config) in json.loads(built.stdout).items():
        assert count(from_transformers(config)).total == parameters, name


def test_flops_of_qwen3_235b_as_megatron_counts_them() -> None:
    # Published: 245 TFLOP/s on each of 256 H100s at 19.7 s per step of 2,048 sequences of 4,096 tokens.
    shape = CATALOGUE["Qwen3-235B-A22B"].shape
    per_token = training_flops_per_token(shape, 4096)
    assert per_token * 2048 * 4096 / 19.7 / 256 == pytest.approx(245e12, rel=0.01)
    assert training_flops_per_token(shape, 0) == 6 * count(shape).matmul
    assert attention_flops_per_token(shape, 8192) == 2 * attention_flops_per_token(shape, 4096)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"top_k": 9}, "top_k.*1 to num_experts"),
        ({"num_kv_heads": 3}, "num_kv_heads.*divisor"),
        ({"moe_intermediate_size": None}, "moe_intermediate_size.*required"),
        ({"first_k_dense": 5}, "first_k_dense.*at most"),
        ({"first_k_dense": 1}, "intermediate_size.*required"),
        ({"attention": "mla"}, "kv_lora_rank.*required"),
        ({"num_heads": 5, "num_kv_heads": 5}, "head_dim.*required"),
        ({"num_experts": 0}, "top_k.*nothing"),
        ({"hidden": 3}, "hidden.*unknown field"),
    ],
)
def test_shapes_that_make_no_sense(change: dict[str, Any], sentence: str) -> None:
    good = {
        "hidden_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "vocab_size": 100,
        "num_experts": 8,
        "top_k": 2,
        "moe_intermediate_size": 32,
    }
    ModelShape.model_validate(good)
    with pytest.raises(ValidationError, match=sentence):
        ModelShape.model_validate(good | change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": None}, "hidden_size: required"),
        ({"hidden_size": -1}, "hidden_size: expected at least 1"),
        ({"decoder_sparse_step": 2}, "not supported"),
        ({"moe_layer_freq": 2}, "moe_layer_freq: expected 1"),
        ({"n_shared_experts": "two"}, "n_shared_experts: expected a whole number"),
    ],
)
def test_configurations_that_cannot_be_counted(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        from_transformers({**TINY, **STOCK["mixtral"], **change})

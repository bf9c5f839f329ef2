"""Saving and loading through transformers: bit-equal logits, unchanged keys, an exact bias in bf16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_fragment.models.modeling import FragmentMoeForCausalLM, FragmentMoeModel
from moe_fragment.models.register import register
from moe_fragment.models.router import router_load, routers, update_router_bias
from tests.models.conftest import TINY, MakeModel

OPTIONS: list[dict[str, Any]] = [
    {},
    {"scoring": "sigmoid", "router_bias": True, "num_shared_experts": 2, "first_k_dense": 1},
    {"qk_norm": False, "attention_bias": True},
]


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "sigmoid", "bias"])
def test_round_trip_is_bit_equal(
    make_model: MakeModel, tokens: Tensor, tmp_path: Path, tie: bool, options: dict[str, Any]
) -> None:
    """transformers#30202, #41038: tied or not, nothing is missing and tying overwrites nothing."""
    model = make_model(tie_word_embeddings=tie, **options).eval()
    for router in routers(model):
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias.normal_(std=0.3)
    model.save_pretrained(tmp_path)
    expected = model(tokens).logits
    for loader in (AutoModelForCausalLM, FragmentMoeForCausalLM):
        again, report = loader.from_pretrained(tmp_path, output_loading_info=True)
        assert type(again) is FragmentMoeForCausalLM
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tie
        assert torch.equal(again.eval()(tokens).logits, expected)
        assert not router_load(again).any()
    body = AutoModel.from_pretrained(tmp_path).eval()
    assert type(body) is FragmentMoeModel
    assert torch.equal(body(tokens).last_hidden_state, model.model(tokens).last_hidden_state)


def test_file_holds_one_tensor_for_each_expert_under_the_names_of_qwen3_moe(
    make_model: MakeModel, tokens: Tensor, tmp_path: Path
) -> None:
    """transformers#33680: keys unchanged; plain Qwen3-MoE writes the same file."""
    model = make_model(first_k_dense=1).eval()
    model.save_pretrained(tmp_path / "ours")
    stock = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**TINY, head_dim=8, norm_topk_prob=True, mlp_only_layers=[0])
    ).eval()
    stock.load_state_dict(model.state_dict())
    stock.save_pretrained(tmp_path / "stock")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "stock"))
    assert "model.layers.1.mlp.experts.7.gate_proj.weight" in ours
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_names_with_gamma_and_beta_survive(make_model: MakeModel, tmp_path: Path) -> None:
    """transformers#33680: a sub-module whose name contains gamma or beta is saved under its own name."""
    model = make_model(num_shared_experts=1)
    model.model.layers[0].mlp.shared_experts.gamma_gate = torch.nn.Linear(2, 2, bias=False)
    model.model.layers[0].mlp.shared_experts.beta = torch.nn.Parameter(torch.ones(2))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    prefix = "model.layers.0.mlp.shared_experts."
    assert {prefix + "gamma_gate.weight", prefix + "beta"} <= saved.keys()


@pytest.mark.parametrize("file_dtype", [torch.float32, torch.bfloat16])
def test_bias_is_exact_in_bf16(
    make_model: MakeModel, tokens: Tensor, tmp_path: Path, file_dtype: torch.dtype
) -> None:
    """torchtitan#1506, DeepSpeed#7747: saved, restored in bf16 and moved on without losing a bit."""
    model = make_model(router_bias=True)
    for router in routers(model):
        router.e_score_correction_bias.normal_(std=3.0)
    expected = [router.e_score_correction_bias.clone() for router in routers(model)]
    model.to(file_dtype).save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert again.lm_head.weight.dtype == torch.bfloat16
    for router, bias in zip(routers(again), expected, strict=True):
        assert router.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(router.e_score_correction_bias, bias)
    assert again.model.rotary_emb.inv_freq.dtype == torch.float32
    again.train()(tokens, labels=tokens).loss.backward()
    update_router_bias(again, router_load(again))
    assert not torch.equal(routers(again)[0].e_score_correction_bias, expected[0])


def test_casting_equals_loading_in_bf16(make_model: MakeModel, tokens: Tensor, tmp_path: Path) -> None:
    model = make_model(router_bias=True).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert torch.equal(model.to(torch.bfloat16)(tokens).logits, loaded(tokens).logits)


def test_loading_without_bias_in_the_file_starts_it_at_zero(make_model: MakeModel, tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, router_bias=True)
    assert all(not router.e_score_correction_bias.any() for router in routers(model))


def test_register_twice_changes_nothing(make_model: MakeModel, tmp_path: Path) -> None:
    register()
    register()
    make_model().save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is FragmentMoeForCausalLM

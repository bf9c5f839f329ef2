"""FragmentMoe as a model: parity with Qwen3-MoE, options, cache, attention, activation checkpointing."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from moe_fragment.models.configuration import FragmentMoeConfig
from moe_fragment.models.modeling import FragmentMoeForCausalLM
from tests.models.conftest import TINY, MakeModel


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def qwen3_moe(**options: Any) -> Qwen3MoeForCausalLM:
    torch.manual_seed(3)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, head_dim=8, norm_topk_prob=True, **options))


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dense", [0, 1])
def test_equals_qwen3_moe_on_shared_weights(tokens: torch.Tensor, experts: str, dense: int) -> None:
    stock = qwen3_moe(mlp_only_layers=list(range(dense)))
    ours = FragmentMoeForCausalLM(FragmentMoeConfig(**TINY, first_k_dense=dense, router_aux_loss_coef=0.0))
    ours.load_state_dict(stock.state_dict(), strict=True)
    for model in (stock, ours):
        model.set_experts_implementation(experts)
        model(input_ids=tokens, labels=tokens).loss.backward()
    torch.testing.assert_close(ours(tokens).logits, stock(tokens).logits, rtol=0, atol=0)
    expected = gradients(stock)
    assert expected.keys() == gradients(ours).keys()
    for name, grad in gradients(ours).items():
        torch.testing.assert_close(grad, expected[name], rtol=0, atol=1e-7, msg=name)


def test_experts_implementations_agree_and_are_really_selected(
    make_model: MakeModel, tokens: torch.Tensor
) -> None:
    model = make_model()
    assert model.config._experts_implementation == "grouped_mm"
    logits, grads = {}, {}
    for name in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        assert model.model.layers[0].mlp.experts.config._experts_implementation == name
        model.zero_grad()
        out = model(tokens, labels=tokens)
        out.loss.backward()
        logits[name], grads[name] = out.logits, gradients(model)
    for name in ("grouped_mm", "batched_mm"):
        torch.testing.assert_close(logits[name], logits["eager"], rtol=1e-5, atol=1e-5)
        for key, grad in grads[name].items():
            torch.testing.assert_close(grad, grads["eager"][key], rtol=1e-4, atol=1e-5, msg=key)


def test_subclasses_keep_the_choice_of_experts_implementation(config: Any) -> None:
    """transformers looks for the decorator in the subclass's source file, and would run eager in silence."""

    class Mine(FragmentMoeForCausalLM):
        pass

    model = Mine(config())
    model.set_experts_implementation("batched_mm")
    assert model.config._experts_implementation == "batched_mm"


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_eager_experts_stay_connected_without_tokens(make_model: MakeModel, num_tokens: int) -> None:
    experts = make_model(num_experts_per_tok=1).model.layers[0].mlp.experts
    experts.config._experts_implementation = "eager"
    hidden = torch.randn(num_tokens, 32, requires_grad=True)
    index = torch.zeros(num_tokens, 1, dtype=torch.int64)
    experts(hidden, index, torch.ones(num_tokens, 1)).sum().backward()
    assert hidden.grad is not None
    assert experts.gate_up_proj.grad is not None
    assert not experts.gate_up_proj.grad[1:].any()


OPTIONS = [
    {"scoring": scoring, "qk_norm": qk_norm, "num_shared_experts": shared, "router_bias": bias}
    for scoring, qk_norm, shared, bias in product(
        ("softmax", "sigmoid"), (True, False), (0, 2), (False, True)
    )
] + [
    {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    {"scoring": "sigmoid", "norm_topk_prob": False, "first_k_dense": 1, "attention_bias": True},
    {"tie_word_embeddings": True, "num_key_value_heads": 4},
    {"num_experts_per_tok": 1, "norm_topk_prob": False},
    {"num_experts_per_tok": 8},
    {"attention_dropout": 0.1, "head_dim": 16, "num_key_value_heads": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()))
def test_every_option_trains(make_model: MakeModel, tokens: torch.Tensor, options: dict[str, Any]) -> None:
    model = make_model(router_z_loss_coef=1e-3, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_float64_is_computed_in_float64(make_model: MakeModel, tokens: torch.Tensor) -> None:
    """No fp32 step on the way: a change far below fp32 resolution arrives in the logits at its own size."""
    model = make_model(scoring="sigmoid", num_shared_experts=1).double().eval()
    model.set_experts_implementation("eager")  # torch's grouped_mm has no fp64
    embeds = model.model.embed_tokens(tokens)
    with torch.no_grad():
        base = model(inputs_embeds=embeds).logits
        moved = (model(inputs_embeds=embeds * (1 + 1e-11)).logits - base).abs().max()
        twice = (model(inputs_embeds=embeds * (1 + 2e-11)).logits - base).abs().max()
    assert 0 < moved < 1e-9
    torch.testing.assert_close(twice / moved, torch.tensor(2.0, dtype=torch.float64), rtol=0.05, atol=0)


def test_eager_attention_equals_sdpa(make_model: MakeModel, tokens: torch.Tensor) -> None:
    model = make_model().eval()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    logits = {}
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        logits[name] = model(tokens, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(logits["eager"], logits["sdpa"], rtol=1e-5, atol=1e-5)
    model.set_attn_implementation("eager")
    assert len(model(tokens, output_attentions=True).attentions) == 2


@pytest.mark.parametrize(
    "options", [{}, {"scoring": "sigmoid", "num_shared_experts": 1, "router_bias": True}]
)
def test_generate_with_cache_equals_greedy_without(
    make_model: MakeModel, tokens: torch.Tensor, options: dict[str, Any]
) -> None:
    model = make_model(**options).eval()
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0
    cached = model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    plain = tokens
    with torch.no_grad():
        for _ in range(8):
            positions = (mask.cumsum(-1) - 1).clamp(min=0)
            logits = model(plain, attention_mask=mask, position_ids=positions, use_cache=False).logits
            plain = torch.cat([plain, logits[:, -1:].argmax(-1)], dim=1)
            mask = torch.cat([mask, mask.new_ones(3, 1)], dim=1)
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("enable", ["activation_checkpointing_enable", "gradient_checkpointing_enable"])
def test_gradients_equal_under_checkpointing(
    make_model: MakeModel, tokens: torch.Tensor, reentrant: bool, enable: str
) -> None:
    """The auxiliary losses too reach the router through a checkpointed layer, reentrant or not."""
    model = make_model(router_aux_loss_coef=0.5, router_z_loss_coef=0.5, first_k_dense=1, num_hidden_layers=3)
    if not hasattr(model, enable):
        pytest.skip(f"this transformers has no {enable}")
    out = model(tokens, labels=tokens)
    out.loss.backward()
    plain = gradients(model)
    model.zero_grad()
    checkpointed(model, enable, reentrant)
    again = model(tokens, labels=tokens, output_router_logits=True)
    again.loss.backward()
    assert again.loss.item() == out.loss.item()
    assert len(again.router_logits) == 2
    for name, grad in gradients(model).items():
        assert torch.equal(grad, plain[name]), name


def checkpointed(model: FragmentMoeForCausalLM, enable: str, reentrant: bool) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # gradient_checkpointing_enable is the older name
        getattr(model, enable)({"use_reentrant": reentrant})
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_hidden_states_and_slices_of_logits(make_model: MakeModel, tokens: torch.Tensor) -> None:
    model = make_model().eval()
    out = model(tokens, output_hidden_states=True, logits_to_keep=2)
    assert [tuple(h.shape) for h in out.hidden_states] == [(3, 12, 32)] * 3
    torch.testing.assert_close(out.logits, model(tokens).logits[:, -2:])
    with pytest.raises(ValueError, match="exactly one of"):
        model.model()

"""Routing: weights by definition, and fp32 whatever the dtypes and autocast say."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_fragment.models.router import (
    FragmentMoeRouter,
    routers,
)
from tests.models.conftest import TINY, MakeModel, tiny_config

E, K = TINY["num_experts"], TINY["num_experts_per_tok"]


@pytest.mark.parametrize(("norm", "scale"), [(True, 1.0), (True, 2.5), (False, 1.0), (False, 2.5)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_weights_by_definition(scoring: str, norm: bool, scale: float) -> None:
    torch.manual_seed(1)
    router = FragmentMoeRouter(tiny_config(scoring=scoring, norm_topk_prob=norm, routed_scaling_factor=scale))
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(2, 9, 32)
    _, weights, index = router(hidden)
    for token, row in enumerate(hidden.reshape(-1, 32)):
        logits = router.weight @ row
        scores = logits.softmax(0) if scoring == "softmax" else logits.sigmoid()
        assert set(index[token].tolist()) == set(scores.topk(K).indices.tolist())
        expected = scores[index[token]] / (scores[index[token]].sum() if norm else 1) * scale
        torch.testing.assert_close(weights[token], expected)


def near_tied(scoring: str) -> tuple[FragmentMoeRouter, Tensor]:
    """A router with fp32 weight whose rows differ by less than bf16 can see, and tokens for it."""
    torch.manual_seed(0)
    router = FragmentMoeRouter(tiny_config(scoring=scoring))
    with torch.no_grad():
        router.weight.copy_(torch.randn(1, 32) + 1e-4 * torch.randn(E, 32))
    return router, torch.randn(200, 32)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_near_ties_choose_the_same_experts_under_autocast(scoring: str) -> None:
    """megablocks#91: fp32 logits under autocast."""
    router, hidden = near_tied(scoring)
    logits, weights, index = router(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = router(hidden)
        assert F.linear(hidden, router.weight).topk(K).indices.ne(index).any(), "the ties are not near enough"
    for got, expected in zip(cast, (logits, weights, index), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("weight", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [torch.bfloat16, torch.float32])
def test_router_computes_in_fp32_for_any_mix_of_dtypes(weight: torch.dtype, inputs: torch.dtype) -> None:
    """DeepSpeed#7747: the router may stay fp32 in a bf16 model, or be cast with it."""
    router, hidden = near_tied("softmax")
    router.weight.data = router.weight.data.to(weight)
    hidden = hidden.to(inputs)
    logits, weights, _ = router(hidden)
    assert logits.dtype == weights.dtype == torch.float32
    assert torch.equal(logits, F.linear(hidden.float(), router.weight.float()))


def test_bf16_model_runs_and_trains_with_fp32_router(make_model: MakeModel, tokens: Tensor) -> None:
    """DeepSpeed#7747."""
    model = make_model(scoring="sigmoid", router_bias=True, num_shared_experts=1, router_z_loss_coef=1e-3)
    model.to(torch.bfloat16)
    for router in routers(model):
        router.float()
    out = model(tokens, labels=tokens, output_router_logits=True)
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16
    assert {layer.dtype for layer in out.router_logits} == {torch.float32}
    assert {router.weight.grad.dtype for router in routers(model)} == {torch.float32}


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_whole_model_trains_under_autocast(make_model: MakeModel, tokens: Tensor, experts: str) -> None:
    """megablocks#91: fp32 losses and raw fp32 router logits, whichever experts implementation runs."""
    model = make_model(router_z_loss_coef=0.1, num_shared_experts=1)
    model.set_experts_implementation(experts)
    exact = model(tokens, labels=tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(tokens, labels=tokens, output_router_logits=True)
    out.loss.backward()
    assert {layer.dtype for layer in out.router_logits} == {torch.float32}
    assert out.aux_loss.dtype == torch.float32
    torch.testing.assert_close(out.loss, exact.loss, rtol=0.03, atol=0)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("cast", ["to", "bfloat16", "half", "double", "again"])
def test_casting_the_model_keeps_bias_and_rotary_exact(make_model: MakeModel, cast: str) -> None:
    """A bias of 5 would swallow an update of 1e-3 in bf16."""
    model = make_model(router_bias=True)
    bias = routers(model)[0].e_score_correction_bias
    with torch.no_grad():
        bias.fill_(5.001)
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    casts = {
        "to": lambda: model.to(torch.bfloat16),
        "bfloat16": model.bfloat16,
        "half": model.half,
        "double": model.double,
        "again": lambda: copy.deepcopy(model.bfloat16()).to("cpu", torch.bfloat16),
    }
    changed = casts[cast]()
    assert changed.lm_head.weight.dtype != torch.float32
    kept = routers(changed)[0].e_score_correction_bias
    assert kept.dtype == torch.float32
    assert torch.equal(kept, torch.full((E,), 5.001))
    assert torch.equal(changed.model.rotary_emb.inv_freq, inv_freq)

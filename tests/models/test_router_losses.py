"""Balance and z-loss: per layer, without padding, in the training loss by default, no state left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_fragment.models.router import (
    FragmentMoeRouter,
    balance_loss,
    reset_router_load,
    router_load,
    routers,
    z_loss,
)
from tests.models.conftest import TINY, MakeModel, tiny_config

E, K = TINY["num_experts"], TINY["num_experts_per_tok"]


def pad(tokens: Tensor, side: str, width: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    """The same sequences with padding: tokens, attention mask, labels."""
    where = (width, 0) if side == "left" else (0, width)
    labels = F.pad(tokens[:, 1:], (1, 0), value=-100)  # nothing but padding could predict the first token
    return (
        F.pad(tokens, where, value=7),
        F.pad(torch.ones_like(tokens), where, value=0),
        F.pad(labels, where, value=-100),
    )


@settings(max_examples=25, deadline=None)
@given(experts=st.integers(1, 12), data=st.data())
def test_uniform_routing_costs_exactly_top_k(experts: int, data: Any) -> None:
    """transformers#31464: Switch scaling, so that uniform routing gives top_k for every E and k."""
    top_k = data.draw(st.integers(1, experts))
    index = torch.stack([(torch.arange(top_k) + start) % experts for start in range(experts)])
    scores = torch.full((experts, experts), 0.3)
    torch.testing.assert_close(balance_loss(scores[None], index[None]), torch.tensor(float(top_k)))


def test_collapsed_layers_are_not_averaged_away(make_model: MakeModel, tokens: Tensor) -> None:
    """transformers#31464: layers collapsed on different experts cost L * E, not the k of pooled layers."""
    model = make_model(num_hidden_layers=4, num_experts=4, num_experts_per_tok=1, router_aux_loss_coef=1.0)
    for expert, router in enumerate(routers(model)):
        with torch.no_grad():
            router.weight.zero_()
            bias = torch.zeros(4)
            bias[expert] = 50.0
            router.scores = lambda logits, bias=bias: (logits + bias).softmax(-1)  # type: ignore[method-assign]
    torch.testing.assert_close(model(tokens).aux_loss, torch.tensor(16.0))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_losses_by_definition(scoring: str) -> None:
    """Of two sequences with 20 and 12 tokens: each by itself, averaged with their tokens as weights."""
    torch.manual_seed(0)
    router = FragmentMoeRouter(tiny_config(scoring=scoring))
    torch.nn.init.normal_(router.weight)
    logits, _, index = router(torch.randn(2, 20, 32))
    scores = router.scores(logits)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, :8] = False
    expected = 0.0
    for row, real in enumerate(mask):
        ids, probabilities = index.view(2, 20, K)[row][real], scores.view(2, 20, E)[row][real]
        for expert in range(E):
            assigned = (ids == expert).sum() / real.sum()
            share = (probabilities[:, expert] / probabilities.sum(-1)).mean()
            expected += E * assigned * share * real.sum() / mask.sum()
    torch.testing.assert_close(balance_loss(scores.view(2, 20, E), index.view(2, 20, K), mask), expected)
    torch.testing.assert_close(z_loss(logits), logits.exp().sum(-1).log().pow(2).mean())


@pytest.mark.parametrize("coefs", [(1.0, 0.0), (0.0, 1.0), (0.3, 0.2)], ids=["balance", "z", "both"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_padding_counts_in_no_loss_and_no_load(
    make_model: MakeModel, tokens: Tensor, coefs: tuple[float, float], side: str, scoring: str
) -> None:
    """transformers#28505, Megatron-LM#1984: padded equals unpadded on either side, with its gradients."""
    model = make_model(router_aux_loss_coef=coefs[0], router_z_loss_coef=coefs[1], scoring=scoring)
    plain = model(tokens, labels=tokens)
    plain.loss.backward()
    load, grad = router_load(model), routers(model)[0].weight.grad
    reset_router_load(model)
    model.zero_grad()
    padded, mask, labels = pad(tokens, side)
    out = model(padded, attention_mask=mask, labels=labels)
    out.loss.backward()
    torch.testing.assert_close(out.aux_loss, plain.aux_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.loss, plain.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(routers(model)[0].weight.grad, grad, rtol=1e-4, atol=1e-6)
    assert torch.equal(router_load(model), load)
    assert load.sum(1).tolist() == [tokens.numel() * K] * 2


def test_all_padding_costs_nothing(make_model: MakeModel, tokens: Tensor) -> None:
    model = make_model(router_z_loss_coef=1.0)
    assert model(tokens, attention_mask=torch.zeros_like(tokens)).aux_loss == 0
    assert not router_load(model).any()


def test_aux_loss_is_on_by_default_in_training(make_model: MakeModel, tokens: Tensor) -> None:
    """transformers#44242: without output_router_logits too, loss and router gradient contain the aux term."""
    grads = {}
    for coef in (0.0, 10.0):
        model = make_model(router_aux_loss_coef=coef)
        assert not model.config.output_router_logits
        out = model(tokens, labels=tokens)
        out.loss.backward()
        ce = F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        torch.testing.assert_close(out.loss, ce + (out.aux_loss if coef else 0))
        grads[coef] = routers(model)[0].weight.grad
    assert (grads[0.0] - grads[10.0]).norm() > 0.1 * grads[0.0].norm()


def test_aux_loss_without_labels_and_in_evaluation(make_model: MakeModel, tokens: Tensor) -> None:
    """A loop with its own cross-entropy gets aux_loss; the evaluation loss is the cross-entropy alone."""
    model = make_model(router_aux_loss_coef=1.0)
    trained = model(tokens)
    assert trained.loss is None
    assert trained.aux_loss.requires_grad
    model.eval()
    out = model(tokens, labels=tokens)
    assert out.aux_loss is None
    torch.testing.assert_close(
        out.loss, F.cross_entropy(out.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    )
    asked = model(tokens, labels=tokens, output_router_logits=True)
    torch.testing.assert_close(asked.aux_loss, trained.aux_loss)
    assert asked.loss == out.loss


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_aux_weight_does_not_grow_with_the_number_of_parts(
    make_model: MakeModel, tokens: Tensor, parts: int
) -> None:
    """transformers#48690: with num_items_in_batch, the shares of all ranks add up to one step's loss."""
    model = make_model(router_aux_loss_coef=1.0)
    rows = torch.cat([tokens, tokens.flip(1)])[:6]
    items = torch.tensor(rows.shape[0] * (rows.shape[1] - 1))
    whole = model(rows, labels=rows)
    total = sum(model(part, labels=part, num_items_in_batch=items).loss for part in rows.chunk(parts))
    torch.testing.assert_close(total, whole.loss)


def test_no_state_survives_a_forward(make_model: MakeModel, tokens: Tensor) -> None:
    """megablocks#113: an evaluation between training steps, another batch size, two models at once."""
    model = make_model(router_aux_loss_coef=1.0)
    other = make_model(seed=5, router_aux_loss_coef=1.0)
    before = model(tokens).aux_loss
    model.activation_checkpointing_enable()
    model.eval()
    with torch.no_grad():
        model(tokens[:1])
    model.train()
    other(tokens[:2]).aux_loss.backward()
    after = model(tokens).aux_loss
    after.backward()
    assert torch.equal(before, after)


def test_router_logits_are_raw(make_model: MakeModel, tokens: Tensor) -> None:
    """transformers#45120: logits, not probabilities; [T, E] of each MoE layer."""
    model = make_model(first_k_dense=1, num_hidden_layers=3)
    logits = model(tokens, output_router_logits=True).router_logits
    assert [tuple(layer.shape) for layer in logits] == [(tokens.numel(), E)] * 2
    for layer in logits:
        assert (layer < 0).any()
        assert ((layer.sum(-1) - 1).abs() > 1e-3).any()

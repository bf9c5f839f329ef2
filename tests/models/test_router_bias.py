"""The auxiliary-loss-free bias and the load it follows: centred, once a step, counted once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_fragment.models.modeling import FragmentMoeForCausalLM
from moe_fragment.models.router import (
    FragmentMoeRouter,
    reset_router_load,
    router_load,
    routers,
    update_router_bias,
)
from tests.models.conftest import TINY, MakeModel, tiny_config

E, K = TINY["num_experts"], TINY["num_experts_per_tok"]


def test_bias_steers_selection_but_not_weights() -> None:
    router = FragmentMoeRouter(tiny_config(router_bias=True, norm_topk_prob=False))
    torch.nn.init.normal_(router.weight)
    hidden = torch.randn(16, 32)
    router.e_score_correction_bias[3] = 10.0
    logits, weights, index = router(hidden)
    assert (index == 3).any(-1).all()
    torch.testing.assert_close(weights, logits.softmax(-1).gather(1, index))


def test_bias_stays_centred() -> None:
    """torchtitan#1506: |mean| < 1e-6 after 1000 updates of a lopsided load."""
    model = FragmentMoeForCausalLM(tiny_config(router_bias=True))
    generator = torch.Generator().manual_seed(0)
    for _ in range(1000):
        update_router_bias(model, torch.rand(2, E, generator=generator) ** 4)
    for router in routers(model):
        assert router.e_score_correction_bias.abs().max() > 1e-3
        assert abs(router.e_score_correction_bias.mean()) < 1e-6


def test_bias_moves_towards_balance(make_model: MakeModel) -> None:
    model = make_model(router_bias=True, router_bias_update_rate=0.02, scoring="sigmoid")
    tokens = torch.randint(0, TINY["vocab_size"], (16, 24), generator=torch.Generator().manual_seed(3))
    excess = []
    for _ in range(40):
        model(tokens)
        load = router_load(model)
        reset_router_load(model)
        excess.append((load.max(1).values / load.double().mean(1)).mean().item() - 1)
        update_router_bias(model, load)
    assert sum(excess[-10:]) / 10 < 0.6 * excess[0]


def test_bias_update_is_the_same_for_any_accumulation(make_model: MakeModel) -> None:
    """torchtitan#1304: one update a step, from the load of all its micro-batches."""
    batch = torch.randint(0, 89, (8, 6), generator=torch.Generator().manual_seed(2))
    biases = []
    for micro in (1, 2, 8):
        model = make_model(router_bias=True)
        for part in batch.chunk(micro):
            model(part, labels=part).loss.backward()
        update_router_bias(model, router_load(model))
        reset_router_load(model)
        assert not router_load(model).any()
        biases.append(torch.stack([router.e_score_correction_bias for router in routers(model)]))
    assert biases[0].any()
    assert torch.equal(biases[0], biases[1])
    assert torch.equal(biases[0], biases[2])


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_load_is_counted_once_under_checkpointing(
    make_model: MakeModel, tokens: Tensor, reentrant: bool | None
) -> None:
    """torchtitan#1593: recomputation in the backward counts nothing."""
    model = make_model()
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    for _ in range(2):
        model(tokens, labels=tokens).loss.backward()
    assert router_load(model).sum(1).tolist() == [2 * tokens.numel() * K] * 2


def test_only_training_counts(make_model: MakeModel, tokens: Tensor) -> None:
    model = make_model(router_bias=True)
    with torch.no_grad():
        model(tokens)
    model.generate(tokens, max_new_tokens=2, do_sample=False, pad_token_id=0)
    model.eval()
    model(tokens)
    assert not router_load(model).any()
    assert "tokens_per_expert" not in " ".join(model.state_dict())


def test_wrong_calls_are_named(make_model: MakeModel) -> None:
    with pytest.raises(ValueError, match="router_bias=True"):
        update_router_bias(make_model(), torch.zeros(2, E))
    with pytest.raises(ValueError, match=r"\(1, 8\), expected \(2, 8\)"):
        update_router_bias(make_model(router_bias=True), torch.zeros(1, E))
    with pytest.raises(ValueError, match="no FragmentMoe router"):
        router_load(torch.nn.Linear(1, 1))

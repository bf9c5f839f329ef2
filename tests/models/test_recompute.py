"""Recomputed layers: the same gradients, and every token goes where it went."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fragment.models.recompute import recompute_layers
from tests.fleet.models import VOCABULARY, build


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "fragment"])
def test_gradients_are_those_without_recomputation(kind: str) -> None:
    found = []
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    for recompute in (False, True):
        model = build(kind)
        if recompute:
            recompute_layers(model)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        found.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "fragment"])
def test_routing_is_replayed(kind: str) -> None:
    """Even if the routers would choose otherwise by then."""
    model = build(kind)
    recompute_layers(model)
    chosen: list[torch.Tensor] = []

    def watch(_module: Any, inputs: tuple[Any, ...]) -> None:
        chosen.append(inputs[1].clone())

    for layer in model.model.layers:
        layer.mlp.experts.register_forward_pre_hook(watch)
    tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    forward = list(chosen)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("mlp.gate.weight", "mlp.router.weight")):
                parameter.neg_()
    loss.backward()
    assert len(chosen) == 2 * len(forward) == 4
    for one, other in zip(forward, reversed(chosen[2:]), strict=True):
        assert torch.equal(one, other)

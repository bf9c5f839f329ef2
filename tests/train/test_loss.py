"""Losses are sums: however a step's sequences are cut into micro-batches, they add up to the same."""

from __future__ import annotations

import pytest
import torch

from moe_fragment.train.loss import IGNORED, Batch, micro_batch_losses
from tests.fleet.models import VOCABULARY, build


def padded_batch() -> Batch:
    """Four sequences: whole, padded left, padded right, and one that is padding only."""
    batch = Batch.of(torch.randint(0, VOCABULARY, (4, 13), generator=torch.Generator().manual_seed(0)), 0)
    mask, labels = torch.ones_like(batch.input_ids), batch.labels.clone()
    for row, where in enumerate((slice(0, 0), slice(0, 5), slice(9, 12), slice(0, 12))):
        mask[row, where] = 0
        labels[row, where] = IGNORED
    return Batch(batch.input_ids, labels, mask)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "fragment"])
def test_losses_add_up_over_micro_batches(kind: str) -> None:
    """Balance losses included, stock ones and ours (a large coefficient lets them count)."""
    model = build(kind, router_aux_loss_coef=1.0)
    batch = padded_batch()
    whole = micro_batch_losses(model, batch)
    plain = micro_batch_losses(model, batch, auxiliary=False)
    assert whole.tokens == 12 + 7 + 9
    assert float((whole.total - plain.total).detach() / whole.tokens) > 1.0  # top-2: a balanced layer costs 2
    whole.total.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    total = 0.0
    for rows in ([0], [1, 2], [3]):
        assert batch.attention_mask is not None
        part = Batch(batch.input_ids[rows], batch.labels[rows], batch.attention_mask[rows])
        losses = micro_batch_losses(model, part)
        losses.total.backward()
        total += float(losses.total.detach())
    assert total == pytest.approx(float(whole.total.detach()), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-4, msg=name)

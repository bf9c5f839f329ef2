"""Losses as sums: the only form that adds up over micro-batches, ranks and clusters of unequal size.

Each micro-batch contributes the sum of its token losses. The fleet divides once per step by the true number of
loss-bearing tokens. An auxiliary loss is a mean over a micro-batch's tokens, so it is weighted with their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

IGNORED = -100
"""Label of a position that bears no loss."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        input_ids: int64 [B, S].
        labels: int64 [B, S], already shifted (label t is the token after input t); IGNORED bears no loss.
        attention_mask: int64 [B, S] with 0 at padding, or None without padding.
        filler: stands for no sequence at all, and counts in no statistics.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    filler: bool = False

    @property
    def tokens(self) -> int:
        """Loss-bearing tokens."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        mask = self.attention_mask.to(device) if self.attention_mask is not None else None
        return Batch(self.input_ids.to(device), self.labels.to(device), mask, self.filler)

    @staticmethod
    def of(sequences: torch.Tensor, filler: int) -> Batch:
        """From packed sequences int64 [B, S + 1]; of none, one token without loss, so that every rank runs."""
        if not len(sequences):
            lone = torch.full((1, 1), filler)
            return Batch(lone, torch.full_like(lone, IGNORED), filler=True)
        return Batch(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous())


@dataclass(frozen=True)
class Losses:
    """Sums over one micro-batch: `total` is backpropagated, `cross_entropy` is what people look at (nats)."""

    total: torch.Tensor
    cross_entropy: torch.Tensor
    tokens: int


def micro_batch_losses(model: Any, batch: Batch, *, auxiliary: bool = True) -> Losses:
    """Run `model` (a transformers causal LM or an engine around one) on a batch.

    Args:
        model: called with input_ids and attention_mask.
        batch: on the model's device.
        auxiliary: whether to add the router losses, as in training.
    """
    with_router = auxiliary and stock_auxiliary_weight(model) > 0
    outputs = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        **({"output_router_logits": True} if with_router else {}),
    )
    logits = outputs.logits.float() if outputs.logits.dtype.itemsize < 4 else outputs.logits
    cross_entropy = F.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    tokens = batch.tokens
    total = cross_entropy
    router_loss = getattr(outputs, "aux_loss", None)
    if auxiliary and router_loss is not None:
        weight = stock_auxiliary_weight(model) if with_router else 1.0
        total = total + weight * tokens * router_loss.to(total.dtype)
    return Losses(total, cross_entropy.detach(), tokens)


def stock_auxiliary_weight(model: Any) -> float:
    """Coefficient of a stock model's auxiliary loss, which its output leaves unweighted; 0 for FragmentMoe.

    FragmentMoe returns its router losses weighted and summed. A stock model returns them only when asked for router
    logits (transformers#44242), which is why a positive coefficient asks for them.
    """
    config = getattr(model, "module", model).config
    if config.model_type == "moe_fragment":
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)

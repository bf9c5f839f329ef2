"""Losses as sums: the only form that adds up over micro-batches, ranks and clusters of unequal size.

Each micro-batch contributes the sum of its token losses. The fleet divides once per step by the true number of
loss-bearing tokens. Balance losses belong to a sequence, so that they too are sums, however a step's sequences are cut
into micro-batches: each is a mean over tokens, and weighted with their number.
"""

from __future__ import annotations

import sys
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
    if with_router:
        total = total + stock_auxiliary_weight(model) * _stock_auxiliary(model, outputs.router_logits, batch)
    elif auxiliary and (router_loss := getattr(outputs, "aux_loss", None)) is not None:
        total = total + tokens * router_loss.to(total.dtype)
    return Losses(total, cross_entropy.detach(), tokens)


def _stock_auxiliary(model: Any, router_logits: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
    """A stock family's own balance loss of each sequence, weighted with its loss-bearing tokens and summed.

    The one in its output is of the whole micro-batch, which is not a sum over sequences.
    """
    inner = getattr(model, "module", model)
    balance = sys.modules[type(inner).__module__].load_balancing_loss_func
    length = batch.labels.shape[1]
    terms = []
    # Sequences without a loss stay in the graph with weight 0: under ZeRO-3 all ranks run the same backward.
    for row, tokens in enumerate((batch.labels != IGNORED).sum(1).tolist()):
        own = tuple(layer_TE[row * length : (row + 1) * length] for layer_TE in router_logits)
        mask = batch.attention_mask[row : row + 1] if batch.attention_mask is not None and tokens else None
        terms.append(tokens * balance(own, inner.num_experts, inner.num_experts_per_tok, mask))
    return torch.stack(terms).sum()


def stock_auxiliary_weight(model: Any) -> float:
    """Coefficient of a stock model's auxiliary loss, which its output leaves unweighted; 0 for FragmentMoe.

    FragmentMoe returns its router losses weighted and summed. A stock model returns them only when asked for router
    logits (transformers#44242), which is why a positive coefficient asks for them.
    """
    config = getattr(model, "module", model).config
    if config.model_type == "moe_fragment":
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)

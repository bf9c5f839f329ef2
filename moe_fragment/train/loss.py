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
    outputs = model(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        use_cache=False,
        **(router_options(model) if auxiliary else {}),
    )
    cross_entropy = token_losses(outputs.logits, batch)
    total, router_loss = cross_entropy, auxiliary_loss(model, outputs, batch) if auxiliary else None
    if router_loss is not None:
        total = total + router_loss.to(total.dtype)
    return Losses(total, cross_entropy.detach(), batch.tokens)


def token_losses(logits_BSV: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Sum of the cross-entropies (nats) of a batch's loss-bearing tokens, in fp32 at least."""
    exact = logits_BSV.float() if logits_BSV.dtype.itemsize < 4 else logits_BSV
    return F.cross_entropy(exact.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum")


def router_options(model: Any) -> dict[str, bool]:
    """What a model must be called with to give what `auxiliary_loss` needs.

    A stock model returns router logits only when asked for them (transformers#44242).
    """
    return {"output_router_logits": True} if stock_auxiliary_weight(model) > 0 else {}


def auxiliary_loss(model: Any, outputs: Any, batch: Batch) -> torch.Tensor | None:
    """Router losses of the layers that ran, coefficients applied, weighted with the batch's loss-bearing tokens.

    A sum over layers as well as over sequences, so that each stage of a pipeline can add its own. None without any.

    Args:
        model: a causal LM, a stage of one, or an engine around one.
        outputs: of it or of its decoder.
        batch: that it ran on.
    """
    if weight := stock_auxiliary_weight(model):
        logits = outputs.router_logits
        return weight * _stock_auxiliary(model, logits, batch) if logits else None
    router_loss = getattr(outputs, "aux_loss", None)
    return None if router_loss is None else batch.tokens * router_loss


def _stock_auxiliary(model: Any, router_logits: tuple[torch.Tensor, ...], batch: Batch) -> torch.Tensor:
    """A stock family's own balance loss of each sequence and layer, weighted with its loss-bearing tokens and summed,
    and divided by the number of the whole model's MoE layers.

    The one in its output is of the whole micro-batch, which is not a sum over sequences, and multiplies the load of one
    layer with the scores of another, which is none over layers. Where routing is balanced all have the same value.
    """
    inner = getattr(model, "module", model)
    balance = sys.modules[type(inner).__module__].load_balancing_loss_func
    fragmented = getattr(inner, "fragmented", None)
    layers = len(router_logits) if fragmented is None else len(fragmented.placement.layers)
    length = batch.labels.shape[1]
    terms = []
    # Sequences without a loss stay in the graph with weight 0: under ZeRO-3 all ranks run the same backward.
    for row, tokens in enumerate((batch.labels != IGNORED).sum(1).tolist()):
        mask = batch.attention_mask[row : row + 1] if batch.attention_mask is not None and tokens else None
        for layer_TE in router_logits:
            own_TE = layer_TE[row * length : (row + 1) * length]
            terms.append(tokens * balance((own_TE,), inner.num_experts, inner.num_experts_per_tok, mask))
    return torch.stack(terms).sum() / layers


def stock_auxiliary_weight(model: Any) -> float:
    """Coefficient of a stock model's auxiliary loss, which its output leaves unweighted; 0 for FragmentMoe.

    FragmentMoe returns its router losses weighted and summed.
    """
    config = getattr(model, "module", model).config
    if config.model_type == "moe_fragment":
        return 0.0
    return float(getattr(config, "router_aux_loss_coef", 0.0) or 0.0)

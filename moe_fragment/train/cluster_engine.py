"""A DeepSpeed engine around a fragmented model, inside one cluster: what runs micro-batches, and takes steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_fragment.models.fragment import Fragmented
from moe_fragment.train.local_experts import LocalExperts
from moe_fragment.train.loss import Batch, micro_batch_losses


@dataclass
class StageTimes:
    """Of one rank of a pipeline in one step, seconds."""

    busy_s: float = 0.0
    """In forwards and backwards, waits for other clusters in them included."""
    until_s: float = 0.0
    """From the start of the step's first micro-batch, on whatever stage, to the end of this rank's last backward."""


class ClusterEngine:
    """What a rank trains with: DeepSpeed's engine around the model, or its part of it.

    Args:
        engine: from `deepspeed.initialize`.
        model: the fragmented transformers model (of a pipeline, this stage of it) that the engine trains.
        local_experts: what this rank trains besides.
    """

    mirrored: frozenset[str] = frozenset()
    """Parameters of this rank that count as another stage's."""
    outline: str | None = None
    """Which stage of a pipeline runs what, for people."""
    times: StageTimes | None = None
    """Of the last `run`, in a pipeline."""

    def __init__(self, engine: Any, model: Any, local_experts: LocalExperts | None) -> None:
        self.deepspeed = engine
        self.module = model
        self.local_experts = local_experts

    @property
    def fragmented(self) -> Fragmented:
        """What `fragment` did to the model."""
        found: Fragmented = self.module.fragmented
        return found

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return torch.device(self.deepspeed.device)

    @property
    def accumulation(self) -> int:
        """Micro-batches per step."""
        return int(self.deepspeed.gradient_accumulation_steps())

    @property
    def width(self) -> int:
        """How many ranks of the cluster have the same parameters; DeepSpeed averages gradients over them."""
        return int(self.deepspeed.dp_world_size)

    def run(self, batches: Sequence[Batch], expected_tokens: float) -> tuple[float, float]:
        """Forward and backward of a step's micro-batches; collective over the cluster.

        Args:
            batches: as many as `accumulation`, of this rank.
            expected_tokens: what the gradients are divided by.

        Returns:
            loss-bearing tokens and summed cross-entropy (nats), which count once in the cluster.
        """
        tokens, cross_entropy = 0, torch.zeros((), dtype=torch.float64, device=self.device)
        # DeepSpeed divides by the accumulation steps. Its average over ranks is undone after the reduction: a factor
        # that differs between clusters would scale the gradients that tokens bring to another cluster's experts.
        factor = self.accumulation / expected_tokens
        self.deepspeed.train()
        for index, batch in enumerate(batches):
            with self.fragmented.micro_batch(index, counted=not batch.filler):
                losses = micro_batch_losses(self.deepspeed, batch.to(self.device))
            self.deepspeed.backward(losses.total * factor)
            tokens += losses.tokens
            cross_entropy += losses.cross_entropy.double()
            if index + 1 < len(batches):
                self.deepspeed.step()
        return tokens, float(cross_entropy)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, float]:
        """Tokens and summed cross-entropy (nats) of any number of batches, as `run` counts them; nothing is learnt."""
        tokens, cross_entropy = 0, 0.0
        self.deepspeed.eval()
        for index, batch in enumerate(batches):
            with self.fragmented.micro_batch(index, counted=False):
                losses = micro_batch_losses(self.deepspeed, batch.to(self.device), auxiliary=False)
            tokens += losses.tokens
            cross_entropy += float(losses.cross_entropy)
        return tokens, cross_entropy

    def step(self) -> None:
        """DeepSpeed's optimizer step with the gradients that are set."""
        self.deepspeed.step()

    def destroy(self) -> None:
        """Give up what DeepSpeed holds."""
        self.deepspeed.destroy()

"""The outer step: what a round's mean pseudo-gradient does to the global copy of the trunk.

A pseudo-gradient is the global copy minus a cluster's own weights after its inner steps, so it is positive where the
weights went down; SGD with Nesterov momentum takes it as a gradient (DiLoCo, arXiv 2311.08105, algorithm 1). Learning
rate 1 without momentum makes it parameter averaging (local SGD).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OuterSGD:
    """SGD with momentum on flat fp32 vectors, as `torch.optim.SGD` computes it.

    Attributes:
        learning_rate: of the outer step.
        momentum: 0 for none.
        nesterov: look ahead by one momentum step.
    """

    learning_rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def step(
        self, weights: torch.Tensor, velocity: torch.Tensor | None, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One step, without changing what it is given.

        Args:
            weights: fp32 [n], the global copy.
            velocity: fp32 [n], None before the first step or without momentum.
            gradient: fp32 [n], the mean pseudo-gradient.

        Returns:
            new weights and new velocity (None without momentum).
        """
        if not self.momentum:
            return weights - self.learning_rate * gradient, None
        velocity = gradient.clone() if velocity is None else self.momentum * velocity + gradient
        direction = gradient + self.momentum * velocity if self.nesterov else velocity
        return weights - self.learning_rate * direction, velocity

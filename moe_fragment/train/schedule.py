"""Learning rate as a function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from moe_fragment.train.recipe import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rate of optimizer step `step`, counted from 0: linear warm-up, then the schedule down to the minimum."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    low, high = config.min_learning_rate, config.learning_rate
    progress = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    progress = min(1.0, progress)
    if config.schedule == "constant":
        return high
    height = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return height * high + (1 - height) * low  # exact at both ends

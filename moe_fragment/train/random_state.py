"""The random numbers of one rank: seeded apart from all others', saved and restored by rank."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch

CPU, ACCELERATOR = "random", "random-accelerator"
RANDOM_KINDS = (CPU, ACCELERATOR)
"""What is stored: torch's generators, which dropout draws from. Nothing here draws from Python's or numpy's."""


def seed_everything(seed: int, cluster: int, rank: int) -> None:
    """Every rank of every cluster draws its own random numbers."""
    mixed = seed * 1_000_003 + cluster * 1_009 + rank
    random.seed(mixed)
    np.random.seed(mixed % 2**32)
    torch.manual_seed(mixed)


def random_state() -> dict[str, torch.Tensor]:
    """States of this rank's generators, by kind."""
    states = {CPU: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[ACCELERATOR] = torch.cuda.get_rng_state()
    return states


def restore_random_state(states: Mapping[str, torch.Tensor | None]) -> None:
    """Inverse of `random_state`; a rank that was not there before keeps what it was seeded with."""
    if (state := states.get(CPU)) is not None:
        torch.set_rng_state(state)
    if (state := states.get(ACCELERATOR)) is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state)

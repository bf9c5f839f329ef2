"""Fleet-wide evaluation: every rank takes part with the same number of forwards, whatever its share of the text."""

from __future__ import annotations

import math

import torch

from moe_fragment.fabric import FAILED, OK, Fabric, FleetError
from moe_fragment.train.cluster_engine import ClusterEngine
from moe_fragment.train.loss import Batch

_BATCH = 8
"""Sequences per forward."""


def evaluate(
    engine: ClusterEngine,
    fabric: Fabric,
    sequences: torch.Tensor,
    *,
    step: int,
    rank: int,
    ranks: int,
    filler: int,
    retries: int,
) -> tuple[float, int]:
    """Mean cross-entropy (nats per token) of `sequences` and how many tokens that is; collective over the fleet.

    Args:
        engine: of this rank.
        fabric: of this rank.
        sequences: int64 [n, S + 1], the same on every rank of the fleet.
        step: number for the exchanges.
        rank, ranks: this rank among all of the fleet that read data of their own (of a pipeline one for all stages).
        filler: token of the batch that a rank with nothing left runs.
        retries: how often a failed exchange is tried again.

    Raises:
        FleetError: it keeps failing.
    """
    # Every ranks-th one, so that each rank has some of every domain: where trunk copies differ, a cluster's own is best
    # at the cluster's own text.
    own = sequences[rank::ranks]
    forwards = math.ceil(math.ceil(len(sequences) / ranks) / _BATCH)
    batches = [Batch.of(own[at * _BATCH : (at + 1) * _BATCH], filler) for at in range(forwards)]
    for _ in range(retries + 1):
        fabric.begin_step(step)
        sums = torch.tensor(engine.evaluate(batches), dtype=torch.float64)
        verdict = fabric.verdict(OK, fabric.cluster_sum(sums).tolist())
        if verdict.outcome != FAILED:
            fabric.commit(True)
            tokens, total = (sum(row[part] for row in verdict.values_CV) for part in (0, 1))
            return total / tokens, int(tokens)
        fabric.commit(False)  # the next quorum connects anew
    raise FleetError(
        f"the evaluation after step {step} failed {retries + 1} times in a row: {fabric.cause()}"
    )

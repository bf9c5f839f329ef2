"""Butterfly mixing: every H steps each cluster averages its trunk with that of one other cluster, another one each
time.

One round of a butterfly per sync costs one vector per cluster, whatever their number, and spreads what a cluster has
learnt to all others in log2 C syncs (see `mixing_round`). Copies come close but not together: there is no global copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from moe_fragment.fabric import FAILED, OK
from moe_fragment.fabric.collectives import mixing_round
from moe_fragment.sync.report import SyncReport
from moe_fragment.sync.vector import RailVector


class MixingSync:
    """Averages trunk copies pair by pair. While one of them is not finite nobody mixes: it would spread.

    Every method is collective over the fleet.

    Args:
        vector: the trunk.
        every: H, steps between two syncs.
        masters: gives this rank's flat fp32 master weights.
        publish: hands changed master weights to the model.
    """

    def __init__(
        self,
        vector: RailVector,
        *,
        every: int,
        masters: Callable[[], list[torch.Tensor]],
        publish: Callable[[], None],
    ) -> None:
        self._vector = vector
        self._fabric = vector.fabric
        self._every = every
        self._masters = masters
        self._publish = publish
        self.again = False
        """Whether the last sync failed, so that it is due at once."""

    def after_step(self, step: int) -> list[SyncReport]:
        """Mix if it is due after fleet step `step`, counted from 1.

        Raises:
            FleetError: the clusters could not meet.
        """
        if step % self._every and not self.again:
            return []
        fabric, masters = self._fabric, self._masters()
        fabric.begin_step(step)
        mixed = self._vector.collect(masters)
        square = float(fabric.cluster_sum(mixed.double().square().sum().reshape(1)))
        verdict = fabric.verdict(OK, [float(math.isfinite(square))])
        poisoned = [cluster for cluster, (healthy,) in enumerate(verdict.values_CV) if not healthy]
        if verdict.outcome == OK and poisoned:
            self.again = False
            fabric.commit(True)
            return [SyncReport(step, 0, "empty", poisoned=poisoned)]
        if verdict.outcome == OK:
            if fabric.is_gateway:
                arguments = (mixed, "trunk", fabric.everybody, step // self._every)
                fabric.collective(mixing_round, *arguments).wait()
            verdict = fabric.verdict(OK, [])
        self.again = verdict.outcome == FAILED
        if self.again:
            reason = str(fabric.failure or "another cluster's transfer failed")
            fabric.commit(False)  # the next quorum connects anew
            return [SyncReport(step, 0, "failed", reason=reason)]
        fabric.commit(True)
        self._vector.distribute(mixed, masters)
        self._publish()
        return [SyncReport(step, 0, "merged")]

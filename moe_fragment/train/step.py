"""One optimizer step of one rank, from micro-batches to the fleet's commit.

The order, the same on every rank of every cluster:

1. meet (quorum), so that everybody is at the same step with working rails;
2. forward and backward of all micro-batches, tokens exchanged in every MoE layer; DeepSpeed reduces inside the cluster;
3. under a gradient strategy, sum the trunk's gradient over the clusters;
4. verdict: outcome, token counts, losses and squared norms of every cluster;
5. torchft's vote inside each cluster, then all step, or all discard: a failed step is run again with the same data, a
   step with non-finite numbers (or without a single loss-bearing token) is given up.

Nothing between 1 and 5 raises because of another cluster, so DeepSpeed's engine is always at a boundary afterwards.

Under a gradient strategy the fleet has one objective, the mean over all its tokens, and clips by the norm of the
whole model. Under a parameter strategy each cluster's trunk, and experts that all clusters hold, follow the mean over
its own tokens, other experts the mean over all tokens, and each cluster clips by the norm of what it holds. If tokens
stay where they are as well (`exchange: local`), steps are nobody else's business: there is no meeting and no verdict.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe_fragment.fabric import FAILED, OK, OVERFLOW, Fabric, Verdict, WaitClock
from moe_fragment.models.router import reset_router_load, router_load, update_router_bias
from moe_fragment.sync import SyncConfig
from moe_fragment.train.cluster_engine import ClusterEngine, StageTimes
from moe_fragment.train.loss import Batch
from moe_fragment.train.syncing import FleetSync, expert_holders
from moe_fragment.train.zero import Shard, ZeroShards


@dataclass(frozen=True)
class StepReport:
    """What a step did; the same on every rank unless said otherwise.

    Where clusters step without meeting, fleet means this cluster.
    """

    outcome: int
    loss: float
    """Mean cross-entropy per token over the fleet, nats."""
    tokens: int
    """Loss-bearing tokens of the fleet."""
    grad_norm: float
    """Before clipping, of what is clipped together: the whole model (trunk once, each expert once) under a gradient
    strategy, this cluster's part of it under a parameter strategy."""
    own_tokens: int = 0
    """Of this cluster, like the loss."""
    own_loss: float = math.nan
    reason: str = ""
    step_s: float = 0.0
    """Of this rank, like the waits."""
    wan_wait_s: float = 0.0
    wan_hidden_s: float = 0.0
    local_wait_s: float = 0.0
    sync_s: float = 0.0
    """Of the syncs after it; part of step_s."""
    stage: StageTimes | None = None
    """Of this rank, in a pipeline. What it waited between its micro-batches is a local wait."""

    def plus(self, sync_s: float, clock: WaitClock) -> StepReport:
        """With a sync's time."""
        return replace(
            self,
            step_s=self.step_s + sync_s,
            sync_s=sync_s,
            wan_wait_s=self.wan_wait_s + clock.exposed_s,
            wan_hidden_s=self.wan_hidden_s + clock.hidden_s,
            local_wait_s=self.local_wait_s + clock.local_s,
        )


class Stepper:
    """Runs steps of a cluster's engine.

    Args:
        engine: from `build_engine`.
        fabric: of this rank.
        expected_tokens: about how many tokens the fleet's step has; only keeps gradients in a sane range before the
            division by the true number.
        clip_norm: largest gradient norm of the whole model, 0 for none.
        sync: how trunk copies stay together.
        exchange_tokens: whether tokens travel to other clusters' experts.
    """

    def __init__(
        self,
        engine: ClusterEngine,
        fabric: Fabric,
        *,
        expected_tokens: int,
        clip_norm: float,
        sync: SyncConfig | None = None,
        exchange_tokens: bool = True,
    ) -> None:
        self.engine = engine
        self.fabric = fabric
        fragmented = engine.fragmented
        self.shards = ZeroShards(engine, fragmented, fabric.cluster_gather)
        self.statistics = fragmented.statistics
        self._expected_tokens = max(1, expected_tokens)
        self._clip_norm = clip_norm
        self.sync = FleetSync(sync or SyncConfig(), self.shards, fabric, fragmented)
        self._exchange_tokens = exchange_tokens
        self._meets = exchange_tokens or self.sync.trunk_is_global
        holders = expert_holders(self.shards, fragmented)
        first = {name for name, among in holders.items() if among[0] == fabric.cluster}
        visited = {name for name, among in holders.items() if among != fabric.everybody}
        self._normed = [shard for shard in self.shards.shards if shard.name in first]
        """Experts whose gradient this cluster counts in the fleet's norm: of several holders the first does."""
        self._visited = [shard for shard in self.shards.shards if shard.name in visited]
        """Experts that other clusters' tokens may come to."""
        self._own = [shard for shard in self.shards.shards if shard.name not in visited]
        self._model = engine.module
        self._routers_learn = bool(getattr(engine.module.config, "router_bias", False))

    def step(self, number: int, batches: Sequence[Batch], *, learning_rate: float) -> StepReport:
        """Run fleet step `number` on this rank's micro-batches; collective over the fleet.

        Raises:
            FleetError: the clusters could not meet.
        """
        started = time.monotonic()
        self.fabric.clock.reset()
        if self._meets:
            self.fabric.begin_step(number)
        if len(batches) != self.engine.accumulation:
            raise ValueError(f"expected {self.engine.accumulation} micro-batches, got {len(batches)}")
        sums = self.engine.run(batches, self._expected_tokens)
        flats = self.shards.gradients()
        for flat in flats[: self.shards.num_zero_flats]:
            flat.mul_(self.engine.width)  # DeepSpeed averaged over the ranks
        trunk, experts = self._sync_and_measure(flats, number)
        load_LE = self._fleet_router_load()
        numbers = self.fabric.cluster_sum(torch.tensor([*sums, experts], dtype=torch.float64)).tolist()
        verdict = self._verdict([numbers[0], numbers[1], trunk, numbers[2]])
        own = verdict.values_CV[self.fabric.cluster if self._meets else 0]
        tokens, own_tokens = sum(row[0] for row in verdict.values_CV), own[0]
        if self.sync.trunk_is_global:
            # The trunk's norm is taken from the first cluster, bit for bit: every cluster must clip alike.
            squares = verdict.values_CV[0][2], sum(row[3] for row in verdict.values_CV)
            trunk_scale = expert_scale = self._expected_tokens / tokens if tokens else 0.0
        else:
            squares = own[2], own[3]
            trunk_scale = self._expected_tokens / own_tokens if own_tokens else 0.0
            expert_scale = self._expected_tokens / tokens if tokens else 0.0
        square = squares[0] * trunk_scale**2 + squares[1] * expert_scale**2
        norm = math.sqrt(square) if square >= 0 else math.nan
        outcome, reason = verdict.outcome, ""
        if outcome == OK and not math.isfinite(norm):
            outcome = OVERFLOW
        if outcome == OVERFLOW:
            reason = "non-finite loss or gradient"
        elif outcome == FAILED:
            reason = self.fabric.cause() or "another cluster's exchange failed"
        elif not tokens:
            outcome, reason = OVERFLOW, "no token bears a loss"
        if self._meets and not self.fabric.commit(outcome != FAILED) and outcome != FAILED:
            outcome, reason = FAILED, "a gateway of this cluster voted against the step"
        if outcome == OK:
            clip = self._clip_factor(norm)
            self._scale(flats, trunk_scale * clip, expert_scale * clip)
            self._apply(flats, learning_rate, load_LE)
        else:
            self.shards.discard_step()
        self.sync.settle(outcome == OK)
        if outcome == FAILED:
            self.statistics.drain()
        elapsed = time.monotonic() - started
        clock, stage = self.fabric.clock.reset(), self.engine.times
        return StepReport(
            outcome=outcome,
            loss=sum(row[1] for row in verdict.values_CV) / tokens if tokens else math.nan,
            tokens=int(tokens),
            grad_norm=norm,
            own_tokens=int(own_tokens),
            own_loss=own[1] / own_tokens if own_tokens else math.nan,
            reason=reason,
            step_s=elapsed,
            wan_wait_s=clock.exposed_s,
            wan_hidden_s=clock.hidden_s,
            local_wait_s=clock.local_s + (stage.until_s - stage.busy_s if stage is not None else 0.0),
            stage=stage,
        )

    def _verdict(self, values: list[float]) -> Verdict:
        """Of the fleet, or of this cluster alone where clusters do not meet."""
        outcome = OK if all(map(math.isfinite, values)) else OVERFLOW
        if self._meets:
            return self.fabric.verdict(outcome, values)
        return Verdict(self.fabric.cluster_min(outcome), [values])

    def _sync_and_measure(self, flats: list[torch.Tensor], number: int) -> tuple[float, float]:
        """Squared norms: of the whole trunk after its sum over the fleet, and of this rank's expert elements. Under a
        parameter strategy: of what only this cluster's tokens train, and of this rank's elements of the rest.
        """
        self.sync.align(flats)
        if not self.sync.trunk_is_global:
            own = torch.tensor([_square(flats, self._own)], dtype=torch.float64)
            return float(self.fabric.cluster_sum(own)), _square(flats, self._visited)
        intervals = torch.zeros(len(self.fabric.gateways), dtype=torch.float64)
        square = self.sync.reduce(flats, step=number)
        if self.fabric.is_gateway:
            intervals[self.fabric.lane.layout.rail] = square
        return sum(self.fabric.cluster_sum(intervals).tolist()), _square(flats, self._normed)

    def _fleet_router_load(self) -> torch.Tensor | None:
        """Tokens per expert of the whole fleet [L, E], for the auxiliary-loss-free bias."""
        if not self._routers_learn:
            return None
        load_LE = torch.zeros(self.statistics.load_LE.shape, dtype=torch.float64)
        own = self.engine.fragmented.positions()
        if own:
            load_LE[own] = router_load(self._model).double().cpu()
        reset_router_load(self._model)
        return self.fabric.fleet_sum(load_LE)[own]

    def _clip_factor(self, norm: float) -> float:
        return min(1.0, self._clip_norm / (norm + 1e-6)) if self._clip_norm > 0 else 1.0

    def _scale(self, flats: list[torch.Tensor], trunk: float, experts: float) -> None:
        if trunk == experts:
            for flat in flats:
                flat.mul_(trunk)
            return
        for shards, factor in (([*self._own, *self.shards.mirrors], trunk), (self._visited, experts)):
            for shard in shards:
                flats[shard.flat][shard.position : shard.position + shard.size].mul_(factor)

    def _apply(self, flats: list[torch.Tensor], learning_rate: float, load_LE: torch.Tensor | None) -> None:
        self.shards.set_gradients(flats)
        self.shards.set_learning_rate(learning_rate)
        self.shards.step()
        if load_LE is not None and len(load_LE):
            update_router_bias(self._model, load_LE)


def _square(flats: list[torch.Tensor], shards: list[Shard]) -> float:
    """Squared L2 norm of what the shards hold, in fp64."""
    parts = [
        flats[shard.flat][shard.position : shard.position + shard.size].double().square().sum()
        for shard in shards
    ]
    return float(torch.stack(parts).sum()) if parts else 0.0

"""What a recipe's `sync` section means for a cluster's engine: the trunk, and each replica set of experts.

One object per thing that is kept together: the trunk among all clusters, and the experts of each replica set among the
clusters that hold them, with the same strategy. Every cluster has all of these objects, with nothing in those that do
not concern it, because the clusters meet for each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_fragment.fabric import Fabric
from moe_fragment.models.fragment import Fragmented
from moe_fragment.schema import ConfigError
from moe_fragment.sync import (
    AsynchronousSync,
    CanonicalVector,
    GradientSync,
    Guard,
    MixingSync,
    OuterSGD,
    ParameterSync,
    Policy,
    RailVector,
    Rounds,
    Run,
    SyncConfig,
    SyncReport,
)
from moe_fragment.sync.fragments import split, units
from moe_fragment.sync.state import Piece, Reader
from moe_fragment.train.zero import ZeroShards

_MOST_FRAGMENTS = 8
Among = tuple[int, ...]


class Domain:
    """Parameters that the same clusters hold copies of: canonical names, and elements by name."""

    def __init__(self, among: Among, sizes: dict[str, int], *, experts: bool) -> None:
        self.among = among
        self.sizes = sizes
        self.experts = experts


class FleetSync:
    """Every method is collective over the fleet unless it says otherwise.

    Args:
        config: the `sync` section.
        shards: of this rank's engine.
        fabric: of this rank.
        fragmented: tells trunk from experts, and where experts have copies.

    Raises:
        ConfigError: the trunk cannot be cut into as many fragments.
    """

    def __init__(
        self, config: SyncConfig, shards: ZeroShards, fabric: Fabric, fragmented: Fragmented
    ) -> None:
        self.config = config
        self._shards = shards
        self._fabric = fabric
        trunk = Domain(fabric.everybody, shards.sizes(experts=False), experts=False)
        holders, sizes = expert_holders(shards, fragmented), shards.sizes(experts=True)
        replicas = [
            Domain(among, {name: sizes[name] for name in sizes if holders[name] == among}, experts=True)
            for among in fragmented.replica_sets()
        ]
        domains = [trunk, *replicas]
        layers = len(fragmented.placement.layers)
        self.gradients: list[GradientSync] = []
        self.rounds: list[ParameterSync] = []
        self.mixings: list[MixingSync] = []
        self.asynchronous: AsynchronousSync | None = None
        if config.is_asynchronous:
            self.asynchronous = self._asynchronous(domains, layers)
        elif config.is_gradient:
            self.gradients = [self._gradient(domain) for domain in domains]
        elif config.only_mixes:
            if replicas:
                raise ConfigError("sync.rounds: one round per sync does not work with replicated experts")
            self.mixings = [self._mixing(trunk)]
        else:
            self.rounds = [self._parameter(domain, layers) for domain in domains]
        self._mirrored: RailVector | None = None
        copied = set().union(*fabric.cluster_gather({shard.name for shard in shards.mirrors}))
        if copied and not self.gradients:
            self._mirrored = self._vector({name: trunk.sizes[name] for name in copied})

    @property
    def trunk_is_global(self) -> bool:
        """Whether every step leaves all trunk copies equal."""
        return bool(self.gradients)

    # -- construction ------------------------------------------------------------------------------------------

    def _vector(self, sizes: Mapping[str, int]) -> RailVector:
        vector = CanonicalVector(sizes)
        runs, mirrors = (
            [
                Run(vector.starts[shard.name] + shard.offset, shard.size, shard.flat, shard.position)
                for shard in shards
                if shard.name in sizes
            ]
            for shards in (self._shards.shards, self._shards.mirrors)
        )
        return RailVector(self._fabric, vector, runs, mirrors=mirrors)

    def _gradient(self, domain: Domain) -> GradientSync:
        return GradientSync(
            self._vector(domain.sizes),
            butterfly=self.config.strategy == "butterfly",
            codec=self.config.build_codec(),
            error_feedback=self.config.error_feedback,
            divide_by=self.config.divide_by,
            among=domain.among,
        )

    def _parameter(self, domain: Domain, layers: int) -> ParameterSync:
        config = self.config
        try:
            fragments = self._split(domain, layers)
            rounds = Rounds(
                every=config.every,
                outer=self._outer(),
                overlap=config.overlap,
                mix=config.mix,
                butterfly=config.strategy == "butterfly",
                weights=config.weights,
                divide_by=config.divide_by,
                check_every=config.check_every,
            )
            return ParameterSync(
                [self._vector(sizes) for sizes in fragments],
                rounds,
                masters=self._shards.masters,
                publish=self._shards.publish_masters,
                codec=config.build_codec(),
                error_feedback=config.error_feedback,
                guard=self._guard(domain),
                among=domain.among,
            )
        except ValueError as error:
            raise ConfigError(f"sync: {error}") from None

    def _guard(self, domain: Domain) -> Guard | None:
        guard = self.config.guard
        if guard is None:
            return None
        return Guard(guard.warn, guard.refuse, guard.experts if domain.experts else 1.0)

    def _outer(self) -> OuterSGD:
        outer = self.config.outer
        return OuterSGD(outer.learning_rate, outer.momentum, outer.nesterov)

    def _split(self, domain: Domain, layers: int) -> list[dict[str, int]]:
        """Fragments; as many on clusters that hold nothing of it. Of experts in few layers, some are empty."""
        config = self.config
        in_parts = config.strategy in ("streaming_diloco", "decoupled")
        wanted = config.fragments or (min(layers, _MOST_FRAGMENTS) if in_parts else 1)
        filled = min(wanted, units(domain.sizes)) if domain.experts else wanted
        parts = split(domain.sizes, filled) if filled else []
        return [*parts, *({} for _ in range(wanted - filled))]

    def _asynchronous(self, domains: Sequence[Domain], layers: int) -> AsynchronousSync:
        config, everybody = self.config, self._fabric.everybody
        partly = [domain.among for domain in domains if domain.among != everybody]
        if partly:
            names = " and ".join(self._fabric.names[cluster] for cluster in partly[0])
            raise ConfigError(
                f"sync.strategy: {config.strategy} keeps together what all clusters hold; experts that {names} "
                f"share must be on all clusters or on one"
            )
        sizes = {name: size for domain in domains for name, size in domain.sizes.items()}
        server = config.strategy == "parameter_server"
        policy = Policy(
            self._outer(),
            quorum=config.quorum,
            grace=0.0 if server else config.grace,
            overlap=config.overlap,
            merge="average" if server else config.merge,
            staleness=config.staleness if server else None,
        )
        try:
            fragments = self._split(Domain(everybody, sizes, experts=False), layers)
        except ValueError as error:
            raise ConfigError(f"sync: {error}") from None
        return AsynchronousSync(
            [self._vector(part) for part in fragments],
            policy,
            every=config.every,
            masters=self._shards.masters,
            publish=self._shards.publish_masters,
            codec=config.build_codec(),
            error_feedback=config.error_feedback,
        )

    def _mixing(self, domain: Domain) -> MixingSync:
        return MixingSync(
            self._vector(domain.sizes),
            every=self.config.every,
            masters=self._shards.masters,
            publish=self._shards.publish_masters,
        )

    # -- steps -------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Before the first step of a life, where asynchronous clusters meet."""
        if self.asynchronous is not None:
            self.asynchronous.begin(step)

    def align(self, flats: Sequence[torch.Tensor]) -> None:
        """Make gradients that two stages hold copies of the same to the bit; DeepSpeed sums them in two orders.

        Collective over the cluster. A gradient strategy's sum does it on the way.
        """
        if self._mirrored is not None:
            self._mirrored.distribute(self._mirrored.collect(flats), flats)

    def reduce(self, flats: Sequence[torch.Tensor], *, step: int) -> float:
        """Sum gradients in place under a gradient strategy.

        Returns:
            the squared norm of this gateway's interval of the trunk's sum; 0 on other ranks.
        """
        squares = [
            sync.reduce(flats, seed=step * len(self.gradients) + at) for at, sync in enumerate(self.gradients)
        ]
        return squares[0]

    def settle(self, committed: bool) -> None:
        """End a step of a gradient strategy. No collective."""
        for sync in self.gradients:
            sync.settle(committed)

    def after_step(self, step: int, tokens: float, *, last: bool = False) -> list[SyncReport]:
        """What is due after fleet step `step`, counted from 1; see `ParameterSync.after_step`."""
        reports = []
        for index, sync in enumerate(self.rounds):
            reports += [
                replace(report, experts=index > 0) for report in sync.after_step(step, tokens, last=last)
            ]
        for mixing in self.mixings:
            reports += mixing.after_step(step)
        if self.asynchronous is not None:
            reports += self.asynchronous.after_step(step, tokens, last=last)
        return reports

    def codec_loss(self) -> tuple[float, float]:
        """Squared L2 norms of what a gradient codec lost in the last step on this rank, and of what it was given."""
        lost = sum(sync.codec_loss[0] for sync in self.gradients)
        return lost, sum(sync.codec_loss[1] for sync in self.gradients)

    # -- state -------------------------------------------------------------------------------------------------

    def state(self) -> Iterator[Piece]:
        """What a checkpoint must hold of this rank. No collective."""
        for gradient in self.gradients:
            yield from gradient.state()
        for sync in self.rounds:
            yield from sync.state()
        if self.asynchronous is not None:
            yield from self.asynchronous.state()

    def numbers(self) -> dict[str, Any]:
        """The rest of the state, for JSON."""
        return {
            "rounds": [sync.numbers() for sync in self.rounds],
            "again": [mixing.again for mixing in self.mixings],
            "pushed": self.asynchronous.numbers() if self.asynchronous is not None else None,
            "ended": self.ended,
        }

    @staticmethod
    def afresh(numbers: Mapping[str, Any]) -> dict[str, Any]:
        """Another cluster's `numbers` for one that starts from its global copies and has trained on nothing since."""
        rounds = [
            {**one, "own": [{**fragment, "tokens": 0.0} for fragment in one["own"]]}
            for one in numbers["rounds"]
        ]
        pushed = numbers["pushed"]
        if pushed is not None:
            fragments = [{**fragment, "tokens": 0.0, "steps": 0} for fragment in pushed["fragments"]]
            pushed = {**pushed, "fragments": fragments, "outstanding": None}
        return {**numbers, "rounds": rounds, "pushed": pushed}

    def restore(self, read: Reader, numbers: Mapping[str, Any], kinds: Collection[str]) -> None:
        """Inverse of `state` and `numbers`, whatever layout wrote them. No collective.

        Args:
            read: gives any range of what was stored.
            numbers: what `numbers` gave.
            kinds: of tensors that are stored at all.

        Raises:
            ValueError: they are of another strategy, or of other fragments.
        """
        stored = len(numbers["rounds"]), len(numbers["again"]), numbers["pushed"] is None
        if stored != (len(self.rounds), len(self.mixings), self.asynchronous is None):
            raise ValueError("sync.strategy: the checkpoint was written under another kind of strategy")
        for gradient in self.gradients:
            gradient.restore(read)
        for sync, own in zip(self.rounds, numbers["rounds"], strict=True):
            sync.restore(read, own)
        for mixing, again in zip(self.mixings, numbers["again"], strict=True):
            mixing.again = again
        if self.asynchronous is not None:
            self.asynchronous.restore(read, numbers["pushed"], served=kinds.__contains__)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to merge at the end of a run. No collective."""
        if self.asynchronous is not None:
            return self.asynchronous.ended
        return all(sync.ended for sync in self.rounds)

    def agreement(self) -> dict[str, Any]:
        """What must be the same on all clusters before they go on together; collective over the cluster."""
        return {
            "global copy": self.rounds[0].digest() if self.rounds else None,
            "schedule of merges": [sync.schedule() for sync in self.rounds],
            "failed mixing": [mixing.again for mixing in self.mixings],
        }


def expert_holders(shards: ZeroShards, fragmented: Fragmented) -> dict[str, Among]:
    """Of every canonical expert of this cluster, the clusters that hold a copy."""
    found = {}
    for name in shards.sizes(experts=True):
        parameter, _, expert = name.partition("#")
        found[name] = fragmented.holders(parameter, int(expert))
    return found

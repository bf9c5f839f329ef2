"""One rank's life in a run: joining the fleet, taking up what was saved, saving, leaving."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from moe_fragment.fabric import Fabric, FleetError, connect
from moe_fragment.schema import ConfigError
from moe_fragment.sync import HOST
from moe_fragment.topology import Topology
from moe_fragment.train.checkpoint import (
    Checkpoint,
    CheckpointError,
    Manifest,
    checkpoint_path,
    save,
    saved_steps,
)
from moe_fragment.train.data import ClusterData
from moe_fragment.train.engine import build_engine
from moe_fragment.train.facts import joining_facts
from moe_fragment.train.heal import Healing
from moe_fragment.train.journal import Journal
from moe_fragment.train.lock import RunLock
from moe_fragment.train.model import build_model, check_model, parameter_shapes, place_model
from moe_fragment.train.peers import Peer, PeerWatch
from moe_fragment.train.random_state import seed_everything
from moe_fragment.train.recipe import Recipe
from moe_fragment.train.resume import check_fits, newest_common
from moe_fragment.train.snapshot import rank_tensors, restore_rank, sync_reader
from moe_fragment.train.state import step_counts, trunk_checksum
from moe_fragment.train.step import Stepper
from moe_fragment.train.world import World


class Life:
    """What a rank has and where it stands; every method is collective over the fleet unless it says otherwise.

    Args:
        recipe: the run.
        world: this rank's place; the default group exists already.
        watch: told who the other ranks are.
    """

    def __init__(self, recipe: Recipe, world: World, watch: PeerWatch) -> None:
        self.recipe = recipe
        self.world = world
        self.topology: Topology = recipe.fleet()
        self.index = self.topology.index(world.cluster)
        self.stages = recipe.stages
        check_model(recipe, self.topology)
        self.data = ClusterData(recipe.data, self.topology.names, self.index)
        self.fabric: Fabric = connect(
            self.topology,
            recipe.fabric,
            cluster=world.cluster,
            coordinator=world.coordinator,
            facts=joining_facts(recipe, self.data.fingerprint),
            side=recipe.sync.needs_side_rail,
            stages=self.stages,
        )
        self._introduce(watch)
        self.directory = recipe.run_directory / world.cluster
        self.step_number = 0
        self.consumed = 0
        self._common_step: int | None = None
        """The newest step that all clusters have saved, as far as this one can know."""
        self.journal = Journal(self.directory, world.cluster, self.topology.names)
        self._notes: list[tuple[str, str]] = []
        """Events before there is a log to write them into: kind and message."""
        self._lock: RunLock | None = None
        self._build()
        try:
            self._begin()
        except BaseException:
            self._unlock()
            raise

    @property
    def replica(self) -> int:
        """Which of the cluster's copies of the model this rank is part of: those that read data of their own."""
        return self.world.local_rank % self.replicas[self.index]

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many copies of the model each cluster has: its ranks, or a pipeline's width."""
        return tuple(size // self.stages for size in self.topology.sizes)

    @property
    def _largest_micro_batch(self) -> int:
        """Sequences in it."""
        cells = self.recipe.train.accumulation * self.replicas[self.index]
        return max(1, -(-self.batch_C[self.index] // cells))

    # -- setting up --------------------------------------------------------------------------------------------

    def _introduce(self, watch: PeerWatch) -> None:
        everybody = self.fabric.gather("peers", self.fabric.cluster_gather(asdict(watch.this)))
        watch.peers = [Peer(**peer) for cluster in everybody for peer in cluster]

    def _build(self) -> None:
        recipe, train = self.recipe, self.recipe.train
        self.batch_C = recipe.batches(self.topology)
        model = build_model(recipe.model, self.data.tokenizer)
        self.placement = place_model(model, recipe, self.topology)
        self.model_config = model.config.to_dict()
        engine = build_engine(
            model,
            self.placement,
            self.fabric,
            recipe.deepspeed_config(self.world.cluster),
            shares=recipe.local_shares(self.topology, self.world.cluster),
            sample=(self._largest_micro_batch, recipe.data.sequence_length),
            accumulation=train.accumulation,
            learning_rate=train.learning_rate,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
        )
        self.stepper = Stepper(
            engine,
            self.fabric,
            expected_tokens=train.batch * recipe.data.sequence_length,
            clip_norm=train.clip_norm,
            sync=recipe.sync,
            exchange_tokens=recipe.experts.exchange == "tokens",
        )
        if engine.outline is not None:
            self._notes.append(("stages", engine.outline))
        self.fragmented = engine.fragmented
        self.shapes: dict[str, list[int]] = {}
        for shapes in self.fabric.cluster_gather(parameter_shapes(model)):
            self.shapes |= shapes
        self._route_as_trained()
        seed_everything(train.seed, self.index, self.world.local_rank)

    def _begin(self) -> None:
        """Open the log, and continue from the newest checkpoint that every cluster has, if there is any.

        Raises:
            ConfigError: the run directory or checkpoint does not fit, here.
            FleetError: it does not fit elsewhere, or no step was saved by all clusters.
        """
        saved = self.fabric.gather("saved", saved_steps(self.directory))
        step, without = newest_common(self.recipe.name, self.topology.names, saved)
        if without:
            assert step is not None
            self._heal(step, without)
        error: Exception | None = None
        try:
            self.fabric.everyone(self._take_up, step)
        except (ConfigError, FleetError) as caught:
            error = caught
        agreement = self.stepper.sync.agreement()
        if step is None or self.recipe.sync.is_gradient:
            agreement["trunk"] = trunk_checksum(self.stepper.shards, self.fabric)
        heard = self.fabric.gather("begin", [str(error) if error else None, agreement])
        if error is not None:
            raise error
        for name, (trouble, theirs) in zip(self.topology.names, heard, strict=True):
            if trouble is not None:
                raise FleetError(f"cluster {name} cannot begin: {trouble}")
            differ = [what for what, value in theirs.items() if value != heard[0][1][what]]
            if differ:
                raise FleetError(
                    f"clusters {self.topology.names[0]} and {name} begin with different weights (in their "
                    f"{differ[0]}); compare model.pretrained, or the run directories they resume from"
                )
        self._common_step = step
        for kind, message in self._notes:
            self.journal.event(kind, message, self.step_number)
        if step is not None:
            self.stepper.shards.publish_masters()
            self.fabric.resume_at(step)
        self.stepper.sync.begin(self.step_number)

    def _route_as_trained(self) -> None:
        """In an evaluation tokens go to all experts, whatever they do in training."""
        try:
            self.fragmented.route_locally(self.recipe.experts.exchange == "local")
        except ValueError as error:
            raise ConfigError(f"experts.exchange: local: {error}") from None

    def _take_up(self, step: int | None) -> None:
        """What may fail on one rank alone."""
        self._take_lock()
        if step is not None:
            self._load(Checkpoint(checkpoint_path(self.directory, step)))
        if step is not None and step > self.recipe.train.steps:
            raise ConfigError(
                f"train.steps: expected at least {step}, where run {self.recipe.name} is already, got "
                f"{self.recipe.train.steps}; raise it, or choose another name"
            )
        if self.world.local_rank == 0:
            self._open_log(step)

    def _take_lock(self) -> None:
        if self.world.local_rank == 0 and self._lock is None:
            self._lock = RunLock(self.directory)

    def _heal(self, step: int, without: list[int]) -> None:
        """Give the clusters without a checkpoint what the others have.

        Raises:
            FleetError: they cannot have it.
        """
        names = self.topology.names
        if self.recipe.sync.is_asynchronous and HOST in without:
            raise FleetError(
                f"cluster {names[HOST]} has no checkpoint, and it hosts the syncer of {self.recipe.sync.strategy}, "
                f"whose copy is nowhere else: put its run directory back"
            )
        first = self.world.local_rank == 0
        healing = Healing(self.fabric, self.directory, step, without, batches=self.batch_C, first=first)
        own = {"cluster": self.world.cluster, "data": self.data.fingerprint}
        sizes = self.stepper.shards.canonical_sizes
        note = healing.run(list(sizes), own, self._take_lock, self._check_fits)
        if note:
            self._notes.append(("healed", note))

    def _load(self, checkpoint: Checkpoint) -> None:
        """Take weights, optimizer, data position and random state from a checkpoint of this cluster."""
        manifest = checkpoint.manifest
        self._check_fits(checkpoint)
        if manifest.data != self.data.fingerprint:
            message = f"the data changed since step {manifest.step}; its position {manifest.consumed} is kept"
            self._notes.append(("data_changed", message))
        restore_rank(checkpoint, self.stepper.shards, self.stepper.engine.module, self.world.local_rank)
        try:
            self.stepper.sync.restore(sync_reader(checkpoint), manifest.sync, checkpoint.kinds)
        except CheckpointError:
            raise
        except ValueError as error:
            raise ConfigError(f"{checkpoint.path}: {error}") from None
        self.step_number, self.consumed = manifest.step, manifest.consumed

    def _check_fits(self, checkpoint: Checkpoint) -> None:
        check_fits(
            checkpoint,
            self.world.cluster,
            self.placement,
            self.stepper.shards.canonical_sizes,
            self.model_config,
        )

    def _open_log(self, resumed: int | None) -> None:
        files = {"recipe.yaml": self.recipe.dump(), "topology.yaml": self.recipe.dump_topology()}
        self.journal.open(
            resumed,
            files,
            layers=len(self.placement.layers),
            experts=self.placement.num_experts,
            emulated=self.fabric.emulated,
        )

    # -- saving and leaving -----------------------------------------------------------------------------------

    def save(self, *, scheduled: bool = True) -> Path:
        """Checkpoint this cluster; collective over the cluster only.

        Args:
            scheduled: all clusters save this step, and checkpoints beyond `train.keep_checkpoints` go.
        """
        shards = self.stepper.shards
        steps: dict[str, float] = {}
        for part in self.fabric.cluster_gather(step_counts(shards)):
            steps.update(part)
        manifest = Manifest(
            step=self.step_number,
            cluster=self.world.cluster,
            consumed=self.consumed,
            data=self.data.fingerprint,
            placement=self.placement,
            model=self.model_config,
            sizes=shards.canonical_sizes,
            steps=steps,
            shapes=self.shapes,
            sync=self.stepper.sync.numbers(),
        )
        if self.world.local_rank == 0:
            self.data.tokenizer.save_pretrained(self.directory / "tokenizer")
        path = save(
            self.directory,
            manifest,
            rank_tensors(
                shards,
                self.stepper.sync,
                self.stepper.engine.module,
                self.world.local_rank,
                first=self.replica == 0,
            ),
            rank=self.world.local_rank,
            gather=self.fabric.cluster_gather,
            keep=self.recipe.train.keep_checkpoints if scheduled else None,
            protect=self._common_step,
        )
        if scheduled:
            self._common_step = self.step_number
        self.journal.event("checkpoint", f"saved step {self.step_number}", self.step_number)
        return path

    def close(self) -> None:
        """Leave the fleet."""
        self.journal.close()
        self._unlock()
        self.fabric.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

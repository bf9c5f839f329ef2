"""Training of one rank, from the launcher's environment to the last checkpoint."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict
from pathlib import Path

import torch

from moe_fragment.fabric import FAILED, OK, Fabric, FleetError, connect
from moe_fragment.models.fragment import fragment
from moe_fragment.observe import STEP_DISCARDED, STEP_SKIPPED, SYNC_POISONED, RunWriter
from moe_fragment.observe.layout import SCHEMA_FILE
from moe_fragment.schema import ConfigError
from moe_fragment.sync import SyncReport
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
from moe_fragment.train.evaluation import evaluate
from moe_fragment.train.facts import joining_facts
from moe_fragment.train.lock import RunLock
from moe_fragment.train.loss import Batch
from moe_fragment.train.measure import Measurements, measure
from moe_fragment.train.model import build_model, check_model, parameter_shapes, place_model
from moe_fragment.train.peers import Peer, PeerWatch
from moe_fragment.train.progress import Progress
from moe_fragment.train.random_state import random_state, restore_random_state, seed_everything
from moe_fragment.train.recipe import Recipe
from moe_fragment.train.resume import check_fits, newest_common
from moe_fragment.train.schedule import learning_rate
from moe_fragment.train.snapshot import rank_tensors, restore_rank
from moe_fragment.train.state import step_counts, trunk_checksum
from moe_fragment.train.step import Stepper, StepReport
from moe_fragment.train.world import World

log = logging.getLogger(__name__)


class ClusterRun:
    """One rank's part of a run; every method is collective over the fleet unless it says otherwise.

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
        check_model(recipe, self.topology)
        self.data = ClusterData(recipe.data, self.topology.names, self.index)
        self.fabric: Fabric = connect(
            self.topology,
            recipe.fabric,
            cluster=world.cluster,
            coordinator=world.coordinator,
            facts=joining_facts(recipe, self.data.fingerprint),
            side=recipe.sync.needs_side_rail,
        )
        self._introduce(watch)
        self.directory = recipe.run_directory / world.cluster
        self.step_number = 0
        self.consumed = 0
        self._common_step: int | None = None
        """The newest step that all clusters have saved, as far as this one can know."""
        self.writer: RunWriter | None = None
        self._lock: RunLock | None = None
        self._data_note = ""
        self._progress: Progress | None = None
        self._build()
        try:
            self._begin()
        except BaseException:
            self._unlock()
            raise

    # -- setting up --------------------------------------------------------------------------------------------

    def _introduce(self, watch: PeerWatch) -> None:
        everybody = self.fabric.gather("peers", self.fabric.cluster_gather(asdict(watch.this)))
        watch.peers = [Peer(**peer) for cluster in everybody for peer in cluster]

    def _build(self) -> None:
        recipe, train = self.recipe, self.recipe.train
        model = build_model(recipe.model, self.data.tokenizer)
        self.placement = place_model(model, recipe, self.topology)
        self.model_config = model.config.to_dict()
        fragment(model, self.placement, self.fabric)
        self.shapes = parameter_shapes(model)
        engine = build_engine(
            model,
            model.fragmented,
            recipe.deepspeed_config(self.world.cluster),
            accumulation=train.accumulation,
            learning_rate=train.learning_rate,
            betas=train.betas,
            eps=train.eps,
            weight_decay=train.weight_decay,
        )
        self.batch_C = recipe.batches(self.topology)
        self.stepper = Stepper(
            engine,
            self.fabric,
            model.fragmented,
            accumulation=train.accumulation,
            expected_tokens=train.batch * recipe.data.sequence_length,
            clip_norm=train.clip_norm,
            rails=self.topology.num_rails,
            local_rank=self.world.local_rank,
            local_ranks=self.world.size,
            sync=recipe.sync,
            exchange_tokens=recipe.experts.exchange == "tokens",
        )
        self.fragmented = model.fragmented
        self._route_as_trained()
        seed_everything(train.seed, self.index, self.world.local_rank)

    def _begin(self) -> None:
        """Open the log, and continue from the newest checkpoint that every cluster has, if there is any.

        Raises:
            ConfigError: the run directory or checkpoint does not fit, here.
            FleetError: it does not fit elsewhere, or no step was saved by all clusters.
        """
        step = newest_common(
            self.recipe.name, self.topology.names, self.fabric.gather("saved", saved_steps(self.directory))
        )
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
        if self._data_note:
            self._event("data_changed", self._data_note)
        if step is not None:
            self.stepper.shards.publish_masters()
            self.fabric.resume_at(step)
        self.stepper.sync.begin(self.step_number)

    def _route_as_trained(self) -> None:
        """In an evaluation tokens go to all experts, whatever they do in training."""
        model = self.stepper.engine.module
        try:
            self.fragmented.route_locally(model, self.recipe.experts.exchange == "local")
        except ValueError as error:
            raise ConfigError(f"experts.exchange: local: {error}") from None

    def _take_up(self, step: int | None) -> None:
        """What may fail on one rank alone."""
        if self.world.local_rank == 0:
            self._lock = RunLock(self.directory)
        if step is not None:
            self._load(Checkpoint(checkpoint_path(self.directory, step)))
        if step is not None and step > self.recipe.train.steps:
            raise ConfigError(
                f"train.steps: expected at least {step}, where run {self.recipe.name} is already, got "
                f"{self.recipe.train.steps}; raise it, or choose another name"
            )
        if self.world.local_rank == 0:
            self.writer = self._open_log(step)

    def _load(self, checkpoint: Checkpoint) -> None:
        """Take weights, optimizer, data position and random state from a checkpoint of this cluster."""
        manifest = checkpoint.manifest
        check_fits(
            checkpoint,
            self.world.cluster,
            self.placement,
            self.stepper.shards.canonical_sizes,
            self.model_config,
        )
        if manifest.data != self.data.fingerprint:
            self._data_note = (
                f"the data changed since step {manifest.step}; its position {manifest.consumed} is kept"
            )
        restore_rank(checkpoint, self.stepper.shards, self.stepper.engine.module, self.world.local_rank)
        try:
            self.stepper.sync.restore(checkpoint.read, manifest.sync, checkpoint.kinds)
        except CheckpointError:
            raise
        except ValueError as error:
            raise ConfigError(f"{checkpoint.path}: {error}") from None
        self.step_number, self.consumed = manifest.step, manifest.consumed

    def _open_log(self, resumed: int | None) -> RunWriter:
        if resumed is None and (self.directory / SCHEMA_FILE).exists():
            resumed = 0  # an earlier life ended before its first checkpoint
        try:
            writer = RunWriter(
                self.directory,
                cluster=self.world.cluster,
                clusters=self.topology.names,
                layers=len(self.fragmented.layers),
                experts=self.placement.num_experts,
                emulated=self.fabric.emulated,
                resume_step=resumed,
            )
        except (ValueError, OSError) as error:
            raise ConfigError(f"{error}; choose another name or out for this run") from None
        (self.directory / "recipe.yaml").write_text(self.recipe.dump(), encoding="utf-8")
        (self.directory / "topology.yaml").write_text(self.recipe.dump_topology(), encoding="utf-8")
        return writer

    # -- running -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Run the steps that are left; evaluate and checkpoint on the way and at the end.

        Raises:
            FleetError: a cluster is gone, or steps keep failing; this cluster's state is saved first.
        """
        train = self.recipe.train
        if self.index == 0 and self.world.local_rank == 0:
            self._progress = Progress(
                train.steps, self.step_number, self.recipe.name, emulated=self.fabric.emulated
            )
        try:
            if self.step_number == train.steps and not self.stepper.sync.ended:
                self._last_sync(0.0)
                self._evaluate()
                self.save()
            while self.step_number < train.steps:
                self._one_step()
                last = self.step_number == train.steps
                if last or (train.eval_every and self.step_number % train.eval_every == 0):
                    self._evaluate()
                if last or (train.checkpoint_every and self.step_number % train.checkpoint_every == 0):
                    self.save()
        except FleetError:
            if self.step_number not in saved_steps(self.directory):
                self._save_what_there_is()
            raise
        finally:
            if self._progress is not None:
                self._progress.close()

    def _one_step(self) -> None:
        """Until a step is committed or given up."""
        retries = 0
        drawn_from = random_state()
        while True:
            report = self.stepper.step(
                self.step_number,
                self._batches(),
                learning_rate=learning_rate(self.recipe.train, self.step_number),
            )
            if report.outcome != FAILED:
                break
            retries += 1
            restore_random_state(drawn_from)
            self._event(
                STEP_DISCARDED, f"step {self.step_number + 1} failed and is tried again: {report.reason}"
            )
            if retries > self.recipe.fabric.max_retries:
                raise FleetError(
                    f"step {self.step_number + 1} failed {retries} times in a row (fabric.max_retries): {report.reason}"
                )
        self.step_number += 1
        self.consumed += self.batch_C[self.index]
        self._record(*self._sync(report))
        self._check_skipped(report)

    def _sync(self, report: StepReport) -> tuple[StepReport, list[SyncReport]]:
        """What the strategy does after this step, its time booked on the step."""
        started = time.monotonic()
        self.fabric.clock.reset()
        if self.step_number == self.recipe.train.steps:
            syncs = self._last_sync(report.own_tokens * (report.outcome == OK))
        else:
            syncs = self.stepper.sync.after_step(self.step_number, report.own_tokens * (report.outcome == OK))
            self._tell(syncs)
        return report.plus(time.monotonic() - started, self.fabric.clock.reset()), syncs

    def _last_sync(self, tokens: float) -> list[SyncReport]:
        """Merge everything, and try again what fails.

        Raises:
            FleetError: it keeps failing.
        """
        syncs: list[SyncReport] = []
        for _ in range(self.recipe.fabric.max_retries + 1):
            batch = self.stepper.sync.after_step(self.step_number, tokens, last=True)
            self._tell(batch)
            syncs += batch
            failed = [sync.reason for sync in batch if sync.outcome == "failed"]
            if not failed:
                return syncs
            tokens = 0.0
        raise FleetError(
            f"the last merge failed {self.recipe.fabric.max_retries + 1} times (fabric.max_retries): {failed[0]}"
        )

    def _tell(self, syncs: list[SyncReport]) -> None:
        """Into the events, if there is anything to say."""
        for sync in syncs:
            if sync.poisoned:
                names = " and ".join(self.topology.names[cluster] for cluster in sync.poisoned)
                self._event(
                    SYNC_POISONED, f"what cluster {names} had to merge is not finite and was left out"
                )
            if sync.reason:
                self._event(f"sync_{sync.outcome}", sync.reason)

    def _check_skipped(self, report: StepReport) -> None:
        if report.outcome == OK:
            self._skipped = 0
            return
        self._skipped += 1
        self._event(STEP_SKIPPED, f"step {self.step_number} was given up: {report.reason}")
        if self._skipped >= self.recipe.train.max_skipped_steps:
            raise FleetError(
                f"{self._skipped} steps in a row were given up (train.max_skipped_steps), last: {report.reason}"
            )

    _skipped = 0

    def _batches(self) -> list[Batch]:
        """This rank's micro-batches of the next step: its cells of the cluster's sequences."""
        count = self.batch_C[self.index]
        cells = self.recipe.train.accumulation * self.world.size
        filler = self.data.tokenizer.eos_token_id
        batches = []
        for micro in range(self.recipe.train.accumulation):
            cell = micro * self.world.size + self.world.local_rank
            low, high = count * cell // cells, count * (cell + 1) // cells
            batches.append(Batch.of(self.data.sequences(self.consumed + low, high - low), filler))
        return batches

    def _evaluate(self) -> None:
        self.fragmented.route_locally(self.stepper.engine.module, False)
        loss, tokens = evaluate(
            self.stepper.engine,
            self.fabric,
            self.data.evaluation(),
            step=self.step_number,
            rank=sum(self.topology.sizes[: self.index]) + self.world.local_rank,
            ranks=self.topology.world_size,
            filler=self.data.tokenizer.eos_token_id,
            retries=self.recipe.fabric.max_retries,
        )
        self._route_as_trained()
        # Drained here, so that an evaluation's bytes are not booked on the next step.
        # What a fragment under way sends meanwhile belongs to the trunk.
        drained = self.fabric.meter.drain(without="trunk").values()
        sent = sum(traffic.sent + traffic.sent_framing for traffic in drained)
        sent = int(self.fabric.cluster_sum(torch.tensor([sent])))
        if self.writer is not None:
            self.writer.evaluation(self.step_number, loss, tokens)
            self.writer.event(
                "evaluation",
                f"loss {loss:.4f} on {tokens:,} tokens",
                step=self.step_number,
                wan_sent_bytes=sent,
            )
        if self._progress is not None:
            self._progress.note(f"step {self.step_number}: evaluation loss {loss:.4f} on {tokens:,} tokens")

    def _save_what_there_is(self) -> None:
        """Before the run ends badly; the other clusters may not have this step, so no checkpoint goes for it."""
        try:
            self.save(scheduled=False)
        except CheckpointError as error:
            log.error("%s", error)

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
            rank_tensors(shards, self.stepper.sync, self.stepper.engine.module, self.world.local_rank),
            rank=self.world.local_rank,
            gather=self.fabric.cluster_gather,
            keep=self.recipe.train.keep_checkpoints if scheduled else None,
            protect=self._common_step,
        )
        if scheduled:
            self._common_step = self.step_number
        self._event("checkpoint", f"saved step {self.step_number}")
        return path

    def _record(self, report: StepReport, syncs: list[SyncReport]) -> None:
        measured: Measurements = measure(
            self.fabric,
            self.stepper.statistics.drain(),
            report,
            syncs,
            self.topology.names,
            self.stepper.sync.codec_loss(),
        )
        if self.writer is not None:
            self.writer.step(
                self.step_number,
                {
                    "loss": report.own_loss,
                    "tokens": report.own_tokens,
                    "learning_rate": learning_rate(self.recipe.train, self.step_number - 1),
                    "grad_norm": report.grad_norm,
                    **measured.scalars,
                },
                measured.wan_bytes,
                measured.traffic_LC,
                measured.load_LE,
            )
        if self._progress is not None:
            self._progress.show(
                self.step_number,
                loss=report.loss,
                tokens_per_s=report.tokens / report.step_s,
                remote_fraction=measured.remote_fraction,
                wan_bytes=measured.sent_bytes,
            )

    def _event(self, kind: str, message: str) -> None:
        if self.writer is not None:
            self.writer.event(kind, message, step=self.step_number)
        if self._progress is not None and kind != "checkpoint":
            self._progress.note(message)

    def close(self) -> None:
        """Leave the fleet."""
        if self.writer is not None:
            self.writer.close()
        self._unlock()
        self.fabric.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

"""Training of one rank, from its first step to its last."""

from __future__ import annotations

import logging
import time

import torch

from moe_fragment.fabric import FAILED, OK, FleetError
from moe_fragment.observe import STEP_DISCARDED, STEP_SKIPPED
from moe_fragment.sync import SyncReport
from moe_fragment.train.checkpoint import CheckpointError, saved_steps
from moe_fragment.train.evaluation import evaluate
from moe_fragment.train.life import Life
from moe_fragment.train.loss import Batch
from moe_fragment.train.measure import measure
from moe_fragment.train.random_state import random_state, restore_random_state
from moe_fragment.train.schedule import learning_rate
from moe_fragment.train.step import StepReport

log = logging.getLogger(__name__)


class ClusterRun(Life):
    """One rank's part of a run; every method is collective over the fleet unless it says otherwise."""

    def train(self) -> None:
        """Run the steps that are left; evaluate and checkpoint on the way and at the end.

        Raises:
            FleetError: a cluster is gone, or steps keep failing; this cluster's state is saved first.
        """
        train = self.recipe.train
        if self.index == 0 and self.world.local_rank == 0:
            self.journal.show_progress(
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
            self.journal.hide_progress()

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
            message = f"step {self.step_number + 1} failed and is tried again: {report.reason}"
            self.journal.event(STEP_DISCARDED, message, self.step_number)
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
            self.journal.syncs(syncs, self.step_number)
        return report.plus(time.monotonic() - started, self.fabric.clock.reset()), syncs

    def _last_sync(self, tokens: float) -> list[SyncReport]:
        """Merge everything, and try again what fails.

        Raises:
            FleetError: it keeps failing.
        """
        syncs: list[SyncReport] = []
        for _ in range(self.recipe.fabric.max_retries + 1):
            batch = self.stepper.sync.after_step(self.step_number, tokens, last=True)
            self.journal.syncs(batch, self.step_number)
            syncs += batch
            failed = [sync.reason for sync in batch if sync.outcome == "failed"]
            if not failed:
                return syncs
            tokens = 0.0
        raise FleetError(
            f"the last merge failed {self.recipe.fabric.max_retries + 1} times (fabric.max_retries): {failed[0]}"
        )

    def _check_skipped(self, report: StepReport) -> None:
        if report.outcome == OK:
            self._skipped = 0
            return
        self._skipped += 1
        message = f"step {self.step_number} was given up: {report.reason}"
        self.journal.event(STEP_SKIPPED, message, self.step_number)
        if self._skipped >= self.recipe.train.max_skipped_steps:
            raise FleetError(
                f"{self._skipped} steps in a row were given up (train.max_skipped_steps), last: {report.reason}"
            )

    _skipped = 0

    def _batches(self) -> list[Batch]:
        """This rank's micro-batches of the next step: its cells of the cluster's sequences. Of a pipeline, all stages
        read the same.
        """
        count = self.batch_C[self.index]
        replicas = self.replicas[self.index]
        cells = self.recipe.train.accumulation * replicas
        filler = self.data.tokenizer.eos_token_id
        batches = []
        for micro in range(self.recipe.train.accumulation):
            cell = micro * replicas + self.replica
            low, high = count * cell // cells, count * (cell + 1) // cells
            batches.append(Batch.of(self.data.sequences(self.consumed + low, high - low), filler))
        return batches

    def _evaluate(self) -> None:
        self.fragmented.route_locally(False)
        loss, tokens = evaluate(
            self.stepper.engine,
            self.fabric,
            self.data.evaluation(),
            step=self.step_number,
            rank=sum(self.replicas[: self.index]) + self.replica,
            ranks=sum(self.replicas),
            filler=self.data.tokenizer.eos_token_id,
            retries=self.recipe.fabric.max_retries,
        )
        self._route_as_trained()
        # Drained here, so that an evaluation's bytes are not booked on the next step.
        # What a fragment under way sends meanwhile belongs to the trunk.
        drained = self.fabric.meter.drain(without="trunk").values()
        sent = sum(traffic.sent + traffic.sent_framing for traffic in drained)
        sent = int(self.fabric.cluster_sum(torch.tensor([sent])))
        self.journal.evaluation(self.step_number, loss, tokens, sent)

    def _record(self, report: StepReport, syncs: list[SyncReport]) -> None:
        measured = measure(
            self.fabric,
            self.stepper.statistics.drain(),
            report,
            syncs,
            self.topology.names,
            self.stepper.sync.codec_loss(),
            stages=self.stages,
            micro_batches=self.recipe.train.accumulation,
        )
        rate = learning_rate(self.recipe.train, self.step_number - 1)
        self.journal.step(self.step_number, report, measured, rate)

    def _save_what_there_is(self) -> None:
        """Before the run ends badly; the other clusters may not have this step, so no checkpoint goes for it."""
        try:
            self.save(scheduled=False)
        except CheckpointError as error:
            log.error("%s", error)

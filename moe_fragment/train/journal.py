"""What a rank says about its run: log and events on a cluster's first rank, a progress bar on the fleet's first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe_fragment.observe import SYNC_POISONED, RunWriter
from moe_fragment.observe.layout import SCHEMA_FILE
from moe_fragment.schema import ConfigError
from moe_fragment.sync import SyncReport
from moe_fragment.train.measure import Measurements
from moe_fragment.train.progress import Progress
from moe_fragment.train.step import StepReport


class Journal:
    """Silent until `open` and `show_progress`.

    Args:
        directory: the cluster's run directory.
        cluster: its name.
        clusters: names of all.
    """

    def __init__(self, directory: Path, cluster: str, clusters: tuple[str, ...]) -> None:
        self._directory = directory
        self._cluster = cluster
        self._clusters = clusters
        self._writer: RunWriter | None = None
        self._progress: Progress | None = None

    def open(self, resumed: int | None, files: dict[str, str], **shape: Any) -> None:
        """Write a log from now on.

        Args:
            resumed: step that this life goes on from; None for a new run.
            files: text by name, to be written beside the log.
            shape: `layers`, `experts` and `emulated` of the run.

        Raises:
            ConfigError: what lies in the directory is of another run, or it cannot be written.
        """
        if resumed is None and (self._directory / SCHEMA_FILE).exists():
            resumed = 0  # an earlier life ended before its first checkpoint
        try:
            self._writer = RunWriter(
                self._directory, cluster=self._cluster, clusters=self._clusters, resume_step=resumed, **shape
            )
        except (ValueError, OSError) as error:
            raise ConfigError(f"{error}; choose another name or out for this run") from None
        for name, text in files.items():
            (self._directory / name).write_text(text, encoding="utf-8")

    def show_progress(self, steps: int, done: int, name: str, *, emulated: bool) -> None:
        """Show a bar from now on; see `Progress`."""
        self._progress = Progress(steps, done, name, emulated=emulated)

    def hide_progress(self) -> None:
        """Leave the bar as it is."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def event(self, kind: str, message: str, step: int) -> None:
        """Into the events, and above the bar unless it is routine."""
        if self._writer is not None:
            self._writer.event(kind, message, step=step)
        if self._progress is not None and kind != "checkpoint":
            self._progress.note(message)

    def syncs(self, syncs: Sequence[SyncReport], step: int) -> None:
        """Into the events, if there is anything to say."""
        for sync in syncs:
            if sync.poisoned:
                names = " and ".join(self._clusters[cluster] for cluster in sync.poisoned)
                message = f"what cluster {names} had to merge is not finite and was left out"
                self.event(SYNC_POISONED, message, step)
            if sync.reason:
                self.event(f"sync_{sync.outcome}", sync.reason, step)

    def evaluation(self, step: int, loss: float, tokens: int, sent_bytes: int) -> None:
        """A held-out loss in nats per token, and what leaving the cluster it took."""
        if self._writer is not None:
            self._writer.evaluation(step, loss, tokens)
            message = f"loss {loss:.4f} on {tokens:,} tokens"
            self._writer.event("evaluation", message, step=step, wan_sent_bytes=sent_bytes)
        if self._progress is not None:
            self._progress.note(f"step {step}: evaluation loss {loss:.4f} on {tokens:,} tokens")

    def step(self, step: int, report: StepReport, measured: Measurements, learning_rate: float) -> None:
        """A committed step, counted from 1."""
        if self._writer is not None:
            scalars = {
                "loss": report.own_loss,
                "tokens": report.own_tokens,
                "learning_rate": learning_rate,
                "grad_norm": report.grad_norm,
                **measured.scalars,
            }
            self._writer.step(step, scalars, measured.wan_bytes, measured.traffic_LC, measured.load_LE)
        if self._progress is not None:
            self._progress.show(
                step,
                loss=report.loss,
                tokens_per_s=report.tokens / report.step_s,
                remote_fraction=measured.remote_fraction,
                wan_bytes=measured.sent_bytes,
            )

    def close(self) -> None:
        """Leave the log complete."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

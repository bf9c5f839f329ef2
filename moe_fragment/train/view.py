"""What a person sees of a run that other processes write: its log, as a progress bar and notes."""

from __future__ import annotations

import time
from pathlib import Path

from moe_fragment.observe import RunLog, RunLogError
from moe_fragment.topology import Topology
from moe_fragment.train.progress import Progress
from moe_fragment.train.recipe import Recipe


class RunView:
    """Progress of a run as its log tells it."""

    def __init__(self, run: Path, recipe: Recipe, topology: Topology) -> None:
        self._run, self._recipe, self._topology = run, recipe, topology
        self._log: RunLog | None = None
        self._bar: Progress | None = None
        self._events = 0
        self._evaluations = 0
        self._born = time.time()

    def refresh(self) -> None:
        """Show what is new."""
        try:
            if self._log is None:
                self._log = RunLog(self._run)
            elif not self._log.refresh():
                return
            steps = self._log.steps
        except RunLogError:
            self._log = None
            return
        if self._bar is None:
            done = int(steps["step"].max()) if len(steps) else 0
            self._bar = Progress(
                self._recipe.train.steps, done, self._recipe.name, emulated=self._recipe.fabric.emulate
            )
        self._show_events()
        written = steps["step"].value_counts()
        whole = written.index[written == len(self._topology.names)]
        if not len(whole):
            return
        last = steps[
            steps["step"] == whole.max()
        ]  # a step that some cluster has not written yet is not shown
        tokens = last["tokens"].sum()
        pairs = last["remote_pairs"].sum() + last["local_pairs"].sum()
        wan = self._log.wan_bytes(steps=[int(last["step"].iloc[0])])
        self._bar.show(
            int(last["step"].iloc[0]),
            loss=float((last["loss"].fillna(0) * last["tokens"]).sum() / max(tokens, 1)),
            tokens_per_s=float(tokens / last["step_s"].max()),
            remote_fraction=float(last["remote_pairs"].sum() / max(pairs, 1)),
            wan_bytes=float(wan[..., 0].sum()),
        )

    def _show_events(self) -> None:
        assert self._log is not None
        assert self._bar is not None
        evaluations = self._log.evaluations
        for row in evaluations.iloc[self._evaluations :].itertuples():
            if row.cluster == self._topology.names[0]:
                self._bar.note(f"step {row.step}: evaluation loss {row.loss:.4f} on {row.tokens:,} tokens")
        self._evaluations = len(evaluations)
        events = self._log.events
        for row in events.iloc[self._events :].itertuples():
            if row.kind not in ("checkpoint", "evaluation") and row.time > self._born:
                self._bar.note(f"cluster {row.cluster}: {row.message}")
        self._events = len(events)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

"""The progress bar of a run: loss, tokens per second, remote share, bytes over the WAN."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tqdm import tqdm

from moe_fragment.units import format_size


class Progress:
    """A bar on standard error.

    Args:
        steps: of the whole run.
        done: steps of an earlier life.
        name: of the run.
        emulated: whether links are emulated; said in the bar.
    """

    def __init__(self, steps: int, done: int, name: str, *, emulated: bool) -> None:
        label = f"{name} (emulated links)" if emulated else name
        self._bar = tqdm(total=steps, initial=done, desc=label, unit="step", dynamic_ncols=True)

    def show(
        self, step: int, *, loss: float, tokens_per_s: float, remote_fraction: float, wan_bytes: float
    ) -> None:
        """Move on to `step` (committed steps so far)."""
        figures: Mapping[str, str] = {
            "loss": f"{loss:.3f}",
            "tok/s": f"{tokens_per_s:,.0f}",
            "remote": f"{remote_fraction:.0%}",
            "WAN": f"{format_size(wan_bytes)}/step",
        }
        self._bar.set_postfix(figures, refresh=False)
        self._bar.update(step - self._bar.n)

    def note(self, message: str) -> None:
        """A line above the bar."""
        self._bar.write(message, file=sys.stderr)  # tqdm's own choice, standard output, belongs to --json

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()

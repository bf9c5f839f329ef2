"""What a run directory looks like, shared by the writer and the reader.

Problem: clusters share no file system; a run is watched while it is written, interrupted and resumed.
Method: each cluster owns one directory of append-only files. Scalars are JSON lines; the big arrays are
fixed-size binary records (`traffic.bin`, `load.bin`, `wan.bin`) described by `schema.json`. A step is
recorded when its line in `metrics.jsonl` is complete; its binary records are written before that line.
Anything after the last newline, or after the last whole record, is not there yet.

The rule for several lives of one run: *the later life wins, in file order*. A resumed writer appends
`{"resume_step": s}`, which drops the earlier rows beyond step s, and a row of step t drops the earlier rows
of step t and later. Nothing that a reader may hold is ever rewritten. Events are never dropped.

L MoE layers, C clusters, E experts, K channels.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 1
SCHEMA_FILE = "schema.json"
METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"
EVENTS_FILE = "events.jsonl"
CHANNELS = ("dispatch", "combine", "trunk", "heal")

STEP_DISCARDED = "step_discarded"
"""Kind of the event that says: this step failed somewhere in the fleet and was undone everywhere."""
STEP_SKIPPED = "step_skipped"
"""Kind of the event that says: this step overflowed numerically and was not applied."""
SYNC_POISONED = "sync_poisoned"
"""Kind of the event that says: a cluster's contribution to a merge was not finite and was left out."""
SYNC_FAILED = "sync_failed"
"""Kind of the event that says: a merge did not arrive everywhere and is tried again."""
SYNC_REFUSED = "sync_refused"
"""Kind of the event that says: trunk copies were too far apart to be merged."""

SCALARS = (
    "loss",  # mean over this cluster's loss-bearing tokens of the step, nats
    "tokens",  # loss-bearing tokens of this cluster in the step
    "learning_rate",
    "grad_norm",  # fleet-wide, before clipping
    "step_s",  # wall clock of the whole step, seconds, as are the four below
    "compute_s",
    "local_wait_s",  # waiting for ranks of the same cluster
    "wan_wait_s",  # waiting for another cluster with nothing left to compute
    "wan_hidden_s",  # WAN transfers that flew while something was computed
    "remote_rows",  # activation rows sent to other clusters (one for each token and remote cluster)
    "local_pairs",  # (token, expert) pairs computed in this cluster for its own tokens
    "remote_pairs",  # (token, expert) pairs of this cluster's tokens computed elsewhere
    "rows_without_dedup",  # rows that one row for each pair would have sent
    "dropped_pairs",  # (token, expert) pairs left out because the expert is elsewhere and tokens stay
    "sync_s",  # wall clock of the syncs after the step, seconds, part of step_s
    "trunk_distance",  # RMS distance of trunk copies before a merge, relative to the trunk; only in steps with one
    "trunk_cosine",  # mean cosine between the clusters' pseudo-gradients; only in steps with one
    "bubble",  # part of a pipeline's time in which its stages were idle; only with one
    "bubble_expected",  # the same if all stages took the same time
    "codec_error",  # relative L2 error of what a codec sent; only in steps in which it did
)
"""What the training loop writes; others may be added freely, `loss` and `tokens` may not be missing.

Of each stage of a pipeline also `stage_<number>_idle_s` and `stage_<number>_wan_wait_s`, seconds.
"""


class RunLogError(ValueError):
    """A run directory cannot be read; the message is one sentence for people."""


@dataclass(frozen=True, kw_only=True)
class Schema:
    """Contents of `schema.json`: how to read the files next to it."""

    version: int
    """Layout version; a reader refuses one it does not know."""
    cluster: str
    """The cluster that wrote this directory."""
    clusters: tuple[str, ...]
    """All clusters of the fleet, in topology order: the C axis of every array."""
    layers: int
    """Number of MoE layers, L."""
    experts: int
    """Experts in each MoE layer, E."""
    channels: tuple[str, ...]
    """What WAN bytes are counted under: the K axis of `wan.bin`."""
    emulated: bool
    """Whether the links between clusters were emulated, which every report must say."""

    def records(self) -> dict[str, np.dtype[Any]]:
        """Record type of each binary file: the step number, then the values (little endian)."""
        clusters = len(self.clusters)
        return {
            # tokens of this cluster sent to each cluster (itself included)
            "traffic.bin": _record("<i8", (self.layers, clusters)),
            # tokens of this cluster routed to each expert, wherever it lives (the largest: 4 bytes)
            "load.bin": _record("<i4", (self.layers, self.experts)),
            # payload bytes to and from each peer: [..., 0] sent, [..., 1] received
            "wan.bin": _record("<i8", (clusters, len(self.channels), 2)),
        }

    def write(self, directory: Path) -> None:
        """Write `schema.json` atomically."""
        document = {
            **asdict(self),
            "records": {
                name: {
                    "dtype": record["values"].base.str,
                    "shape": record["values"].shape,
                    "bytes": record.itemsize,
                }
                for name, record in self.records().items()
            },
        }
        partial = directory / (SCHEMA_FILE + ".partial")
        partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        os.replace(partial, directory / SCHEMA_FILE)

    @classmethod
    def read(cls, directory: Path) -> Schema:
        """Read `schema.json` of one cluster directory.

        Raises:
            RunLogError: the file is missing, damaged, or of a version this package does not know.
        """
        path = directory / SCHEMA_FILE
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            version = document["version"]
        except OSError as error:
            raise RunLogError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, KeyError, TypeError):
            raise RunLogError(f"{path}: not a run log schema (damaged or half-written)") from None
        if version != VERSION:
            raise RunLogError(f"{path}: schema version {version!r}, but this package reads version {VERSION}")
        try:
            return cls(
                version=version,
                cluster=str(document["cluster"]),
                clusters=tuple(str(name) for name in document["clusters"]),
                layers=int(document["layers"]),
                experts=int(document["experts"]),
                channels=tuple(str(name) for name in document["channels"]),
                emulated=bool(document["emulated"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RunLogError(f"{path}: field {error} is missing or has the wrong type") from None


def surviving(steps: npt.NDArray[np.int64], cuts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which rows the later lives of a run leave standing.

    Args:
        steps: [n] step of each row in file order; -1 for a resume marker.
        cuts: [n] what row i does to the rows before it: drops those with a step >= cuts[i].

    Returns:
        [n] mask of the rows to keep (markers are not kept).
    """
    if len(steps) == 0:
        return np.zeros(0, dtype=bool)
    lowest_later_cut = np.full(len(steps), np.iinfo(np.int64).max)
    lowest_later_cut[:-1] = np.minimum.accumulate(cuts[::-1])[::-1][1:]
    return (steps >= 0) & (steps < lowest_later_cut)


def _record(dtype: str, shape: tuple[int, ...]) -> np.dtype[Any]:
    return np.dtype([("step", "<i8"), ("values", dtype, shape)])

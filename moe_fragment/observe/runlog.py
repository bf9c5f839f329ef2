"""A run as pandas and numpy: the logs of its clusters put side by side.

Axes of the arrays: steps (`step_numbers`, the union over clusters), C clusters in topology order, L MoE
layers, E experts, K channels. A step that a cluster did not record is zero in arrays and absent from frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from moe_fragment.observe.layout import METRICS_FILE, SCHEMA_FILE, RunLogError
from moe_fragment.observe.reader import ClusterLog

Steps = slice | Sequence[int] | npt.NDArray[np.int64] | None


class RunLog:
    """Reads one run, finished or still being written.

    Opening reads only the schemas; everything else is read when it is first asked for and kept. `refresh`
    picks up what was appended since, and clusters that appeared since.

    Args:
        path: a run directory, one cluster's directory, or several of either (of the same run).

    Raises:
        RunLogError: nothing there, a damaged or unknown schema, or directories of different fleets.
    """

    def __init__(self, path: str | Path | Sequence[str | Path]) -> None:
        paths = [path] if isinstance(path, (str, Path)) else list(path)
        if not paths:
            raise RunLogError("no run directory was given")
        self.paths = [Path(item) for item in paths]
        self._logs: dict[str, ClusterLog] = {}
        self._cache: dict[str, Any] = {}
        self._find()

    @property
    def name(self) -> str:
        """Name of the run: that of its directory."""
        first = self.paths[0].resolve()
        return first.parent.name if (first / SCHEMA_FILE).exists() else first.name

    @property
    def clusters(self) -> tuple[str, ...]:
        """All clusters of the fleet in topology order: the C axis."""
        return self._schema.clusters

    @property
    def present(self) -> tuple[str, ...]:
        """The clusters whose logs were found."""
        return tuple(name for name in self.clusters if name in self._logs)

    @property
    def layers(self) -> int:
        """Number of MoE layers, L."""
        return self._schema.layers

    @property
    def experts(self) -> int:
        """Experts in each MoE layer, E."""
        return self._schema.experts

    @property
    def channels(self) -> tuple[str, ...]:
        """What WAN bytes are counted under: the K axis."""
        return self._schema.channels

    @property
    def emulated(self) -> bool:
        """Whether any cluster ran over emulated links."""
        return any(log.schema.emulated for log in self._logs.values())

    @property
    def steps(self) -> pd.DataFrame:
        """One row per step and cluster: `step`, `cluster`, `time` and every scalar, in step order."""
        return self._kept(
            "steps", lambda: self._side_by_side({n: log.steps for n, log in self._logs.items()})
        )

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row per evaluated step and cluster: `step`, `cluster`, `loss`, `tokens`, `time`."""
        frames = {name: log.evaluations for name, log in self._logs.items()}
        return self._kept(
            "evaluations",
            lambda: self._side_by_side(frames).reindex(columns=["step", "cluster", "loss", "tokens", "time"]),
        )

    @property
    def events(self) -> pd.DataFrame:
        """What happened, by time: `time`, `step`, `cluster`, `kind`, `message`, `fields` (a dict)."""

        def build() -> pd.DataFrame:
            rows = [{**row, "cluster": name} for name in self.present for row in self._logs[name].events]
            frame = pd.DataFrame(rows, columns=["time", "step", "cluster", "kind", "message", "fields"])
            return frame.sort_values("time", kind="stable", ignore_index=True)

        return self._kept("events", build)

    @property
    def wan(self) -> pd.DataFrame:
        """Payload bytes, long: `step`, `cluster`, `peer`, `channel`, `sent_bytes`, `received_bytes`.

        One row per recorded step, cluster, peer and channel, for the channels that carried anything.
        """
        return self._kept("wan", self._wan_frame)

    @property
    def step_numbers(self) -> npt.NDArray[np.int64]:
        """The steps that any cluster recorded, ascending: the first axis of every array."""
        return self._kept("step_numbers", lambda: np.unique(self.steps["step"].to_numpy()))

    def traffic(self, layer: int | None = None, steps: Steps = None) -> npt.NDArray[np.int64]:
        """Tokens sent from cluster to cluster.

        Args:
            layer: one MoE layer, or None for all.
            steps: step numbers wanted, a slice of `step_numbers`, or None for all.

        Returns:
            [steps, L, C source, C target], without the L axis when `layer` is given.
        """
        by_source = self._array("traffic.bin", steps, np.int64, self._layer(layer))
        return np.moveaxis(by_source, 1, -2)

    def load(self, layer: int | None = None, steps: Steps = None) -> npt.NDArray[np.int32]:
        """Tokens of each cluster routed to each expert: [steps, C, L, E], without L when `layer` is given."""
        return self._array("load.bin", steps, np.int32, self._layer(layer))

    def wan_bytes(self, steps: Steps = None) -> npt.NDArray[np.int64]:
        """Payload bytes: [steps, C, C peer, K, 2], the last axis being sent and received."""
        return self._array("wan.bin", steps, np.int64, ...)

    def refresh(self) -> bool:
        """Read what was appended since the last look; True when there was anything."""
        found = self._find()
        grown = [log.refresh() for log in self._logs.values()]
        if found or any(grown):
            self._cache.clear()
            return True
        return False

    def summary(self) -> dict[str, Any]:
        """What `moe-fragment report` shows; see `moe_fragment.observe.summary.summarise`."""
        from moe_fragment.observe.summary import summarise

        return summarise(self)

    def _find(self) -> bool:
        """Open the cluster directories not seen yet; True when there was one."""
        found = False
        opened = {log.directory for log in self._logs.values()}
        for path in self.paths:
            for directory in _cluster_directories(path):
                if directory not in opened:
                    self._add(ClusterLog(directory))
                    found = True
        return found

    def _add(self, log: ClusterLog) -> None:
        name = log.schema.cluster
        if name not in log.schema.clusters:
            raise RunLogError(
                f"{log.directory / SCHEMA_FILE}: cluster {name!r} is not among its own clusters"
            )
        if name in self._logs:
            raise RunLogError(
                f"{log.directory}: cluster {name!r} was already read from {self._logs[name].directory}"
            )
        for other in self._logs.values():
            for field in ("clusters", "layers", "experts", "channels"):
                ours, theirs = getattr(log.schema, field), getattr(other.schema, field)
                if ours != theirs:
                    raise RunLogError(
                        f"{log.directory}: {field} {ours} differs from {theirs} in {other.directory}"
                    )
        self._logs[name] = log

    @property
    def _schema(self) -> Any:
        return next(iter(self._logs.values())).schema

    def _kept(self, key: str, build: Any) -> Any:
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    def _side_by_side(self, frames: dict[str, pd.DataFrame]) -> pd.DataFrame:
        parts = []
        for name in self.present:
            part = frames[name]
            code = np.full(len(part), self.clusters.index(name), dtype=np.int8)
            part = part.assign(cluster=pd.Categorical.from_codes(code, categories=list(self.clusters)))
            parts.append(part)
        filled = [part for part in parts if len(part)] or parts[:1]
        frame = pd.concat(filled, ignore_index=True).sort_values("step", kind="stable", ignore_index=True)
        rest = [name for name in frame.columns if name not in ("step", "cluster")]
        return frame[["step", "cluster", *rest]]

    def _array(self, name: str, steps: Steps, dtype: Any, index: Any) -> npt.NDArray[Any]:
        wanted = self._wanted(steps)
        shape = next(iter(self._logs.values())).schema.records()[name]["values"].shape
        if index is not ...:
            shape = shape[1:]
        array = np.zeros((len(wanted), len(self.clusters), *shape), dtype=dtype)
        for cluster, log in self._logs.items():
            log.values(name, wanted, array[:, self.clusters.index(cluster)], index)
        return array

    def _wanted(self, steps: Steps) -> npt.NDArray[np.int64]:
        if steps is None:
            return self.step_numbers
        if isinstance(steps, slice):
            return self.step_numbers[steps]
        return np.asarray(steps, dtype=np.int64).reshape(-1)

    def _layer(self, layer: int | None) -> Any:
        if layer is None:
            return ...
        if not 0 <= layer < self.layers:
            raise ValueError(f"layer: {layer} is not between 0 and {self.layers - 1}")
        return layer

    def _wan_frame(self) -> pd.DataFrame:
        carried: list[tuple[str, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for cluster in self.present:
            steps = self._logs[cluster].steps["step"].to_numpy()
            values = np.zeros((len(steps), len(self.clusters), len(self.channels), 2), dtype=np.int64)
            self._logs[cluster].values("wan.bin", steps, values)
            carried.append((cluster, steps, values))
        used = np.flatnonzero(sum(values.sum(axis=(0, 1, 3)) for _, _, values in carried))
        columns: dict[str, list[npt.NDArray[Any]]] = {
            n: [] for n in ("step", "cluster", "peer", "channel", "sent", "got")
        }
        for cluster, steps, values in carried:
            own = self.clusters.index(cluster)
            peers = np.delete(np.arange(len(self.clusters)), own)
            part = values[:, peers][:, :, used].reshape(-1, 2)
            each = len(peers) * len(used)
            columns["step"].append(np.repeat(steps, each))
            columns["cluster"].append(np.full(len(part), own, dtype=np.int8))
            columns["peer"].append(np.tile(np.repeat(peers, len(used)), len(steps)).astype(np.int8))
            columns["channel"].append(np.tile(used, len(steps) * len(peers)).astype(np.int8))
            columns["sent"].append(part[:, 0])
            columns["got"].append(part[:, 1])
        joined = {name: np.concatenate(parts) for name, parts in columns.items()}
        return pd.DataFrame(
            {
                "step": joined["step"],
                "cluster": pd.Categorical.from_codes(joined["cluster"], categories=list(self.clusters)),
                "peer": pd.Categorical.from_codes(joined["peer"], categories=list(self.clusters)),
                "channel": pd.Categorical.from_codes(joined["channel"], categories=list(self.channels)),
                "sent_bytes": joined["sent"],
                "received_bytes": joined["got"],
            }
        )


def _cluster_directories(path: Path) -> list[Path]:
    if not path.exists():
        raise RunLogError(f"{path}: no such run directory")
    if not path.is_dir():
        raise RunLogError(f"{path}: a file, but a run directory was expected")
    if (path / SCHEMA_FILE).exists():
        return [path]
    found = sorted(child for child in path.iterdir() if (child / SCHEMA_FILE).exists())
    if not found:
        if (path / METRICS_FILE).exists():
            raise RunLogError(f"{path}: metrics without {SCHEMA_FILE} (half-written or half-collected)")
        raise RunLogError(f"{path}: holds no run log (expected {SCHEMA_FILE} in it or one level below)")
    return found

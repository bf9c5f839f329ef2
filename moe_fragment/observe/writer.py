"""Writes the run log of one cluster (layout.py says what it looks like and why).

One process of a cluster owns the writer. Every step is handed to the operating system before `step` returns,
so a reader on the same machine sees it at once and a killed process loses only the step it was writing.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from moe_fragment.observe.layout import (
    CHANNELS,
    EVALUATIONS_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    SCHEMA_FILE,
    VERSION,
    Schema,
)

WanBytes = Mapping[str, Mapping[str, Mapping[str, int]]]
"""Payload bytes of one step: peer -> channel -> {"sent": bytes, "received": bytes}."""


class RunWriter:
    """Appends the measurements of one cluster to its run directory.

    Args:
        directory: the cluster's own directory, `runs/<run>/<cluster>`; made when missing.
        cluster: name of this cluster.
        clusters: all clusters in topology order.
        layers: number of MoE layers.
        experts: experts in each MoE layer.
        emulated: whether the links between clusters are emulated.
        resume_step: the last step to keep when the directory already holds a log (0 keeps none); None for a
            new run.
        channels: names that WAN bytes are counted under.

    Raises:
        ValueError: the directory holds a log and `resume_step` is None, or it was written for another fleet.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        cluster: str,
        clusters: Sequence[str],
        layers: int,
        experts: int,
        emulated: bool,
        resume_step: int | None = None,
        channels: Sequence[str] = CHANNELS,
    ) -> None:
        self.directory = Path(directory)
        if len(set(clusters)) != len(clusters):
            raise ValueError(f"clusters: a name is used twice in {list(clusters)}")
        if cluster not in clusters:
            raise ValueError(f"cluster: {cluster!r} is not among the clusters {list(clusters)}")
        if resume_step is not None and resume_step < 0:
            raise ValueError(f"resume_step: {resume_step} is negative")
        self.schema = Schema(
            version=VERSION,
            cluster=cluster,
            clusters=tuple(clusters),
            layers=layers,
            experts=experts,
            channels=tuple(channels),
            emulated=emulated,
        )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._check_earlier_life(resume_step)
        self.schema.write(self.directory)
        self._last_step = -1 if resume_step is None else resume_step
        self._records = self.schema.records()
        self._metrics = _open_lines(self.directory / METRICS_FILE)
        self._evaluations = _open_lines(self.directory / EVALUATIONS_FILE)
        self._events = _open_lines(self.directory / EVENTS_FILE)
        self._binary = {
            name: _open_records(self.directory / name, dtype.itemsize)
            for name, dtype in self._records.items()
        }
        if resume_step is not None:
            marker = {"resume_step": resume_step, "time": time.time()}
            _append(self._metrics, marker)
            _append(self._evaluations, marker)
            self.event("resumed", f"resumed after step {resume_step}", step=resume_step)

    def step(
        self,
        step: int,
        scalars: Mapping[str, float],
        wan_bytes: WanBytes,
        traffic_LC: npt.ArrayLike,
        load_LE: npt.ArrayLike,
    ) -> None:
        """Record one committed step.

        Args:
            step: its number, greater than that of the step before.
            scalars: name to number; `loss` and `tokens` at least. What is not finite is recorded as missing.
            wan_bytes: payload bytes by peer, channel and direction; what is left out is zero.
            traffic_LC: [L, C] integers, tokens sent from this cluster to each cluster, by MoE layer.
            load_LE: [L, E] integers, tokens of this cluster routed to each expert, by MoE layer.

        Raises:
            KeyError: a scalar that must be there is missing, or a peer, channel or direction is unknown.
            ValueError: an array has a wrong shape or is not integer, a scalar no number, or the step is old.
        """
        if step <= self._last_step:
            raise ValueError(f"step: {step} is not after step {self._last_step}, which is already recorded")
        line = self._line(step, scalars)
        records = {
            "traffic.bin": self._pack("traffic.bin", step, traffic_LC, "traffic_LC"),
            "load.bin": self._pack("load.bin", step, load_LE, "load_LE"),
            "wan.bin": self._pack("wan.bin", step, self._wan_array(wan_bytes), "wan_bytes"),
        }
        for name, record in records.items():
            _write(self._binary[name], record)
        _append(self._metrics, line)  # last: this line is what makes the step exist
        self._last_step = step

    def event(self, kind: str, message: str, *, step: int | None = None, **fields: Any) -> None:
        """Record something that happened, at the last recorded step unless `step` says otherwise.

        Args:
            kind: a short word that programs group by, such as `resumed` or `step_discarded`.
            message: one sentence for people.
            step: the step it belongs to.
            fields: anything JSON can hold.
        """
        where = max(self._last_step, 0) if step is None else step
        _append(
            self._events,
            {"time": time.time(), "step": where, "kind": kind, "message": message, "fields": _finite(fields)},
        )

    def evaluation(self, step: int, loss: float, tokens: int) -> None:
        """Record an evaluation of the weights after `step`: mean loss (nats per token) and token count."""
        _append(
            self._evaluations,
            {"step": int(step), "loss": _finite(float(loss)), "tokens": int(tokens), "time": time.time()},
        )

    def close(self) -> None:
        """Close all files; further calls on the writer fail."""
        for file in (self._metrics, self._evaluations, self._events, *self._binary.values()):
            file.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_earlier_life(self, resume_step: int | None) -> None:
        if not (self.directory / SCHEMA_FILE).exists():
            return
        if resume_step is None:
            raise ValueError(
                f"{self.directory}: already holds a run log; resume it or choose another directory"
            )
        earlier = Schema.read(self.directory)
        for field in ("cluster", "clusters", "layers", "experts", "channels"):
            before, now = getattr(earlier, field), getattr(self.schema, field)
            if before != now:
                raise ValueError(
                    f"{self.directory}: cannot resume, the log there has {field} {before}, not {now}"
                )

    def _line(self, step: int, scalars: Mapping[str, float]) -> dict[str, Any]:
        for name in ("loss", "tokens"):
            if name not in scalars:
                raise KeyError(f"scalars: {name!r} is missing")
        line: dict[str, Any] = {"step": int(step), "time": time.time()}
        for name, value in scalars.items():
            if name in ("step", "time", "resume_step", "cluster"):
                raise ValueError(f"scalars: the name {name!r} is taken by the log itself")
            try:
                number = value if isinstance(value, int) else float(value)
            except (TypeError, ValueError):
                raise ValueError(f"scalars: {name!r} is {value!r}, not a number") from None
            line[name] = number if math.isfinite(number) else None
        return line

    def _wan_array(self, wan_bytes: WanBytes) -> npt.NDArray[np.int64]:
        array = np.zeros(self._records["wan.bin"]["values"].shape, dtype=np.int64)
        peers = {name: i for i, name in enumerate(self.schema.clusters)}
        channels = {name: i for i, name in enumerate(self.schema.channels)}
        for peer, by_channel in wan_bytes.items():
            if peer not in peers or peer == self.schema.cluster:
                raise KeyError(
                    f"wan_bytes: {peer!r} is not a peer of {self.schema.cluster!r} in {list(peers)}"
                )
            for channel, directions in by_channel.items():
                if channel not in channels:
                    raise KeyError(f"wan_bytes: channel {channel!r} is not one of {list(channels)}")
                if unknown := set(directions) - {"sent", "received"}:
                    raise KeyError(f"wan_bytes: {sorted(unknown)} given, 'sent' and 'received' expected")
                array[peers[peer], channels[channel]] = (
                    directions.get("sent", 0),
                    directions.get("received", 0),
                )
        return array

    def _pack(self, name: str, step: int, values: npt.ArrayLike, argument: str) -> bytes:
        record_type = self._records[name]
        wanted = record_type["values"]
        array = np.asarray(values)
        if array.shape != wanted.shape:
            raise ValueError(f"{argument}: shape {array.shape}, expected {wanted.shape}")
        if array.dtype.kind not in "iu":
            raise ValueError(f"{argument}: {array.dtype} values, expected integers")
        if array.size and (array.min() < 0 or array.max() > np.iinfo(wanted.base).max):
            raise ValueError(f"{argument}: a count is negative or above {np.iinfo(wanted.base).max}")
        record = np.zeros((), dtype=record_type)
        record["step"] = step
        record["values"] = array
        return record.tobytes()


def _finite(value: Any) -> Any:
    """`value` with every number that JSON cannot hold replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _append(file: BinaryIO, row: Mapping[str, Any]) -> None:
    """One write for one line, so that a reader sees all of it or a torn tail."""
    _write(file, json.dumps(row, separators=(",", ":"), allow_nan=False).encode() + b"\n")


def _write(file: BinaryIO, data: bytes) -> None:
    written = file.write(data)
    if written != len(data):
        raise OSError(f"{file.name}: only {written} of {len(data)} bytes were written (is the disk full?)")


# A torn tail is what an interrupted life left after its last newline or whole record. Readers never consume
# it, so cutting it off takes nothing from them; without the cut the next row would be glued to it.


def _open_lines(path: Path) -> BinaryIO:
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (kept open, `close` closes it)
    size = file.tell()
    whole = size
    with open(path, "rb") as reader:
        while whole > 0:
            start = max(0, whole - 65536)
            reader.seek(start)
            newline = reader.read(whole - start).rfind(b"\n")
            if newline >= 0:
                whole = start + newline + 1
                break
            whole = start
    if whole != size:
        file.truncate(whole)
    return file


def _open_records(path: Path, record_bytes: int) -> BinaryIO:
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (kept open, `close` closes it)
    size = file.tell()
    if size % record_bytes:
        file.truncate(size - size % record_bytes)
    return file

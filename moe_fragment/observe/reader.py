"""Reads the run directory of one cluster, a piece at a time and while it is being written.

Lines are parsed by arrow in bulk; binary records stay in the page cache behind a memory map. Nothing is read
before it is asked for, and a refresh reads only what was appended.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

from moe_fragment.observe.layout import (
    EVALUATIONS_FILE,
    EVENTS_FILE,
    METRICS_FILE,
    RunLogError,
    Schema,
    surviving,
)

_BLOCK_BYTES = 1 << 20


class ClusterLog:
    """The log of one cluster: what its files hold so far, later lives applied.

    Args:
        directory: the directory that holds `schema.json`.

    Raises:
        RunLogError: no schema, a damaged one, or one of an unknown version.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.schema = Schema.read(directory)
        self._metrics = _Rows(directory / METRICS_FILE)
        self._evaluations = _Rows(directory / EVALUATIONS_FILE)
        self._events = _Events(directory / EVENTS_FILE)
        self._binary = {
            name: _Records(directory / name, dtype) for name, dtype in self.schema.records().items()
        }

    def refresh(self) -> bool:
        """Read what was appended; True when there was something."""
        grown = [rows.refresh() for rows in (self._metrics, self._evaluations, self._events)]
        return any(grown)

    @property
    def steps(self) -> pd.DataFrame:
        """One row per step, in step order: `step`, `time` (seconds since 1970) and every scalar."""
        return self._metrics.frame()

    @property
    def evaluations(self) -> pd.DataFrame:
        """One row per evaluated step: `step`, `loss`, `tokens`, `time`."""
        return self._evaluations.frame()

    @property
    def events(self) -> list[dict[str, Any]]:
        """All events, oldest first."""
        return self._events.rows

    def values(
        self, name: str, steps: npt.NDArray[np.int64], out: npt.NDArray[Any], index: Any = ...
    ) -> None:
        """Copy binary records into `out`; a step that this cluster did not record is left as it is.

        Args:
            name: `traffic.bin`, `load.bin` or `wan.bin`.
            steps: [n] step numbers wanted.
            out: [n, ...] where they go.
            index: selects a part of each record, e.g. one layer.
        """
        records = self._binary[name]
        records.refresh()
        recorded = self.steps["step"].to_numpy()
        place = records.locate(steps)
        place[~np.isin(steps, recorded)] = -1
        found = place >= 0
        if not found.any():
            return
        rows: Any = place[found]
        if rows[-1] - rows[0] + 1 == len(rows) and (np.diff(rows) == 1).all():
            rows = slice(int(rows[0]), int(rows[-1]) + 1)
        values = records.values[rows]
        out[found] = values if index is ... else values[:, index]


class _Tail:
    """Hands out the complete lines that were appended to a file since the last time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines_read = 0
        self._offset = 0

    def read(self) -> tuple[bytes, bool]:
        """The new complete lines, and whether a shorter file took the place of the old one."""
        if not self.path.exists():
            return b"", False
        with open(self.path, "rb") as file:
            size = file.seek(0, io.SEEK_END)
            replaced = size < self._offset
            if replaced:
                self._offset = self.lines_read = 0
            file.seek(self._offset)
            data = file.read(size - self._offset)
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        return data, replaced


class _Rows:
    """A file of JSON lines with steps and resume markers, as a frame of numbers."""

    def __init__(self, path: Path) -> None:
        self._tail = _Tail(path)
        self._frame: pd.DataFrame | None = None

    def frame(self) -> pd.DataFrame:
        if self._frame is None:
            self.refresh()
        assert self._frame is not None
        return self._frame

    def refresh(self) -> bool:
        data, replaced = self._tail.read()
        if self._frame is None or replaced:
            self._frame = pd.DataFrame({"step": np.zeros(0, dtype=np.int64)})
        if not data:
            return replaced
        columns = self._parse(data)
        self._tail.lines_read += data.count(b"\n")
        steps, resumed = columns.pop("step"), columns.pop("resume_step")
        cuts = np.where(steps >= 0, steps, resumed + 1)
        keep = surviving(steps, cuts)
        fresh = pd.DataFrame(
            {"step": steps[keep], **{name: values[keep] for name, values in columns.items()}}
        )
        # All new rows cut the old ones too, those that a later row has cut included.
        old = self._frame[self._frame["step"].to_numpy() < cuts.min()]
        frame = pd.concat([old, fresh], ignore_index=True) if len(old) else fresh
        self._frame = frame.sort_values("step", ignore_index=True, kind="stable")
        return True

    def _parse(self, data: bytes) -> dict[str, npt.NDArray[Any]]:
        block_bytes = max(_BLOCK_BYTES, _longest_line(data))
        try:
            table = pa.json.read_json(
                io.BytesIO(data),
                read_options=pa.json.ReadOptions(block_size=block_bytes),
            )
        except pa.ArrowInvalid as error:
            raise _bad_line(self._tail, data, str(error)) from None
        columns = {name: _numbers(table[name]) for name in table.column_names}
        for name in ("step", "resume_step"):
            column = columns.get(name, np.full(len(table), np.nan))
            columns[name] = np.where(np.isnan(column), -1, column).astype(np.int64)
        if (neither := (columns["step"] < 0) & (columns["resume_step"] < 0)).any():
            number = self._tail.lines_read + int(neither.argmax()) + 1
            raise RunLogError(f"{self._tail.path}: line {number} has no step")
        return columns


class _Events:
    """A file of events: few, nested, and never dropped."""

    def __init__(self, path: Path) -> None:
        self._tail = _Tail(path)
        self._rows: list[dict[str, Any]] | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        if self._rows is None:
            self.refresh()
        assert self._rows is not None
        return self._rows

    def refresh(self) -> bool:
        data, replaced = self._tail.read()
        if self._rows is None or replaced:
            self._rows = []
        for line in data.splitlines():
            self._tail.lines_read += 1
            try:
                row = json.loads(line)
                self._rows.append({key: row[key] for key in ("time", "step", "kind", "message", "fields")})
            except (ValueError, KeyError, TypeError):
                raise RunLogError(
                    f"{self._tail.path}: line {self._tail.lines_read} is not an event"
                ) from None
        return bool(data) or replaced


class _Records:
    """A file of fixed-size records, each starting with its step."""

    def __init__(self, path: Path, record: np.dtype[Any]) -> None:
        self._path = path
        self._record = record
        self._steps = np.zeros(0, dtype=np.int64)
        self._order = np.zeros(0, dtype=np.int64)
        self.values: npt.NDArray[Any] = np.zeros((0, *record["values"].shape), dtype=record["values"].base)

    def refresh(self) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        count, known = size // self._record.itemsize, len(self._steps)
        if count == known:
            return
        records = np.memmap(self._path, dtype=self._record, mode="r", shape=(count,))
        first = known if count > known else 0  # fewer: the file was replaced
        self._steps = np.concatenate([self._steps[:first], records["step"][first:]])
        self._order = np.argsort(self._steps, kind="stable")
        self.values = records["values"]

    def locate(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Index of the last record of each step, -1 where there is none."""
        if len(self._steps) == 0:
            return np.full(len(steps), -1, dtype=np.int64)
        ordered = self._steps[self._order]
        last = np.searchsorted(ordered, steps, side="right") - 1
        place: npt.NDArray[np.int64] = self._order[last]
        place[(last < 0) | (ordered[last] != steps)] = -1
        return place


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """A JSON column as int64, or as float64 when it has fractions or holes."""
    if pa.types.is_boolean(column.type) or pa.types.is_null(column.type):
        column = pc.cast(column, pa.float64())
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return np.full(len(column), np.nan)  # not a number: nothing this version knows how to show
    return column.to_numpy()


def _longest_line(data: bytes) -> int:
    """Arrow needs every line to fit in a block; ours do unless something else wrote the file."""
    if len(data) <= _BLOCK_BYTES:
        return len(data)
    return max(map(len, data.split(b"\n"))) + 1


def _bad_line(tail: _Tail, data: bytes, reason: str) -> RunLogError:
    for number, line in enumerate(data.splitlines(), start=tail.lines_read + 1):
        try:
            good = isinstance(json.loads(line), dict)
        except ValueError:
            good = False
        if not good:
            return RunLogError(f"{tail.path}: line {number} is damaged (not a JSON object)")
    return RunLogError(f"{tail.path}: cannot be read ({reason.splitlines()[0]})")

"""Reading a catalogue: rows by name from a YAML file, shipped or a person's own."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from moe_fragment.schema import ConfigError, Section, explain, load_yaml

Row = TypeVar("Row", bound=Section)
_HERE = Path(__file__).parent


def read_rows(row: type[Row], section: str, own: str | Path | None) -> dict[str, Row]:
    """Rows by name: those shipped in ``SECTION.yaml``, and those of a person's file, which win.

    Raises:
        ConfigError: a file that cannot be read, or a row that is not as it should be; names file, row and field.
    """
    rows = _shipped(row, section)
    return rows | _read(Path(own), row, section) if own is not None else dict(rows)


@functools.cache
def _shipped(row: type[Row], section: str) -> dict[str, Row]:
    return _read(_HERE / f"{section}.yaml", row, section)


def _read(path: Path, row: type[Row], section: str) -> dict[str, Row]:
    data = load_yaml(path)
    if list(data) != [section]:
        raise ConfigError(f"{path}: expected one field, {section}, got {', '.join(map(str, data))}")
    if not isinstance(data[section], Mapping):
        raise ConfigError(f"{path}: {section}: expected a mapping from names to rows")
    rows = {}
    for name, fields in data[section].items():
        try:
            rows[str(name)] = row.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(explain(error, str(path), f"{section}.{name}")) from None
    return rows

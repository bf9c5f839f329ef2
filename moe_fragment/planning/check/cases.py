"""Reading a case file: JSON with a ``cases`` list of inputs, expected values and a tolerance each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from moe_fragment.planning.check.tolerance import Tolerance, parse_tolerance
from moe_fragment.planning.quantities import NonNegative
from moe_fragment.schema import ConfigError, Section, explain


class Case(Section):
    """One published figure and what it follows from."""

    id: str = Field(min_length=1)
    """Name, unique in the file; cases under a ``ranking`` are compared if they agree up to the last hyphen."""
    kind: str
    """Which formula applies."""
    inputs: dict[str, Any]
    """What the formula takes, in the units that the fields' names say."""
    expected: dict[str, NonNegative] = Field(min_length=1)
    """Published values by name."""
    tolerance: Any
    """How far off is still right; see ``parse_tolerance``."""
    source: str = ""
    """Where the figure is from."""
    note: str = ""
    """For the reader."""

    @property
    def allowed(self) -> Tolerance:
        """The tolerance, read."""
        return parse_tolerance(self.tolerance)


def read_cases(path: str | Path) -> list[Case]:
    """The cases in the file at ``path``, in its order; their ``inputs`` are not looked at yet.

    Raises:
        ConfigError: one sentence that names the file, the case and the field.
    """
    path = Path(path)
    data = _load(path)
    if not isinstance(data, Mapping) or not isinstance(data.get("cases"), list):
        raise ConfigError(f"{path}: cases: expected a mapping with a list of cases")
    if not data["cases"]:
        raise ConfigError(f"{path}: cases: expected at least one case")
    cases: dict[str, Case] = {}
    for index, entry in enumerate(data["cases"]):
        name = entry.get("id") if isinstance(entry, Mapping) else None
        where = f"{path}: case {name!r}" if isinstance(name, str) else f"{path}: cases[{index}]"
        try:
            case = Case.model_validate(entry)
        except ValidationError as error:
            raise ConfigError(explain(error, where)) from None
        try:
            parse_tolerance(case.tolerance)
        except ValueError as error:
            raise ConfigError(f"{where}: tolerance: {error}") from None
        if case.id in cases:
            raise ConfigError(f"{where}: id: expected a name of its own, but an earlier case has it")
        cases[case.id] = case
    return list(cases.values())


def _load(path: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f"{path}: '{key}' is given twice in one mapping")
            found[key] = value
        return found

    try:
        return json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, but byte {error.start} is not") from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}: line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}"
        ) from None
    except RecursionError:
        raise ConfigError(f"{path}: not valid JSON: nested too deeply") from None
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{path}: not valid JSON: {error}") from None

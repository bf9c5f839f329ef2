"""What every file a person writes has in common: strict reading, and one clear sentence when it is wrong.

``load_yaml`` reads a file, ``Section`` is the base of every typed part of it, ``explain`` turns pydantic's
report into a sentence that names the file, the field and what was expected, and the annotated types
(``Rate``, ``Duration``, ...) read quantities with their units. Not here: what the files mean.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator

from moe_fragment.units import parse_distance, parse_duration, parse_fraction, parse_rate, parse_size


class ConfigError(ValueError):
    """A file or section that cannot be used; the message is one sentence for the person who wrote it."""


class FieldError(ValueError):
    """Raised in a validator of a whole section to lay the blame on one field of it, such as ``rails``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


Rate = Annotated[float, BeforeValidator(parse_rate)]
"""Bytes per second, one direction, written ``5 Gbit/s``."""
Duration = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds, written ``30 ms``."""
Size = Annotated[int, BeforeValidator(parse_size)]
"""Bytes, written ``512 MiB``."""
Distance = Annotated[float, BeforeValidator(parse_distance)]
"""Kilometres, written ``80 km``."""
Fraction = Annotated[float, BeforeValidator(parse_fraction)]
"""Zero to one, written ``0.1 %``."""
Count = Annotated[int, Strict(), Field(ge=1)]
"""A whole number of at least one; ``2.0``, ``"2"`` and ``true`` are not."""


class Section(BaseModel):
    """A frozen, keyword-only part of a file in which an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for key in data:
                if key not in known and key not in cls.model_fields:
                    raise FieldError(str(key), f"unknown field{_suggestion(key, known)}")
        return data


def load_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in the YAML file at ``path``.

    Stricter than PyYAML, and YAML 1.2 where the two differ: a key given twice is refused, only ``true`` and
    ``false`` are truth values (``no`` is a word), ``1e-3`` is a number, ``12:30`` and dates are text.

    Raises:
        ConfigError: missing, unreadable or empty file, bad syntax, anything but a mapping at the top.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, but byte {error.start} is not") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = "" if isinstance(error, _DuplicateKey) else "not valid YAML: "
        raise ConfigError(f"{path}: {place}{what}{error.problem}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if data is None:
        raise ConfigError(f"{path}: the file is empty, expected a mapping of fields")
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of fields, got {_shown(data)}")
    return data


def explain(error: ValidationError, where: str, within: str = "") -> str:
    """One sentence for the first thing wrong: ``topology.yaml: links[0].bandwidth: expected ..., got 5``.

    Args:
        error: what pydantic raised.
        where: the file, or another name for the source.
        within: dotted path of the section inside the file, if ``error`` is about a part of it.
    """
    problems = error.errors(include_url=False)
    # A list with a bad entry is also reported as too short, because the bad one does not count.
    bad = {problem["loc"][:length] for problem in problems for length in range(len(problem["loc"]))}
    problems = [
        problem for problem in problems if problem["type"] != "too_short" or problem["loc"] not in bad
    ]
    # An unknown field is most often the misspelt name of one that is then reported as missing.
    problems.sort(key=lambda problem: problem["type"] == "missing")
    first = problems[0]
    path, message = _path(first["loc"], within), _message(first)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        path = f"{path}.{cause.field}" if path else cause.field
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ": ".join(part for part in (where, path, message) if part) + more


def _path(loc: tuple[int | str, ...], within: str) -> str:
    path = within
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not re.search(r"[\[(]", part):  # a validator it passed through, such as "function-before[..]"
            path += f".{part}" if path else part
    return path


def _message(problem: Any) -> str:
    context, got = problem.get("ctx", {}), f", got {_shown(problem['input'])}"
    match problem["type"]:
        case "value_error":
            cause = context["error"]
            return cause.message if isinstance(cause, FieldError) else str(cause)
        case "assertion_error":
            return str(context["error"])
        case "missing":
            return "required, but not given"
        case "extra_forbidden":
            return "unknown field"
        case "greater_than_equal":
            return f"expected at least {context['ge']}{got}"
        case "greater_than":
            return f"expected more than {context['gt']}{got}"
        case "less_than_equal":
            return f"expected at most {context['le']}{got}"
        case "less_than":
            return f"expected less than {context['lt']}{got}"
        case "literal_error" | "enum":
            return f"expected {context['expected']}{got}"
        case "too_short":
            return f"expected at least {_entries(context['min_length'])}, got {context['actual_length']}"
        case "too_long":
            return f"expected at most {_entries(context['max_length'])}, got {context['actual_length']}"
        case "string_too_short":
            return f"expected text that is not empty{got}"
        case "string_pattern_mismatch":
            return f"expected text like {context['pattern']}{got}"
        case "int_type" | "int_parsing" | "int_from_float":
            return f"expected a whole number{got}"
        case "float_type" | "float_parsing":
            return f"expected a number{got}"
        case "bool_type" | "bool_parsing":
            return f"expected true or false{got}"
        case "string_type":
            return f"expected text{got}"
        case "tuple_type" | "list_type" | "set_type":
            return f"expected a list{got}"
        case "model_type" | "model_attributes_type" | "dict_type" | "mapping_type":
            return f"expected a mapping of fields{got}"
        case _:
            message = problem["msg"]
            return f"{message[:1].lower()}{message[1:]}{got}"


def _entries(number: int) -> str:
    return f"{number} entry" if number == 1 else f"{number} entries"


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _suggestion(name: object, known: set[str]) -> str:
    close = difflib.get_close_matches(str(name), known, n=1)
    return f", did you mean '{close[0]}'?" if close else f", expected one of {', '.join(sorted(known))}"


class _DuplicateKey(yaml.constructor.ConstructorError):
    pass


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads plain words as YAML 1.2 does."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own way)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise _DuplicateKey(None, None, f"'{key.value}' is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"true|false", "tf"),
    ("null", r"~|null|", ["~", "n", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
    ("merge", r"<<", "<"),
):
    _StrictLoader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first)
    )


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.lower()
    return int(text, 0) if "x" in text or "o" in text else int(text)  # PyYAML would read 010 as octal


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)

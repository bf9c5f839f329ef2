"""Codecs as recipes write them: `int8`, `{int8: {block: 256}}`, `[{topk: {k: 64}}, sigma]`, or `none`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from moe_fragment.codecs import stages
from moe_fragment.codecs.codec import Codec
from moe_fragment.codecs.stage import STAGES, Sparsifier, Stage, ValueFormat, discover
from moe_fragment.schema import FieldError, explain

_LOSSLESS = "fp32"
_ALIASES = {"none": _LOSSLESS}


def parse_codec(spec: object) -> Codec:
    """The codec that a recipe asks for.

    Args:
        spec: a stage's name; a mapping of one name to its options; a list of those, a sparsifier before a value
            format; None or `none` for plain fp32. A sparsifier alone sends fp32 values.

    Raises:
        FieldError: one sentence that names the stage and what was expected.
        ValueError: `spec` is none of the above.
    """
    discover(stages)
    entries = spec if isinstance(spec, (list, tuple)) else ["none" if spec is None else spec]
    if not entries:
        raise ValueError("expected at least one codec stage, got an empty list")
    values: ValueFormat | None = None
    sparsifier: Sparsifier | None = None
    named = ""
    for name, stage in (_parse_stage(entry) for entry in entries):
        if values is not None:
            raise FieldError(name, f"nothing comes after a value format, and '{named}' is one")
        if isinstance(stage, ValueFormat):
            values = stage
        elif sparsifier is not None:
            raise FieldError(name, f"expected one sparsifier at most, and '{named}' is one")
        else:
            sparsifier = stage
        named = name
    return Codec(values or _build(_LOSSLESS, {}), sparsifier)  # type: ignore[arg-type]


def _parse_stage(entry: object) -> tuple[str, Stage]:
    name, options = entry, None
    if isinstance(entry, Mapping):
        if len(entry) != 1:
            raise ValueError(
                f"expected one codec stage per mapping, got {len(entry)}: {', '.join(map(str, entry))}"
            )
        ((name, options),) = entry.items()
    if not isinstance(name, str):
        raise ValueError(
            f"expected a codec stage such as int8, a mapping of one to its options, or a list, got {name!r}"
        )
    known = _ALIASES.get(name, name)
    if known not in STAGES:
        close = difflib.get_close_matches(name, [*STAGES, *_ALIASES], n=1)
        hint = f"did you mean '{close[0]}'?" if close else f"expected one of {', '.join(sorted(STAGES))}"
        raise FieldError(name, f"unknown codec stage, {hint}")
    if options is not None and not isinstance(options, Mapping):
        raise FieldError(name, f"expected a mapping of options, got {options!r}")
    return name, _build(known, options or {})


def _build(name: str, options: Mapping[Any, Any]) -> Stage:
    try:
        return STAGES[name].model_validate(options)
    except ValidationError as error:
        field, _, message = explain(error, "", within=name).partition(": ")
        raise FieldError(field, message) from None

"""Public mixture-of-experts models by name: their shape, and what their publishers say they hold."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from moe_fragment.planning.catalogue.rows import read_rows
from moe_fragment.planning.quantities import Positive
from moe_fragment.planning.shape import ModelShape
from moe_fragment.schema import Section


class Published(Section):
    """Counts in billions of parameters, as published; kept for checking, never used to predict."""

    total: Positive
    """All parameters."""
    active: Positive
    """Active per token, in whichever convention the publisher used."""


class PublicModel(Section):
    """A model anyone can name instead of writing its shape."""

    shape: ModelShape
    """What parameters and FLOPs are computed from."""
    published: Published | None = None
    """What its publisher says."""
    source: str = Field(min_length=1)
    """Where shape and counts are from."""
    as_of: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")
    """When they were collected."""


def models(own: str | Path | None = None) -> dict[str, PublicModel]:
    """The catalogue by name, with the rows of a person's own file added (they win).

    Args:
        own: YAML file with one field, ``models``.

    Raises:
        ConfigError: a file or row that cannot be used; names file, row and field.
    """
    return read_rows(PublicModel, "models", own)

"""A fleet: clusters, the links between them, rails, and where its coordinator runs.

Written as YAML with units (``written.py`` has the form), held here in bytes and seconds. Unequal clusters are
ordinary. Not here: which expert lives where (placement), and how anything is started (train).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from moe_fragment.schema import ConfigError, Count, FieldError, Section, explain, load_yaml
from moe_fragment.topology import written
from moe_fragment.topology.cluster import Cluster
from moe_fragment.topology.link import Link, check_pairs

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\s:/]+):(?P<port>\d{1,5})")


class TopologyError(ConfigError):
    """A topology that cannot be used; the message names the file, the field and what was expected."""


class Topology(Section):
    """What the fleet is. Built from a file by ``load``, or from ``Cluster`` and ``Link`` objects."""

    clusters: tuple[Cluster, ...] = Field(min_length=1)
    """In the order that numbers them everywhere."""
    links: tuple[Link, ...] = ()
    """One per ordered pair of clusters; kept sorted by source and target."""
    rails: Count | None = None
    """Lanes between the clusters, each with a gateway rank in every cluster; None for as many as fit."""
    coordinator: str | None = None
    """``host:port`` of a coordinator that already runs; None starts one with the fleet."""

    @model_validator(mode="after")
    def _check(self) -> Topology:
        names = self.names
        for index, name in enumerate(names):
            if name in names[:index]:
                raise FieldError(f"clusters[{index}].name", f"'{name}' is used twice")
        check_pairs(names, ((f"links[{i}]", link.source, link.target) for i, link in enumerate(self.links)))
        by_pair = sorted(self.links, key=lambda link: (names.index(link.source), names.index(link.target)))
        object.__setattr__(self, "links", tuple(by_pair))
        smallest = min(self.clusters, key=lambda cluster: cluster.size)
        if self.rails is not None and self.rails > smallest.size:
            raise FieldError(
                "rails",
                f"expected at most {smallest.size}, the size of the smallest cluster '{smallest.name}' "
                f"(each rail needs a rank of its own in every cluster), got {self.rails}",
            )
        if self.coordinator is not None:
            match = _ADDRESS.fullmatch(self.coordinator)
            if match is None or not 0 < int(match["port"]) < 65536:
                raise FieldError("coordinator", f"expected 'host:port', got {self.coordinator!r}")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Topology:
        """Read a YAML file; a ``hostfile`` in it is looked up beside it.

        Raises:
            TopologyError: one sentence that names the file, the field and what was expected.
        """
        try:
            data = load_yaml(path)
        except ConfigError as error:
            raise TopologyError(str(error)) from None
        return cls.from_dict(data, where=str(path), base=Path(path).parent)

    @classmethod
    def from_dict(
        cls,
        data: Mapping[str, Any],
        where: str = "topology.yaml",
        *,
        within: str = "",
        base: Path | None = None,
    ) -> Topology:
        """What the YAML form says, already parsed.

        Args:
            data: the mapping, quantities as text with their units.
            where: the file that errors name.
            within: dotted path of the topology inside that file, for errors; empty if it is the whole file.
            base: folder that a relative ``hostfile`` is looked up in; default the current one.

        Raises:
            TopologyError: one sentence that names ``where``, the field and what was expected.
        """
        try:
            return cls(**written.read(data, base or Path()))
        except ValidationError as error:
            raise TopologyError(explain(error, where, within)) from None
        except FieldError as error:
            field = f"{within}.{error.field}" if within else error.field
            raise TopologyError(f"{where}: {field}: {error.message}") from None

    def to_dict(self) -> dict[str, Any]:
        """The YAML form, self-contained (no hostfile); ``from_dict`` gives back an equal topology."""
        return written.write(self.clusters, self.links, self.rails, self.coordinator)

    @property
    def names(self) -> tuple[str, ...]:
        """Cluster names, in order."""
        return tuple(cluster.name for cluster in self.clusters)

    def index(self, name: str) -> int:
        """Position of the cluster called ``name``."""
        if name not in self.names:
            raise TopologyError(f"unknown cluster '{name}', expected one of {', '.join(self.names)}")
        return self.names.index(name)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks per cluster."""
        return tuple(cluster.size for cluster in self.clusters)

    @property
    def world_size(self) -> int:
        """Ranks in the fleet."""
        return sum(self.sizes)

    @property
    def num_rails(self) -> int:
        """Lanes between the clusters: ``rails`` where given, otherwise the size of the smallest cluster."""
        return self.rails or min(self.sizes)

    @property
    def is_local(self) -> bool:
        """Whether the whole fleet runs on the machine that launches it."""
        return all(cluster.is_local for cluster in self.clusters)

    def link(self, source: str, target: str) -> Link:
        """The link from ``source`` to ``target``, by name; this direction only."""
        source_index, target_index = self.index(source), self.index(target)
        if source_index == target_index:
            raise TopologyError(f"there is no link from '{source}' to itself")
        # Sorted by source and target with the diagonal left out.
        return self.links[source_index * (len(self.names) - 1) + target_index - (target_index > source_index)]

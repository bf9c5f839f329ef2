"""The versioned descriptor of which cluster(s) hold which expert, per MoE layer.

It is the replica set of every expert: one holder is a pinned expert, several a replicated one. The order of
a cluster's experts in a layer is the order in which it stores them, so a checkpoint without its placement
cannot be read. Pure data; ``policies.py`` makes one, the fabric and the expert path follow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

VERSION = 1


class PlacementError(ValueError):
    """A placement that cannot be used; the message names what is wrong and where."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which cluster holds which expert. Validated when it is built; equal if all fields are."""

    clusters: tuple[str, ...]
    """Names, in the topology's order; everything below counts clusters in this order."""
    num_experts: int
    """Experts in every MoE layer of the whole model, E; their global ids are 0 to E - 1."""
    layers: Mapping[int, tuple[tuple[int, ...], ...]]
    """Per MoE layer index and cluster: global ids in the order in which the cluster packs them."""
    version: int = VERSION
    """Of this format."""

    def __post_init__(self) -> None:
        if self.version != VERSION or isinstance(self.version, bool):
            raise PlacementError(
                f"version: expected {VERSION}, the only one this moe_fragment reads, got {self.version!r}"
            )
        check_clusters(self.clusters)
        object.__setattr__(self, "clusters", tuple(self.clusters))
        check_num_experts(self.num_experts)
        if not isinstance(self.layers, Mapping) or not self.layers:
            raise PlacementError("layers: expected at least one layer, each with expert ids per cluster")
        checked = {}
        for layer, held in self.layers.items():
            if not _is_count(layer):
                raise PlacementError(f"layers: expected layer indices from 0, got {layer!r}")
            checked[layer] = check_layer(held, self.clusters, self.num_experts, f"layers[{layer}]")
        object.__setattr__(self, "layers", dict(sorted(checked.items())))

    def __hash__(self) -> int:
        return hash((self.clusters, self.num_experts, tuple(self.layers.items()), self.version))

    def experts_of(self, layer: int, cluster_index: int) -> tuple[int, ...]:
        """Global ids that the cluster holds in ``layer``, in packed order; empty if it holds none."""
        held = self._layer(layer)
        if not 0 <= cluster_index < len(held):
            raise PlacementError(
                f"expected a cluster index from 0 to {len(self.clusters) - 1}, got {cluster_index}"
            )
        return held[cluster_index]

    def holders(self, layer: int, expert: int) -> tuple[int, ...]:
        """Indices of the clusters that hold a copy of ``expert`` in ``layer``; at least one."""
        if not 0 <= expert < self.num_experts:
            raise PlacementError(f"expected an expert id from 0 to {self.num_experts - 1}, got {expert}")
        return tuple(cluster for cluster, experts in enumerate(self._layer(layer)) if expert in experts)

    @property
    def is_pinned(self) -> bool:
        """Whether every expert of every layer has exactly one holder."""
        # Every expert has at least one holder, so one copy each is as many copies as experts.
        return all(sum(map(len, held)) == self.num_experts for held in self.layers.values())

    def counts(self) -> dict[int, tuple[int, ...]]:
        """Experts held per layer and cluster, replicas included."""
        return {layer: tuple(map(len, held)) for layer, held in self.layers.items()}

    def to_dict(self) -> dict[str, Any]:
        """Lists, numbers and text keys, as JSON wants them; ``from_dict`` gives back an equal placement."""
        return {
            "version": self.version,
            "clusters": list(self.clusters),
            "num_experts": self.num_experts,
            "layers": {
                str(layer): [list(experts) for experts in held] for layer, held in self.layers.items()
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Placement:
        """Read what ``to_dict`` wrote.

        Raises:
            PlacementError: one sentence that names the field and what was expected.
        """
        if not isinstance(data, Mapping):
            raise PlacementError(f"expected a mapping with clusters, num_experts and layers, got {data!r}")
        fields = ("version", "clusters", "num_experts", "layers")
        for field in fields:
            if field not in data:
                raise PlacementError(f"{field}: required, but not given")
        if data["version"] == VERSION:  # a later version may well have other fields; say that it is later
            for field in data:
                if field not in fields:
                    raise PlacementError(f"{field}: unknown field, expected one of {', '.join(fields)}")
        layers = data["layers"]
        if isinstance(layers, Mapping):
            layers = {_layer_index(key): held for key, held in layers.items()}
        return cls(
            version=data["version"], clusters=data["clusters"], num_experts=data["num_experts"], layers=layers
        )

    def _layer(self, layer: int) -> tuple[tuple[int, ...], ...]:
        if layer not in self.layers:
            raise PlacementError(
                f"layer {layer} is not in the placement, which has {', '.join(map(str, self.layers))}"
            )
        return self.layers[layer]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _layer_index(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key


def check_clusters(names: object) -> None:
    """Names, at least one, none twice."""
    if not isinstance(names, (list, tuple)):
        raise PlacementError(f"clusters: expected a list of names, got {names!r}")
    if not names:
        raise PlacementError("clusters: expected at least one name, got none")
    for index, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise PlacementError(f"clusters[{index}]: expected a name, got {name!r}")
        if name in names[:index]:
            raise PlacementError(f"clusters[{index}]: '{name}' is used twice")


def check_num_experts(number: object) -> None:
    """A whole number of at least one."""
    if not _is_count(number) or number == 0:
        raise PlacementError(f"num_experts: expected a whole number of at least 1, got {number!r}")


def check_layer(
    held: Any, clusters: Sequence[str], num_experts: int, where: str
) -> tuple[tuple[int, ...], ...]:
    """``held`` as tuples, if it gives every expert a place and no cluster an expert twice.

    Args:
        held: expert ids per cluster.
        where: the field that errors name.
    """
    if not isinstance(held, (list, tuple)) or len(held) != len(clusters):
        raise PlacementError(
            f"{where}: expected a list of expert ids for each of the {len(clusters)} clusters "
            f"{', '.join(clusters)}"
        )
    missing = set(range(num_experts))
    for name, experts in zip(clusters, held, strict=True):
        if not isinstance(experts, (list, tuple)):
            raise PlacementError(f"{where}.{name}: expected a list of expert ids, got {experts!r}")
        seen: set[int] = set()
        for expert in experts:
            if not _is_count(expert) or expert >= num_experts:
                raise PlacementError(
                    f"{where}.{name}: expected ids from 0 to {num_experts - 1}, got {expert!r}"
                )
            if expert in seen:
                raise PlacementError(f"{where}.{name}: expert {expert} is listed twice")
            seen.add(expert)
        missing -= seen
    if missing:
        raise PlacementError(f"{where}: no cluster holds {_some_experts(missing)}")
    return tuple(tuple(experts) for experts in held)


def _some_experts(experts: set[int]) -> str:
    ids = sorted(experts)
    if len(ids) == 1:
        return f"expert {ids[0]}"
    return f"experts {', '.join(map(str, ids[:8]))}" + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")

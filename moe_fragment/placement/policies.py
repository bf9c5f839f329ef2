"""Ways to decide which cluster holds which expert: evenly, by capacity, all of them everywhere, or by hand.

``even`` and ``capacity`` give contiguous ids, the same in every layer, and at least one expert to every
cluster. Only ``manual`` can leave a cluster without experts, scatter ids, differ between layers, or
replicate some. Search for a good placement is not here but in planning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, get_args

from moe_fragment.placement.placement import (
    Placement,
    PlacementError,
    check_clusters,
    check_layer,
    check_num_experts,
)
from moe_fragment.topology import Topology

Policy = Literal["even", "capacity", "replicated", "manual"]


def place_experts(
    clusters: Topology | Sequence[str],
    *,
    num_experts: int,
    layers: int | Iterable[int],
    policy: Policy = "even",
    capacities: Mapping[str, float] | Sequence[float] | None = None,
    table: Mapping[Any, Any] | None = None,
) -> Placement:
    """Decide which cluster holds which expert.

    Args:
        clusters: the fleet, or its cluster names in order.
        num_experts: experts per MoE layer of the whole model, E.
        layers: indices of the MoE layers; a number n stands for layers 0 to n - 1.
        policy: ``even`` (sizes differ by one at most, the first clusters get more), ``capacity`` (in
            proportion to ``capacities``, largest remainder first, never none), ``replicated`` (all experts on
            every cluster) or ``manual`` (by ``table``).
        capacities: for ``capacity``: one positive number per cluster, in order or by name; default the ranks
            of each cluster of a Topology.
        table: for ``manual``: ``{cluster: ids}`` for all layers or ``{layer: {cluster: ids}}``. Ids are
            numbers and ranges such as ``"0-3"``, alone or in a list, in the order in which the cluster packs
            them. A cluster that is left out holds none.

    Raises:
        PlacementError: one sentence that names the setting to change.
    """
    names = clusters.names if isinstance(clusters, Topology) else tuple(clusters)
    indices = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
    check_clusters(names)
    check_num_experts(num_experts)
    if policy not in get_args(Policy):
        raise PlacementError(f"policy: expected one of {', '.join(get_args(Policy))}, got {policy!r}")
    if capacities is not None and policy != "capacity":
        raise PlacementError(
            f"capacities: expected only with policy 'capacity', but the policy is '{policy}'"
        )
    if table is not None and policy != "manual":
        raise PlacementError(f"table: expected only with policy 'manual', but the policy is '{policy}'")

    if policy == "replicated":
        everything = tuple(range(num_experts))
        held: dict[int, Any] = dict.fromkeys(indices, (everything,) * len(names))
    elif policy == "manual":
        held = _read_table(table, names, num_experts, indices)
    else:
        if num_experts < len(names):
            raise PlacementError(
                f"num_experts: {num_experts} experts cannot be spread over {len(names)} clusters by policy "
                f"'{policy}', which gives each at least one: use num_experts of {len(names)} or more, fewer "
                f"clusters, or policy 'manual'"
            )
        sizes = clusters.sizes if isinstance(clusters, Topology) else None
        weights = (
            [Fraction(1)] * len(names) if policy == "even" else _read_capacities(capacities, sizes, names)
        )
        counts = apportion(num_experts, weights)
        starts = [sum(counts[:index]) for index in range(len(counts))]
        contiguous = tuple(
            tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)
        )
        held = dict.fromkeys(indices, contiguous)
    return Placement(clusters=names, num_experts=num_experts, layers=held)


def apportion(total: int, weights: Sequence[Fraction]) -> list[int]:
    """Split ``total`` in proportion to ``weights``: largest remainder, ties to the first, none gets nothing.

    ``total`` must be at least the number of weights; a share that would be empty takes one from the largest.
    """
    quotas = [total * weight / sum(weights) for weight in weights]
    shares = [math.floor(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda index: shares[index] - quotas[index])
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    while total >= len(shares) and 0 in shares:
        shares[shares.index(0)] = 1
        shares[shares.index(max(shares))] -= 1
    return shares


def _read_capacities(
    capacities: Mapping[str, float] | Sequence[float] | None,
    sizes: Sequence[int] | None,
    names: Sequence[str],
) -> list[Fraction]:
    if capacities is None:
        if sizes is None:
            raise PlacementError("capacities: required where only cluster names are given, not a topology")
        capacities = sizes
    if isinstance(capacities, Mapping):
        for name in (*capacities, *names):
            if name not in names:
                raise PlacementError(
                    f"capacities: unknown cluster '{name}', expected one of {', '.join(names)}"
                )
            if name not in capacities:
                raise PlacementError(f"capacities.{name}: required, but not given")
        capacities = [capacities[name] for name in names]
    if len(capacities) != len(names):
        raise PlacementError(
            f"capacities: expected one for each of {len(names)} clusters, got {len(capacities)}"
        )
    for name, capacity in zip(names, capacities, strict=True):
        number = isinstance(capacity, (int, float)) and not isinstance(capacity, bool)
        if not number or not 0 < capacity < math.inf:
            raise PlacementError(f"capacities.{name}: expected a number above zero, got {capacity!r}")
    return [Fraction(capacity) for capacity in capacities]


def _read_table(
    table: Mapping[Any, Any] | None, names: Sequence[str], num_experts: int, layers: Sequence[int]
) -> dict[int, tuple[tuple[int, ...], ...]]:
    if table is None:
        raise PlacementError("table: required with policy 'manual', but not given")
    if not isinstance(table, Mapping) or not table:
        raise PlacementError("table: expected expert ids by cluster, or by layer and then cluster")
    if not any(isinstance(entry, Mapping) for entry in table.values()):
        return dict.fromkeys(layers, _read_row(table, names, num_experts, "table"))
    rows = {}
    for key, row in table.items():
        layer = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        if layer not in layers:
            known = ", ".join(map(str, layers))
            raise PlacementError(f"table: {key!r} is not one of the model's MoE layers, which are {known}")
        if layer in rows:
            raise PlacementError(f"table: layer {layer} is given twice")
        rows[layer] = _read_row(row, names, num_experts, f"table[{layer}]")
    for layer in layers:
        if layer not in rows:
            raise PlacementError(f"table[{layer}]: required, but not given (every MoE layer needs its row)")
    return rows


def _read_row(row: Any, names: Sequence[str], num_experts: int, where: str) -> tuple[tuple[int, ...], ...]:
    if not isinstance(row, Mapping):
        raise PlacementError(f"{where}: expected expert ids by cluster, got {row!r}")
    for name in row:
        if name not in names:
            raise PlacementError(f"{where}: unknown cluster {name!r}, expected one of {', '.join(names)}")
    held = [_read_ids(row.get(name, ()), f"{where}.{name}") for name in names]
    return check_layer(held, names, num_experts, where)


def _read_ids(ids: Any, where: str) -> list[int]:
    if isinstance(ids, int) and not isinstance(ids, bool):
        return [ids]
    if isinstance(ids, str):
        found: list[int] = []
        for part in ids.split(","):
            match = re.fullmatch(r"\s*(\d{1,6})(?:\s*-\s*(\d{1,6}))?\s*", part)
            if match is None or int(match[2] or match[1]) < int(match[1]):
                raise PlacementError(f"{where}: expected expert ids such as 5 or '0-3', got {part.strip()!r}")
            found += range(int(match[1]), int(match[2] or match[1]) + 1)
        return found
    if isinstance(ids, (list, tuple)):
        return [expert for entry in ids for expert in _read_ids(entry, where)]
    raise PlacementError(f"{where}: expected expert ids such as 5 or '0-3', got {ids!r}")

"""Includes FAMBench 103: a number of experts that does not divide evenly."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.placement import Placement, PlacementError, place_experts
from moe_fragment.placement.policies import apportion
from moe_fragment.topology import Topology

NAMES = ("alpha", "beta", "gamma")


def test_even_gives_the_remainder_to_the_first() -> None:
    placement = place_experts(NAMES, num_experts=8, layers=2)
    assert placement.clusters == NAMES
    assert placement.layers == {0: ((0, 1, 2), (3, 4, 5), (6, 7)), 1: ((0, 1, 2), (3, 4, 5), (6, 7))}


def test_only_the_named_layers_have_experts() -> None:
    assert list(place_experts(NAMES, num_experts=3, layers=[5, 1]).layers) == [1, 5]


@pytest.mark.parametrize(
    ("capacities", "counts"),
    [
        ((1, 1, 1), (3, 3, 2)),
        ((4, 2, 2), (4, 2, 2)),
        ((0.5, 0.25, 0.25), (4, 2, 2)),
        ({"gamma": 2, "alpha": 4, "beta": 2}, (4, 2, 2)),
        ((5, 2, 2), (4, 2, 2)),
        ((1000, 1, 1), (6, 1, 1)),
        ((1, 1, 1000), (1, 1, 6)),
    ],
)
def test_capacity_shares_in_proportion(capacities: Any, counts: tuple[int, ...]) -> None:
    placement = place_experts(NAMES, num_experts=8, layers=1, policy="capacity", capacities=capacities)
    assert placement.counts() == {0: counts}


def test_capacity_of_a_topology_is_its_ranks() -> None:
    link = {"bandwidth": "1 Gbit/s", "rtt": "1 ms"}
    fleet = Topology.from_dict(
        {
            "clusters": [{"name": "alpha", "processes": 3}, {"name": "beta", "processes": 1}],
            "links": [{"between": ["alpha", "beta"], **link}],
        }
    )
    assert place_experts(fleet, num_experts=8, layers=1, policy="capacity").counts() == {0: (6, 2)}
    assert place_experts(fleet, num_experts=8, layers=1).counts() == {0: (4, 4)}


@pytest.mark.parametrize(
    ("table", "layers"),
    [
        (
            {"alpha": ["0-2", 5], "beta": "4, 3"},
            {0: ((0, 1, 2, 5), (4, 3), ()), 1: ((0, 1, 2, 5), (4, 3), ())},
        ),
        (
            {0: {"alpha": "0-5"}, "1": {"beta": [0, 1], "gamma": "2-5", "alpha": 0}},
            {0: ((0, 1, 2, 3, 4, 5), (), ()), 1: ((0,), (0, 1), (2, 3, 4, 5))},
        ),
    ],
)
def test_manual(table: Any, layers: Any) -> None:
    placement = place_experts(NAMES, num_experts=6, layers=2, policy="manual", table=table)
    assert placement.layers == layers


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"num_experts": 2},
            "num_experts: 2 experts cannot be spread over 3 clusters by policy 'even', which gives each at "
            "least one: use num_experts of 3 or more, fewer clusters, or policy 'manual'",
        ),
        (
            {"num_experts": 2, "policy": "capacity", "capacities": (1, 1, 1)},
            "num_experts: 2 experts cannot be spread over 3 clusters by policy 'capacity'",
        ),
        ({"clusters": ()}, "clusters: expected at least one name, got none"),
        ({"clusters": ("alpha", "alpha")}, "clusters[1]: 'alpha' is used twice"),
        ({"num_experts": 0}, "num_experts: expected a whole number of at least 1, got 0"),
        ({"num_experts": -4}, "num_experts: expected a whole number of at least 1, got -4"),
        ({"layers": 0}, "layers: expected at least one layer"),
        ({"layers": []}, "layers: expected at least one layer"),
        ({"layers": [-1]}, "layers: expected layer indices from 0, got -1"),
        ({"policy": "best"}, "policy: expected one of even, capacity, replicated, manual, got 'best'"),
        (
            {"capacities": (1, 1, 1)},
            "capacities: expected only with policy 'capacity', but the policy is 'even'",
        ),
        ({"table": {"alpha": "0-7"}}, "table: expected only with policy 'manual', but the policy is 'even'"),
        ({"policy": "capacity"}, "capacities: required where only cluster names are given, not a topology"),
        (
            {"policy": "capacity", "capacities": (1, 2)},
            "capacities: expected one for each of 3 clusters, got 2",
        ),
        (
            {"policy": "capacity", "capacities": (1, 2, 0)},
            "capacities.gamma: expected a number above zero, got 0",
        ),
        (
            {"policy": "capacity", "capacities": (1, 2, float("nan"))},
            "capacities.gamma: expected a number above zero, got nan",
        ),
        (
            {"policy": "capacity", "capacities": {"alpha": 1, "beta": 1}},
            "capacities.gamma: required, but not given",
        ),
        (
            {"policy": "capacity", "capacities": {"alpha": 1, "delta": 1}},
            "capacities: unknown cluster 'delta', expected one of alpha, beta, gamma",
        ),
        ({"policy": "manual"}, "table: required with policy 'manual', but not given"),
        (
            {"policy": "manual", "table": {}},
            "table: expected expert ids by cluster, or by layer and then cluster",
        ),
        (
            {"policy": "manual", "table": {"delta": "0-7"}},
            "table: unknown cluster 'delta', expected one of alpha, beta, gamma",
        ),
        (
            {"policy": "manual", "table": {"alpha": "7-0"}},
            "table.alpha: expected expert ids such as 5 or '0-3', got '7-0'",
        ),
        (
            {"policy": "manual", "table": {"alpha": ["0-3", 4.5]}},
            "table.alpha: expected expert ids such as 5 or '0-3', got 4.5",
        ),
        (
            {"policy": "manual", "table": {"alpha": "0-7, 3"}},
            "table.alpha: expert 3 is listed twice",
        ),
        ({"policy": "manual", "table": {"alpha": "0-8"}}, "table.alpha: expected ids from 0 to 7, got 8"),
        ({"policy": "manual", "table": {"alpha": "0-6"}}, "table: no cluster holds expert 7"),
        ({"policy": "manual", "table": {0: {"alpha": "0-7"}}}, "table[1]: required, but not given"),
        (
            {"policy": "manual", "table": {0: {"alpha": "0-7"}, 1: {"alpha": "0-6"}}},
            "table[1]: no cluster holds expert 7",
        ),
        (
            {"policy": "manual", "table": {0: {"alpha": "0-7"}, 7: {"alpha": "0-7"}}},
            "table: 7 is not one of the model's MoE layers, which are 0, 1",
        ),
        (
            {"policy": "manual", "table": {0: {"alpha": "0-7"}, "0": {"alpha": "0-7"}}},
            "table: layer 0 is given twice",
        ),
        (
            {"policy": "manual", "table": {0: {"alpha": "0-7"}, 1: "0-7"}},
            "table[1]: expected expert ids by cluster, got '0-7'",
        ),
    ],
)
def test_a_refusal_names_the_setting(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlacementError) as caught:
        place_experts(**({"clusters": NAMES, "num_experts": 8, "layers": 2} | options))
    assert str(caught.value).startswith(sentence)


_CAPACITIES = st.lists(st.floats(min_value=1e-3, max_value=1e6), min_size=1, max_size=6)


@st.composite
def _placements(draw: st.DrawFn) -> tuple[Placement, str]:
    capacities = draw(_CAPACITIES)
    names = [f"c{index}" for index in range(len(capacities))]
    num_experts = draw(st.integers(len(names), 300))
    layers = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
    policy = draw(st.sampled_from(["even", "capacity"]))
    options: dict[str, Any] = {"capacities": capacities} if policy == "capacity" else {}
    return place_experts(names, num_experts=num_experts, layers=layers, policy=policy, **options), policy


@given(_placements())
def test_every_expert_has_exactly_one_place(drawn: tuple[Placement, str]) -> None:
    placement, policy = drawn
    assert placement.is_pinned
    for layer in placement.layers:
        held = [
            expert
            for index in range(len(placement.clusters))
            for expert in placement.experts_of(layer, index)
        ]
        assert held == list(range(placement.num_experts))  # contiguous, in cluster order
        assert all(len(placement.holders(layer, expert)) == 1 for expert in held)
        counts = placement.counts()[layer]
        assert min(counts) >= 1
        if policy == "even":
            assert max(counts) - min(counts) <= 1
    assert Placement.from_dict(json.loads(json.dumps(placement.to_dict()))) == placement


@given(
    st.dictionaries(st.integers(0, 30), st.sets(st.integers(0, 3), min_size=1), min_size=1).map(
        lambda holders: list(holders.values())
    )
)
def test_any_replica_sets_can_be_represented(replica_sets: list[set[int]]) -> None:
    names = ("a", "b", "c", "d")
    table = {
        name: [expert for expert, holders in enumerate(replica_sets) if index in holders]
        for index, name in enumerate(names)
    }
    placement = place_experts(names, num_experts=len(replica_sets), layers=1, policy="manual", table=table)
    for expert, holders in enumerate(replica_sets):
        assert placement.holders(0, expert) == tuple(sorted(holders))
    assert placement.is_pinned == all(len(holders) == 1 for holders in replica_sets)


@given(_CAPACITIES, st.integers(0, 300))
def test_shares_stay_within_one_of_their_quota(capacities: list[float], extra: int) -> None:
    total = len(capacities) + extra
    weights = [Fraction(capacity) for capacity in capacities]
    shares = apportion(total, weights)
    assert sum(shares) == total
    assert min(shares) >= 1
    quotas = [total * weight / sum(weights) for weight in weights]
    if min(quotas) >= 1:  # otherwise the promise of at least one comes first
        assert all(abs(share - quota) < 1 for share, quota in zip(shares, quotas, strict=True))

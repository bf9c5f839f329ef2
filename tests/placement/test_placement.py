from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest

from moe_fragment.placement import Placement, PlacementError

SCATTERED = Placement(
    clusters=("alpha", "beta"),
    num_experts=5,
    layers={3: ((4, 0, 2), (1, 3)), 1: ((0, 1), (2, 3, 4))},
)
REPLICATED = Placement(
    clusters=("alpha", "beta", "gamma"),
    num_experts=3,
    layers={0: ((0, 1), (2, 1), ()), 1: ((0,), (1,), (2,))},
)


def test_who_holds_what() -> None:
    assert SCATTERED.experts_of(3, 0) == (4, 0, 2)  # packed order, not sorted
    assert SCATTERED.experts_of(1, 1) == (2, 3, 4)
    assert SCATTERED.holders(3, 4) == (0,)
    assert [SCATTERED.holders(3, expert) for expert in range(5)] == [(0,), (1,), (0,), (1,), (0,)]
    assert SCATTERED.is_pinned
    assert SCATTERED.counts() == {1: (2, 3), 3: (3, 2)}
    assert list(SCATTERED.layers) == [1, 3]


def test_replicated_experts() -> None:
    assert REPLICATED.holders(0, 1) == (0, 1)
    assert REPLICATED.experts_of(0, 2) == ()
    assert REPLICATED.counts() == {0: (2, 2, 0), 1: (1, 1, 1)}
    assert not REPLICATED.is_pinned
    assert [REPLICATED.holders(1, expert) for expert in range(3)] == [(0,), (1,), (2,)]


@pytest.mark.parametrize("placement", [SCATTERED, REPLICATED])
def test_it_survives_json_pickle_and_deepcopy(placement: Placement) -> None:
    again = Placement.from_dict(json.loads(json.dumps(placement.to_dict())))
    assert again == placement
    assert hash(again) == hash(placement)
    assert pickle.loads(pickle.dumps(placement)) == placement
    assert copy.deepcopy(placement) == placement


def test_order_and_names_are_part_of_equality() -> None:
    data = SCATTERED.to_dict()
    data["layers"]["3"] = [[0, 2, 4], [1, 3]]
    assert Placement.from_dict(data) != SCATTERED
    data = SCATTERED.to_dict() | {"clusters": ["beta", "alpha"]}
    assert Placement.from_dict(data) != SCATTERED


def test_what_is_asked_must_exist() -> None:
    with pytest.raises(PlacementError, match="layer 0 is not in the placement, which has 1, 3"):
        SCATTERED.holders(0, 0)
    with pytest.raises(PlacementError, match="expected an expert id from 0 to 4, got 5"):
        SCATTERED.holders(1, 5)
    with pytest.raises(PlacementError, match="expected a cluster index from 0 to 1, got -1"):
        SCATTERED.experts_of(1, -1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "version: expected 1, the only one this moe_fragment reads, got 2"),
        ({"version": 2, "later": 1}, "version: expected 1"),
        ({"version": "1"}, "version: expected 1"),
        ({"version": True}, "version: expected 1"),
        ({"later": 1}, "later: unknown field, expected one of version, clusters, num_experts, layers"),
        ({"num_experts": 0}, "num_experts: expected a whole number of at least 1, got 0"),
        ({"num_experts": 2.0}, "num_experts: expected a whole number of at least 1, got 2.0"),
        ({"clusters": []}, "clusters: expected at least one name, got none"),
        ({"clusters": "ab"}, "clusters: expected a list of names, got 'ab'"),
        ({"clusters": ["a", "a"]}, "clusters[1]: 'a' is used twice"),
        ({"clusters": ["a", 5]}, "clusters[1]: expected a name, got 5"),
        ({"layers": {}}, "layers: expected at least one layer"),
        ({"layers": []}, "layers: expected at least one layer"),
        ({"layers": {"first": [[0, 1], [2]]}}, "layers: expected layer indices from 0, got 'first'"),
        ({"layers": {"-1": [[0, 1], [2]]}}, "layers: expected layer indices from 0, got '-1'"),
        (
            {"layers": {"0": [[0, 1, 2]]}},
            "layers[0]: expected a list of expert ids for each of the 2 clusters a, b",
        ),
        ({"layers": {"0": [[0, 1], 2]}}, "layers[0].b: expected a list of expert ids, got 2"),
        ({"layers": {"0": [[0, 1], [1]]}}, "layers[0]: no cluster holds expert 2"),
        ({"layers": {"0": [[], [1]]}}, "layers[0]: no cluster holds experts 0, 2"),
        ({"layers": {"0": [[0, 1], [2, 2]]}}, "layers[0].b: expert 2 is listed twice"),
        ({"layers": {"0": [[0, 1], [2, 3]]}}, "layers[0].b: expected ids from 0 to 2, got 3"),
        ({"layers": {"0": [[0, 1], [2, -1]]}}, "layers[0].b: expected ids from 0 to 2, got -1"),
        ({"layers": {"0": [[0, 1], ["2"]]}}, "layers[0].b: expected ids from 0 to 2, got '2'"),
        ({"layers": {"0": [[0, 1], [2]], "1": [[0], [1]]}}, "layers[1]: no cluster holds expert 2"),
    ],
)
def test_a_bad_descriptor_says_what_and_where(change: dict[str, Any], sentence: str) -> None:
    data = {"version": 1, "clusters": ["a", "b"], "num_experts": 3, "layers": {"0": [[0, 1], [2]]}}
    assert Placement.from_dict(data).is_pinned
    with pytest.raises(PlacementError) as caught:
        Placement.from_dict(data | change)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("field", ["version", "clusters", "num_experts", "layers"])
def test_a_missing_field_is_named(field: str) -> None:
    data = SCATTERED.to_dict()
    del data[field]
    with pytest.raises(PlacementError, match=f"^{field}: required, but not given$"):
        Placement.from_dict(data)


def test_not_even_a_mapping() -> None:
    with pytest.raises(PlacementError, match="expected a mapping"):
        Placement.from_dict([1])  # type: ignore[arg-type]


def test_many_missing_experts_are_not_all_listed() -> None:
    with pytest.raises(PlacementError, match="experts 1, 2, 3, 4, 5, 6, 7, 8 and 119 more$"):
        Placement(clusters=("a",), num_experts=128, layers={0: ((0,),)})

"""Fragments: every parameter once, strided, balanced, and the same for everybody."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.sync.fragments import split


def model_of(layers: int, layer: int, outside: list[int]) -> dict[str, int]:
    """Sizes of a decoder-like model."""
    sizes = {f"model.layers.{at}.{part}.weight": layer for at in range(layers) for part in ("a", "b")}
    return sizes | {f"outside{at}": size for at, size in enumerate(outside)}


@given(
    layers=st.integers(0, 30),
    layer=st.integers(1, 9),
    outside=st.lists(st.integers(1, 50), max_size=4),
    count=st.integers(1, 12),
    seed=st.integers(0, 9),
)
def test_every_parameter_once(layers: int, layer: int, outside: list[int], count: int, seed: int) -> None:
    sizes = model_of(layers, layer, outside)
    if layers + len(outside) < count:
        with pytest.raises(ValueError, match=f"expected at most {layers + len(outside)} fragments"):
            split(sizes, count)
        return
    fragments = split(sizes, count)
    assert len(fragments) == count
    assert all(fragments)
    assert sorted(name for fragment in fragments for name in fragment) == sorted(sizes)
    shuffled = list(sizes.items())
    random.Random(seed).shuffle(shuffled)
    assert split(dict(shuffled), count) == fragments


def test_layers_are_strided_and_the_rest_balances() -> None:
    """Layer 10 comes after layer 9; the embedding goes where a layer is missing."""
    fragments = split(model_of(11, 5, [12, 3]), 3)
    layers = [sorted({int(name.split(".")[2]) for name in part if "layers" in name}) for part in fragments]
    assert layers == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8]]
    assert "outside0" in fragments[2]
    loads = [sum(part.values()) for part in fragments]
    assert max(loads) <= 4 / 3 * (sum(loads) / 3)

"""The canonical vector: every element has one place, whatever the order and the cuts."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.sync import CanonicalVector, Run
from moe_fragment.sync.canonical import interval, merge
from moe_fragment.sync.vector import _check_cover, _slices

SIZES = st.dictionaries(st.text("abc.", min_size=1, max_size=4), st.integers(1, 9), min_size=1, max_size=8)


@given(sizes=SIZES, seed=st.integers(0, 9))
def test_names_decide_the_order(sizes: dict[str, int], seed: int) -> None:
    shuffled = list(sizes.items())
    random.Random(seed).shuffle(shuffled)
    one, other = CanonicalVector(sizes), CanonicalVector(dict(shuffled))
    assert one.starts == other.starts
    assert one.size == sum(sizes.values())
    covered = sorted(
        element for name in sizes for element in range(one.starts[name], one.starts[name] + sizes[name])
    )
    assert covered == list(range(one.size))


@given(cuts=st.lists(st.integers(1, 19), unique=True), flats=st.integers(1, 3), seed=st.integers(0, 99))
def test_merge_keeps_every_element_where_it_was(cuts: list[int], flats: int, seed: int) -> None:
    bounds = [0, *sorted(cuts), 20]
    chooser = random.Random(seed)
    runs = [
        Run(low, high - low, chooser.randrange(flats), low + chooser.choice([0, 0, 100]))
        for low, high in itertools.pairwise(bounds)
    ]

    def places(held: list[Run]) -> dict[int, tuple[int, int]]:
        return {run.start + i: (run.flat, run.position + i) for run in held for i in range(run.size)}

    chooser.shuffle(runs)
    merged = merge(runs)
    assert places(merged) == places(runs)
    for one, other in itertools.pairwise(merged):
        continues = (one.flat, one.position + one.size) == (other.flat, other.position)
        assert not continues, "two runs that continue each other were not merged"


@given(total=st.integers(0, 50), parts=st.integers(1, 7))
def test_intervals_tile_the_vector(total: int, parts: int) -> None:
    tiles = [interval(total, part, parts) for part in range(parts)]
    assert [element for low, high in tiles for element in range(low, high)] == list(range(total))
    assert max(high - low for low, high in tiles) - min(high - low for low, high in tiles) <= 1


def test_slices_cut_runs_at_the_interval() -> None:
    (piece,) = _slices([Run(start=10, size=10, flat=1, position=3)], 12, 15)
    assert (piece.flat, piece.position, piece.offset, piece.size) == (1, 5, 0, 3)
    assert _slices([Run(start=10, size=10, flat=1, position=3)], 20, 30) == []


def test_an_element_held_twice_or_never_is_an_error() -> None:
    import pytest

    _check_cover([Run(4, 4, 0, 0), Run(0, 4, 0, 4)], 8)
    for runs in ([Run(0, 4, 0, 0)], [Run(0, 5, 0, 0), Run(4, 4, 0, 5)], [Run(1, 7, 0, 0)]):
        with pytest.raises(ValueError, match="hold"):
            _check_cover(runs, 8)

"""Lanes, and the regrouping of rows between lane members and clusters."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.fabric.lanes import Lane, LaneLayout
from moe_fragment.fabric.routes import group_by_cluster, split_by_member


@given(size=st.integers(1, 9), rails=st.integers(1, 9))
def test_every_rank_is_on_one_lane_with_one_gateway(size: int, rails: int) -> None:
    rails = min(rails, size)
    layouts = [LaneLayout.of(rank, size, rails) for rank in range(size)]
    for rank, layout in enumerate(layouts):
        assert rank in layout.members
        assert layout.members[0] == layout.rail == rank % rails
    assert sorted(member for layout in set(layouts) for member in layout.members) == list(range(size))


@given(stages=st.integers(1, 4), widths=st.lists(st.integers(1, 5), min_size=2, max_size=3), data=st.data())
def test_a_rail_stays_within_a_stage(stages: int, widths: list[int], data: st.DataObject) -> None:
    """In clusters of any width: the same rail is the same stage everywhere, and each rail has one gateway."""
    rails = stages * data.draw(st.integers(1, min(widths)))
    stage_of_rail: dict[int, set[int]] = {}
    for width in widths:
        size = stages * width
        lanes = LaneLayout.all(size, rails, stages)
        assert sorted(member for lane in lanes for member in lane.members) == list(range(size))
        for rail, lane in enumerate(lanes):
            assert lane.rail == rail
            assert lane.gateway == min(lane.members)
            assert all(LaneLayout.of(member, size, rails, stages) == lane for member in lane.members)
            stage_of_rail.setdefault(rail, set()).update(member // width for member in lane.members)
    assert all(len(found) == 1 for found in stage_of_rail.values())


@given(total=st.integers(0, 40), size=st.integers(1, 6))
def test_shares_tile_the_arrived_rows(total: int, size: int) -> None:
    lane = Lane(LaneLayout(0, tuple(range(size))), 0, None)
    shares = [lane.share(total, position) for position in range(size)]
    assert [row for low, high in shares for row in range(low, high)] == list(range(total))
    assert max(high - low for low, high in shares) - min(high - low for low, high in shares) <= 1


@given(counts_LC=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=4))
def test_split_by_member_is_the_inverse_of_group_by_cluster(counts_LC: list[list[int]]) -> None:
    """pytorch#43256: counts of zero anywhere."""
    width = 3
    members = [
        (torch.arange(sum(counts) * width, dtype=torch.int64) + 50 * index).to(torch.uint8).view(-1, width)
        for index, counts in enumerate(counts_LC)
    ]
    grouped = group_by_cluster(members, counts_LC, 3)
    assert [part.numel() for part in grouped] == [
        width * sum(column) for column in zip(*counts_LC, strict=True)
    ]
    for one, other in zip(split_by_member(grouped, counts_LC, width), members, strict=True):
        assert torch.equal(one, other)

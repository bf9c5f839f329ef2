"""What a rail does with messages that are late, missing, of another exchange or of another size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fragment.fabric import FAILED, OK, Fabric
from moe_fragment.fabric.collectives import all_reduce
from moe_fragment.fabric.wire import Frame
from tests.fabric.pair import EAGER_BYTES, fabrics, group_of, together


def rows_of(fabric: Fabric, counts_C: list[int], width: int = 4) -> torch.Tensor:
    """uint8 rows that say where they come from and go to."""
    return torch.cat(
        [
            torch.full((count, width), 16 * fabric.cluster + cluster, dtype=torch.uint8)
            for cluster, count in enumerate(counts_C)
        ]
    )


@pytest.mark.parametrize(
    "counts_CC",
    [
        [[0, 3, 2], [1, 0, 4], [5, 1, 0]],
        [[0, 0, 5], [0, 0, 0], [0, 0, 0]],
        [[0, 0, 0], [0, 0, 0], [0, 0, 0]],
    ],
    ids=["all", "one", "none"],
)
def test_rows_go_there_and_back(counts_CC: list[list[int]]) -> None:
    """pytorch#43256 and #88245: splits of zero, all of them zero; sglang#38773: an island without rows, and all of
    them."""

    def travel(fabric: Fabric) -> Any:
        counts = counts_CC[fabric.cluster]
        rows = rows_of(fabric, counts)
        fabric.begin_step(0)
        route, arrived = fabric.open_route(rows, counts).wait()
        assert route.arrived_C == [column[fabric.cluster] for column in counts_CC]
        back = fabric.reverse(route, arrived + 1, "combine").wait()
        again = fabric.forward(route, rows, "combine").wait()
        assert torch.equal(back, rows + 1)
        assert torch.equal(again, arrived)
        return arrived[:, 0].tolist()

    arrived = together(fabrics(3), travel)
    for here, values in enumerate(arrived):
        assert values == [
            16 * there + here for there, counts in enumerate(counts_CC) for _ in range(counts[here])
        ]


def test_messages_above_the_posted_size_are_announced() -> None:
    def travel(fabric: Fabric) -> Any:
        counts = [0, 0]
        counts[1 - fabric.cluster] = EAGER_BYTES // 100 + fabric.cluster
        rows = torch.randint(0, 255, (sum(counts), 200), dtype=torch.uint8)
        fabric.begin_step(0)
        route, arrived = fabric.open_route(rows, counts).wait()
        assert torch.equal(fabric.reverse(route, arrived, "combine").wait(), rows)
        traffic = fabric.meter.drain()[1 - fabric.cluster, "dispatch"]
        assert (traffic.sent, traffic.received) == (rows.numel(), arrived.numel())

    together(fabrics(2), travel)


def exchange_and_judge(fabric: Fabric) -> tuple[str, int]:
    """One dispatch and its answer, then the verdict; nothing may raise."""
    counts = [0 if cluster == fabric.cluster else 2 for cluster in range(fabric.clusters)]
    rows = rows_of(fabric, counts)
    fabric.begin_step(7)
    route, arrived = fabric.open_route(rows, counts).wait()
    back = fabric.reverse(route, arrived, "combine").wait()
    assert back.shape == rows.shape
    verdict = fabric.verdict(OK, [1.0])
    return str(fabric.failure or ""), verdict.outcome


@pytest.mark.parametrize("size", [2, 3])
def test_a_cluster_out_of_step_is_named(size: int) -> None:
    """pytorch#117486: a wrong frame is an error that names the cluster, not a hang and not a wrong sum."""
    clusters = fabrics(size, timeout_s=1.0)

    def shift(message: torch.Tensor) -> torch.Tensor:
        frame = Frame.decode(message)
        wrong = Frame(frame.step, frame.sequence + 3, frame.kind, frame.size)
        return torch.cat([wrong.encode(), message[48:]])

    group_of(clusters[1]).intercept = shift
    results = together(clusters, exchange_and_judge)
    assert [outcome for _, outcome in results] == [FAILED] * size
    assert (
        "cluster bob is at exchange 4 (dispatch) of step 7, this cluster at exchange 1 (dispatch)"
        in results[0][0]
    )


def test_a_wrong_count_is_named() -> None:
    """pytorch#117486: fewer rows come back than were sent."""
    clusters = fabrics(2, timeout_s=1.0)

    def shorten(message: torch.Tensor) -> torch.Tensor:
        frame = Frame.decode(message)
        if frame.sequence != 2:
            return message
        return torch.cat([Frame(frame.step, frame.sequence, frame.kind, 4).encode(), message[48:52]])

    group_of(clusters[1]).intercept = shorten
    (why, first), (_, second) = together(clusters, exchange_and_judge)
    assert (first, second) == (FAILED, FAILED)
    assert "cluster bob sent 4 bytes in exchange 2 (combine) of step 7, expected 8" in why


def test_something_else_is_no_message() -> None:
    clusters = fabrics(2, timeout_s=1.0)
    group_of(clusters[1]).intercept = torch.zeros_like
    (why, first), (_, second) = together(clusters, exchange_and_judge)
    assert (first, second) == (FAILED, FAILED)
    assert "cluster bob sent something else" in why


def test_a_lost_message_fails_within_the_timeout() -> None:
    """After the first failure nobody waits again in this step."""
    clusters = fabrics(2, timeout_s=0.5)
    group_of(clusters[1]).intercept = lambda _message: None
    results = together(clusters, exchange_and_judge)
    assert [outcome for _, outcome in results] == [FAILED, FAILED]
    assert "exchange 1 (dispatch) of step 7 failed: Timed out" in results[0][0]


def test_after_a_failure_come_no_rows_and_zeros() -> None:
    """A route opened before keeps its shapes: what was received in forward is what backward is asked for."""
    clusters = fabrics(2, timeout_s=1.0)

    def travel(fabric: Fabric) -> Any:
        counts = [0, 0]
        counts[1 - fabric.cluster] = 3
        rows = rows_of(fabric, counts) + 1
        fabric.begin_step(0)
        route, arrived = fabric.open_route(rows, counts).wait()
        group_of(fabric).drop()
        back = fabric.reverse(route, arrived, "combine").wait()
        assert torch.equal(back, torch.zeros_like(rows))
        again = fabric.forward(route, rows, "dispatch").wait()
        assert torch.equal(again, torch.zeros_like(arrived))
        new, nothing = fabric.open_route(rows, counts).wait()
        assert nothing.shape == (0, rows.shape[1])
        assert torch.equal(fabric.reverse(new, nothing, "combine").wait(), torch.zeros_like(rows))
        vector = torch.ones(5)
        fabric.collective(all_reduce, vector, "trunk", fabric.everybody).wait()
        return fabric.verdict(OK, [2.0]).outcome

    assert together(clusters, travel) == [FAILED, FAILED]


def test_the_worst_outcome_wins_and_values_travel_exactly() -> None:
    third = 1.0 / 3.0

    def judge(fabric: Fabric) -> Any:
        fabric.begin_step(0)
        return fabric.verdict(2 - fabric.cluster % 2, [third * (fabric.cluster + 1), float("inf")])

    for verdict in together(fabrics(3), judge):
        assert verdict.outcome == 1
        assert verdict.values_CV == [[third * (index + 1), float("inf")] for index in range(3)]


def test_fleet_sum_is_equal_to_the_bit() -> None:
    """pytorch#162338: sums, not averages."""

    def total(fabric: Fabric) -> Any:
        fabric.begin_step(0)
        values = torch.tensor([[0.1, 1.0], [float(fabric.cluster), 1e-9]], dtype=torch.float64)
        return fabric.fleet_sum(values)

    first, *others = together(fabrics(3), total)
    torch.testing.assert_close(first, torch.tensor([[0.3, 3.0], [3.0, 3e-9]], dtype=torch.float64))
    assert all(torch.equal(first, other) for other in others)

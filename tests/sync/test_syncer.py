"""When the syncer merges, what weighs how much, and whom it holds back; the test is its clock."""

from __future__ import annotations

import pytest
import torch

from moe_fragment.sync import OuterSGD
from moe_fragment.sync.syncer import Policy, Push, Syncer

AVERAGE = OuterSGD(1.0, 0.0)


def syncer(clusters: int = 3, size: int = 2, **policy: object) -> Syncer:
    """One fragment of one tensor, at zero."""
    fields = {"outer": AVERAGE, "merge": "average", **policy}
    return Syncer([torch.zeros(size)], [[("w", 0, size)]], Policy(**fields), range(clusters))  # type: ignore[arg-type]


def push(cluster: int, delta: list[float], *, version: int = 0, tokens: float = 10.0, steps: int = 1) -> Push:
    """Of fragment 0, from a cluster with steps of one second."""
    return Push(cluster, 0, version, tokens, steps, 1.0, torch.tensor(delta))


def test_quorum_and_grace() -> None:
    """Two of three, then half of what is left of two steps; the third comes too late and goes into the next merge."""
    server = syncer(quorum=2, grace=0.5, overlap=2)
    server.offer(push(0, [2.0, 0.0]), 10.0)
    assert server.next_deadline_s is None
    assert server.merge(100.0) == []
    server.offer(push(1, [4.0, 0.0]), 11.0)
    assert server.next_deadline_s == pytest.approx(11.5)  # slack 2 - 1 second, half of it
    assert server.merge(11.4) == []
    assert server.merge(11.5) == [(0, 0), (1, 0)]
    assert server.weights[0].tolist() == [-2.0, 0.0]  # the third counts as if it had not moved
    server.offer(push(2, [6.0, 6.0]), 11.6)
    server.offer(push(0, [0.0, 0.0], version=1), 12.0)
    assert server.merge(13.0) == [(0, 0), (2, 0)]
    assert server.stalest == 1
    assert server.weights[0].tolist() == [-4.0, -2.0]
    assert server.versions == [2]


def test_a_round_of_single_pushes_is_worth_one_merge_of_all() -> None:
    """Also where clusters weigh differently, once that is known."""
    alone, together = syncer(quorum=1, grace=0.0), syncer(quorum=3)
    for _ in range(2):
        start = alone.weights[0].clone()
        for cluster, tokens in enumerate((10.0, 20.0, 20.0)):
            delta = [1.0 + cluster, -2.0 * cluster]
            alone.offer(push(cluster, delta, version=alone.versions[0], tokens=tokens), 0.0)
            alone.merge(0.0)
            together.offer(push(cluster, delta, version=together.versions[0], tokens=tokens), 0.0)
        together.merge(0.0)
    torch.testing.assert_close(alone.weights[0] - start, together.weights[0] / 2)


def test_whole_rounds_behind_weigh_less() -> None:
    server = syncer(clusters=2, quorum=1, grace=0.0)
    for number in range(4):
        server.offer(push(0, [0.0, 0.0], version=number), 0.0)
        server.merge(0.0)
    server.offer(push(1, [6.0, 0.0], version=0), 1.0)
    server.merge(1.0)
    assert server.weights[0].tolist() == [-1.0, 0.0]  # half of the fleet, two rounds behind: a third of that


def test_everybody_there_needs_no_grace() -> None:
    server = syncer(clusters=2, quorum=1, grace=1.0, overlap=10)
    server.offer(push(0, [1.0, 1.0]), 0.0)
    assert server.next_deadline_s == 10.0
    server.offer(push(1, [3.0, 1.0]), 2.0)
    assert server.next_deadline_s == 2.0
    assert server.merge(2.0) == [(0, 0), (1, 0)]


def test_weights_are_tokens_times_tokens_per_step() -> None:
    server = syncer(clusters=2, quorum=2)
    server.offer(push(0, [1.0, 0.0], tokens=30.0, steps=3), 0.0)
    server.offer(push(1, [0.0, 1.0], tokens=30.0, steps=1), 0.0)
    server.merge(0.0)
    assert server.weights[0].tolist() == [-0.25, -0.75]


def test_who_leaves_is_not_waited_for() -> None:
    server = syncer(clusters=3, quorum=3)
    server.offer(push(0, [1.0, 1.0]), 0.0)
    server.offer(push(2, [1.0, 1.0]), 0.0)
    assert server.merge(50.0) == []
    server.leave(1, 51.0)
    assert server.merge(51.0) == [(0, 0), (2, 0)]


def test_bounded_staleness_holds_the_fast_back() -> None:
    """A parameter server with a bound of 2: the third push of a cluster whose mate has none is merged but not
    answered."""
    server = syncer(clusters=2, quorum=1, grace=0.0, staleness=2)
    for number in range(3):
        server.offer(push(0, [1.0, 0.0], version=number), float(number))
        assert server.merge(float(number)) == ([(0, 0)] if number < 2 else [])
    assert server.weights[0].tolist() == [-1.5, 0.0]
    server.offer(push(1, [4.0, 0.0]), 9.0)
    assert server.merge(9.0) == [(0, 0), (1, 0)]
    assert server.stalest == 3


def test_rda_by_tensor_and_embeddings_averaged() -> None:
    policy = Policy(AVERAGE, quorum=2, merge="rda")
    pieces = [[("embed_tokens.weight", 0, 2), ("layers.0.w", 2, 2)]]
    server = Syncer([torch.zeros(4)], pieces, policy, range(2))
    server.offer(push(0, [3.0, 0.0, 3.0, 0.0]), 0.0)
    server.offer(push(1, [0.0, 4.0, 0.0, 4.0]), 0.0)
    server.merge(0.0)
    assert (-server.weights[0]).tolist() == pytest.approx([1.5, 2.0, 2.4749, 2.4749], abs=1e-4)


def test_nothing_trained_on_changes_nothing() -> None:
    server = syncer(clusters=1)
    server.offer(push(0, [5.0, 5.0], tokens=0.0), 0.0)
    assert server.merge(0.0) == [(0, 0)]
    assert server.weights[0].tolist() == [0.0, 0.0]
    assert server.versions == [0]

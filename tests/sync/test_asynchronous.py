"""Clusters that push and pull in their own time, as threads: nobody waits for the slowest, and all end equal."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import Any

import pytest
import torch

from moe_fragment.codecs import parse_codec
from moe_fragment.fabric import Fabric, FleetError
from moe_fragment.sync import OuterSGD
from moe_fragment.sync.asynchronous import AsynchronousSync
from moe_fragment.sync.fragments import split
from moe_fragment.sync.syncer import Policy
from tests.fabric.pair import fabrics, group_of, together
from tests.sync.copies import AVERAGE, SIZES, Copy, read_piece

DECOUPLED = Policy(OuterSGD(0.7, 0.9), quorum=1, grace=0.5, overlap=1)
SERVER = Policy(AVERAGE, quorum=1, grace=0.0, merge="average", staleness=2)


def asynchronous(
    fabric: Fabric, copy: Copy, policy: Policy, *, every: int = 2, fragments: int = 1, codec: Any = None
) -> AsynchronousSync:
    """An asynchronous sync of a copy."""
    return AsynchronousSync(
        [copy.vector(fabric, part) for part in split(copy.sizes, fragments)],
        policy,
        every=every,
        masters=copy.masters,
        publish=copy.publish,
        codec=parse_codec(codec),
        error_feedback=0.9 if codec else None,
    )


class Meeting:
    """What `Fabric.gather` does, for threads."""

    def __init__(self, clusters: int) -> None:
        self.barrier = threading.Barrier(clusters)

    def join(self, fabric: Fabric) -> None:
        """Give a fabric this meeting instead of the coordinator's store."""
        fabric.gather = self._gather  # type: ignore[method-assign]

    def _gather(self, key: str, value: Any) -> list[Any]:
        self.barrier.wait(30.0)
        return []


@pytest.mark.parametrize("codec", [None, "int8"])
@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("policy", [DECOUPLED, SERVER], ids=["decoupled", "server"])
def test_copies_are_equal_at_the_end(policy: Policy, fragments: int, codec: Any) -> None:
    meeting = Meeting(3)

    def run(fabric: Fabric) -> Any:
        meeting.join(fabric)
        generator = torch.Generator().manual_seed(fabric.cluster)
        copy = Copy(SIZES, torch.linspace(-1, 1, 32))
        sync = asynchronous(fabric, copy, policy, every=4, fragments=fragments, codec=codec)
        sync.begin(0)
        outcomes = []
        for step in range(1, 13 + 4 * fabric.cluster):
            copy.flat += 0.1 * torch.randn(32, generator=generator)
            outcomes += [report.outcome for report in sync.after_step(step, 10)]
        outcomes += [report.outcome for report in sync.after_step(99, 10, last=True)]
        return copy.flat, outcomes

    results = together(fabrics(3), run)
    for flat, outcomes in results:
        assert torch.equal(flat, results[0][0])
        assert flat.isfinite().all()
        assert set(outcomes) == {"merged"}
        assert len(outcomes) > fragments


def test_nobody_waits_for_the_slowest() -> None:
    """While one cluster sleeps, the other pushes and is answered; what the sleeper knows arrives later."""
    meeting = Meeting(2)
    woken = threading.Event()

    def run(fabric: Fabric) -> Any:
        meeting.join(fabric)
        copy = Copy(SIZES, 0.0)
        sync = asynchronous(fabric, copy, Policy(AVERAGE, quorum=1, grace=0.0))
        sync.begin(0)
        merged = 0
        if fabric.cluster:
            assert woken.wait(30.0)
        for step in range(1, 9):
            copy.flat += 1.0
            merged += len(sync.after_step(step, 10))
            time.sleep(0.02)
        if not fabric.cluster:
            assert merged >= 3
            woken.set()
        sync.after_step(9, 0, last=True)
        return float(copy.flat[0])

    first, second = together(fabrics(2), run)
    assert first == second
    # 16 units of progress; a lone push moves the global copy by all of it, one that meets another by half.
    assert 8.0 <= first <= 16.0


def test_progress_since_a_push_is_kept() -> None:
    """Alone with outer rate 1 and no momentum, the syncer changes nothing, however late its answers come."""

    def run(fabric: Fabric) -> Any:
        fabric.gather = lambda key, value: []  # type: ignore[method-assign]
        copy = Copy(SIZES, 0.0)
        sync = asynchronous(fabric, copy, Policy(AVERAGE), every=3)
        sync.begin(0)
        for step in range(1, 11):
            copy.flat += 1.0
            sync.after_step(step, 10, last=step == 10)
            if step == 5:
                time.sleep(0.1)
        return copy.flat

    (flat,) = together(fabrics(1), run)
    torch.testing.assert_close(flat, torch.full((32,), 10.0))


def test_poisoned_copy_gets_the_global_one() -> None:
    def run(fabric: Fabric) -> Any:
        fabric.gather = lambda key, value: []  # type: ignore[method-assign]
        copy = Copy(SIZES, 0.0)
        sync = asynchronous(fabric, copy, Policy(AVERAGE), every=2, codec="int8")
        sync.begin(0)
        reports = []
        for step in range(1, 9):
            copy.flat += torch.nan if step == 4 else 1.0
            reports += sync.after_step(step, 10)
            time.sleep(0.05)
        return [report.poisoned for report in reports], copy.flat

    ((poisoned, flat),) = together(fabrics(1), run)
    assert poisoned == [[], [0], []]
    assert flat.isfinite().all()


def test_a_syncer_that_is_gone_is_named() -> None:
    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, 0.0)
        sync = asynchronous(fabric, copy, Policy(AVERAGE), every=1)
        sync.begin(0)
        if not fabric.cluster:
            return "host"
        group_of(fabric, side=True).drop()
        try:
            for step in range(1, 100):
                sync.after_step(step, 10)
                time.sleep(0.01)
        except FleetError as error:
            return str(error)
        return "went on"

    assert together(fabrics(2), run)[1].startswith("the syncer is gone: no message to ada")


def test_resumes_from_the_syncers_copy() -> None:
    """Base copies are the syncer's again, momentum included, and no cluster's own weights are lost."""
    meeting = Meeting(2)

    def run(fabric: Fabric) -> Any:
        meeting.join(fabric)
        copy = Copy(SIZES, 0.0)
        sync = asynchronous(fabric, copy, DECOUPLED)
        sync.begin(0)
        for step in range(1, 6):
            copy.flat += 1.0 + fabric.cluster
            sync.after_step(step, 10)
            time.sleep(0.02)
        meeting.barrier.wait(30.0)
        pieces = {(kind, name): values.clone() for kind, name, _, values in sync.state()}
        own = copy.flat.clone()
        fresh = asynchronous(fabric, copy, DECOUPLED)
        kinds = {kind for kind, _ in pieces}
        fresh.restore(partial(read_piece, pieces), sync.numbers(), served=kinds.__contains__)
        meeting.barrier.wait(30.0)
        assert torch.equal(copy.flat, own)
        return kinds, fresh, sync.numbers()

    (host, restored, _), (other, _, _) = together(fabrics(2), run)
    assert host == {"outer_weight", "served_weight", "served_velocity"}
    assert other == {"outer_weight"}
    assert restored._restored is not None

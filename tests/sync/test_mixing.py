"""Butterfly mixing as a strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fragment.fabric import Fabric
from moe_fragment.sync import MixingSync
from tests.fabric.pair import fabrics, group_of, together
from tests.sync.copies import SIZES, Copy, swallow_trunk


def mixing(fabric: Fabric, copy: Copy, every: int) -> MixingSync:
    """Of the whole copy."""
    return MixingSync(copy.vector(fabric, SIZES), every=every, masters=copy.masters, publish=copy.publish)


@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
def test_copies_come_together(clusters: int) -> None:
    """Four clusters agree after two rounds; the mean never changes."""

    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, float(fabric.cluster))
        sync = mixing(fabric, copy, every=3)
        seen = []
        for step in range(1, 13):
            for report in sync.after_step(step):
                assert report.outcome == "merged"
                seen.append(copy.flat.clone())
        return torch.stack(seen)

    results = torch.stack(together(fabrics(clusters), run))
    assert results.shape == (clusters, 4, 32)
    mean = (clusters - 1) / 2
    torch.testing.assert_close(results.mean(0), torch.full((4, 32), mean))
    spread = (results - mean).abs().amax(dim=(0, 2))
    assert spread[-1] <= spread[0]
    if clusters == 4:
        assert spread[1] == 0


def test_failed_round_is_tried_again_and_poison_spreads_nowhere() -> None:
    def run(fabric: Fabric) -> Any:
        copy = Copy(SIZES, float(fabric.cluster))
        sync = mixing(fabric, copy, every=2)
        found = []
        for step in range(1, 8):
            if step == 4 and fabric.cluster:
                group_of(fabric).intercept = swallow_trunk
            if step == 6 and fabric.cluster:
                copy.flat[0] = torch.nan
            before = copy.flat.clone()
            for report in sync.after_step(step):
                found.append((step, report.outcome, report.poisoned))
                if report.outcome != "merged":
                    torch.testing.assert_close(copy.flat, before, rtol=0, atol=0, equal_nan=True)
        return found

    expected = [(2, "merged", []), (4, "failed", []), (5, "merged", []), (6, "empty", [1])]
    assert together(fabrics(2, timeout_s=1.0), run) == [expected] * 2

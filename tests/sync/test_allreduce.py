"""The trunk's all-reduce between clusters, here as threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fragment.fabric import Fabric
from moe_fragment.sync import Run, TrunkAllReduce
from tests.fabric.pair import fabrics, together

TOTAL = 41


@pytest.mark.parametrize("clusters", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_layouts_that_differ(clusters: int, dtype: torch.dtype) -> None:
    """Each cluster cuts and orders the vector its own way; the sum is the same to the bit, in its own layout.

    pytorch#162338: nobody averages, the caller divides a sum.
    """
    vectors = [torch.randn(TOTAL, dtype=dtype) for _ in range(clusters)]
    expected = sum(vector.double() for vector in vectors)

    def reduce(fabric: Fabric) -> Any:
        cut = 7 + 5 * fabric.cluster
        vector = vectors[fabric.cluster]
        flats = [vector[cut:].clone(), vector[:cut].clone()]
        runs = [Run(cut, TOTAL - cut, 0, 0), Run(0, cut, 1, 0)]
        trunk = TrunkAllReduce(
            fabric, runs, total=TOTAL, rails=1, local_rank=0, local_ranks=1, group=None, dtype=dtype
        )
        fabric.begin_step(0)
        squared = trunk.reduce(flats)
        return torch.cat([flats[1], flats[0]]), squared

    results = together(fabrics(clusters), reduce)
    first, squared = results[0]
    for other, other_squared in results:
        assert torch.equal(first, other)
        assert squared == other_squared
    torch.testing.assert_close(first.double(), expected, rtol=1e-6, atol=1e-6)
    assert squared == pytest.approx(float(first.double().square().sum()))

"""Means and RDA against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.codecs import parse_codec
from moe_fragment.sync.merge import average, decoded_mean, radial_directional_average


def test_rda_golden() -> None:
    """(3, 0) and (0, 4): mean length 3.5 in the direction of the diagonal; the average is (1.5, 2)."""
    vectors = [torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])]
    merged = radial_directional_average(vectors, [1.0, 1.0])
    assert merged.tolist() == pytest.approx([2.4749, 2.4749], abs=1e-4)
    assert average(vectors, [1.0, 1.0]).tolist() == [1.5, 2.0]


@given(scale=st.floats(0.01, 100), weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=4))
def test_rda_invariants(scale: float, weights: list[float]) -> None:
    """Equal contributions merge to themselves, scale passes through, opposite ones cancel, zero is harmless."""
    torch.manual_seed(0)
    vectors = [torch.randn(6) for _ in weights]
    same = radial_directional_average([vectors[0]] * len(weights), weights)
    torch.testing.assert_close(same, vectors[0])
    torch.testing.assert_close(
        radial_directional_average([scale * vector for vector in vectors], weights),
        scale * radial_directional_average(vectors, weights),
        rtol=1e-4,
        atol=1e-5,
    )
    unit = vectors[0] / vectors[0].norm()
    assert radial_directional_average([unit, -unit], [1.0, 1.0]).norm() < 1e-6
    zeros = [torch.zeros(6)] * len(weights)
    assert torch.equal(radial_directional_average(zeros, weights), torch.zeros(6))


def test_sparse_means_over_clusters_or_contributors() -> None:
    """Supports that share one element: its mean is the same either way, the others' are not."""
    codec = parse_codec([{"topk": {"k": 2, "block": 8}}])
    vectors = [torch.zeros(8), torch.zeros(8)]
    vectors[0][[1, 2]] = torch.tensor([4.0, 6.0])
    vectors[1][[2, 5]] = torch.tensor([2.0, 8.0])
    payloads = {cluster: codec.encode(vector) for cluster, vector in enumerate(vectors)}
    weights = {0: 3.0, 1: 1.0}
    clusters = decoded_mean(codec, payloads, weights, 8)
    assert clusters[[1, 2, 5]].tolist() == [3.0, 5.0, 2.0]
    contributors = decoded_mean(codec, payloads, weights, 8, "contributors")
    assert contributors[[1, 2, 5]].tolist() == [4.0, 5.0, 8.0]
    assert clusters[[0, 3, 4, 6, 7]].abs().sum() == contributors[[0, 3, 4, 6, 7]].abs().sum() == 0

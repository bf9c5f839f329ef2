"""How contributions of several clusters become one: weighted means over clusters or contributors, and RDA.

Everything is computed in ascending order of cluster, in fp32, so that clusters that hold the same contributions get the
same result to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from moe_fragment.codecs import Codec

DivideBy = Literal["clusters", "contributors"]


def decoded_mean(
    codec: Codec,
    payloads: Mapping[int, torch.Tensor],
    weights: Mapping[int, float],
    size: int,
    divide_by: DivideBy = "clusters",
) -> torch.Tensor:
    """Weighted mean of encoded vectors.

    A sparse contribution says nothing about most elements. `clusters` takes that as zero, so that the mean is over all
    clusters (SparseLoCo, arXiv 2508.15706, eq. 3); `contributors` takes the mean of those that sent the element, which
    is up to C times as much (DeMo's and templar's code).

    Args:
        codec: that encoded all of them.
        payloads: uint8 by cluster.
        weights: of the same clusters; only their ratios count, 0 leaves a cluster out.
        size: elements of each vector.
        divide_by: what a sparse mean is over.

    Returns:
        fp32 [size]; zeros where nobody contributes.
    """
    total = torch.zeros(size, dtype=torch.float32)
    counts = torch.zeros(size, dtype=torch.float32) if codec.sparse and divide_by == "contributors" else None
    everything = sum(weights[cluster] for cluster in payloads)
    for cluster in sorted(payloads):
        if weights[cluster]:
            codec.add(payloads[cluster], total, weight=weights[cluster] / everything, counts=counts)
    if counts is None:
        return total
    return torch.where(counts > 0, total / counts.clamp(min=torch.finfo(torch.float32).tiny), total)


def average(contributions: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Weighted mean of equally shaped tensors."""
    everything = sum(weights)
    total = torch.zeros_like(contributions[0], dtype=torch.float32)
    for contribution, weight in zip(contributions, weights, strict=True):
        total += (weight / everything) * contribution
    return total


def radial_directional_average(
    contributions: Sequence[torch.Tensor], weights: Sequence[float]
) -> torch.Tensor:
    """Mean length times mean direction (Decoupled DiLoCo, arXiv 2604.21428).

    `(sum w |v| / sum w) * phi(sum w phi(v) / sum w)` with `phi(x) = x / |x|`, `phi(0) = 0`. Averaging vectors that
    point apart makes them shorter, the more so the more clusters there are; this keeps their length.

    Args:
        contributions: one tensor's contributions, equally shaped.
        weights: of each.
    """
    lengths = [float(contribution.double().norm()) for contribution in contributions]
    direction = average([_unit(contribution) for contribution in contributions], weights)
    length = sum(weight * norm for weight, norm in zip(weights, lengths, strict=True)) / sum(weights)
    return length * _unit(direction)


def _unit(tensor: torch.Tensor) -> torch.Tensor:
    norm = float(tensor.double().norm())
    return tensor / norm if norm else torch.zeros_like(tensor)

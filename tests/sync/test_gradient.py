"""Gradient strategies: exact and encoded sums, the same to the bit on every cluster."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe_fragment.codecs import parse_codec
from moe_fragment.fabric import Fabric
from moe_fragment.sync import CanonicalVector, GradientSync, RailVector, Run
from tests.fabric.pair import fabrics, together

TOTAL = 41


def vector_of(fabric: Fabric, dtype: torch.dtype = torch.float32) -> RailVector:
    """41 elements, which each cluster cuts and orders its own way."""
    cut = 7 + 5 * fabric.cluster
    runs = [Run(cut, TOTAL - cut, 0, 0), Run(0, cut, 1, 0)]
    return RailVector(fabric, CanonicalVector({"w": TOTAL}), runs, dtype=dtype)


def cut_up(fabric: Fabric, vector: torch.Tensor) -> list[torch.Tensor]:
    """As the runs of `vector_of` say."""
    cut = 7 + 5 * fabric.cluster
    return [vector[cut:].clone(), vector[:cut].clone()]


def whole(flats: list[torch.Tensor]) -> torch.Tensor:
    """Inverse of `cut_up`."""
    return torch.cat([flats[1], flats[0]])


@pytest.mark.parametrize("butterfly", [False, True])
@pytest.mark.parametrize("clusters", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_layouts_that_differ(clusters: int, dtype: torch.dtype, butterfly: bool) -> None:
    """The sum is the same to the bit, in each cluster's own layout.

    pytorch#162338: nobody averages, the caller divides a sum.
    """
    vectors = [torch.randn(TOTAL, dtype=dtype) for _ in range(clusters)]
    expected = torch.stack([vector.double() for vector in vectors]).sum(0)

    def reduce(fabric: Fabric) -> Any:
        sync = GradientSync(vector_of(fabric, dtype), butterfly=butterfly)
        flats = cut_up(fabric, vectors[fabric.cluster])
        fabric.begin_step(0)
        squared = sync.reduce(flats)
        return whole(flats), squared

    results = together(fabrics(clusters), reduce)
    first, squared = results[0]
    for other, other_squared in results:
        assert torch.equal(first, other)
        assert squared == other_squared
    torch.testing.assert_close(first.double(), expected, rtol=1e-6, atol=1e-6)
    assert squared == pytest.approx(float(first.double().square().sum()))


@pytest.mark.parametrize("feedback", [None, 1.0])
@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", [{"topk": {"k": 4, "block": 16}}, "int8"]])
def test_encoded_sums(codec: Any, feedback: float | None) -> None:
    """The sum of what every cluster decodes; with feedback, what is lost in one step comes in a later one."""
    vectors = [torch.randn(TOTAL) for _ in range(3)]
    plain = parse_codec(codec)
    expected = torch.stack([plain.decode(plain.encode(vector), TOTAL) for vector in vectors]).sum(0)
    if codec == "bf16" and feedback is None:
        expected = expected.bfloat16().float()  # reduced like an exact sum, which travels too

    def reduce(fabric: Fabric) -> Any:
        sync = GradientSync(vector_of(fabric), codec=parse_codec(codec), error_feedback=feedback)
        sums = []
        for step in range(40):
            flats = cut_up(fabric, vectors[fabric.cluster])
            fabric.begin_step(step)
            sync.reduce(flats, seed=step)
            sync.settle(step != 1)  # a discarded step is as if it had not been
            sums.append(whole(flats))
        return sums

    results = together(fabrics(3), reduce)
    for sums in results:
        assert all(torch.equal(one, other) for one, other in zip(sums, results[0], strict=True))
    sums = results[0]
    torch.testing.assert_close(sums[0], expected, rtol=1e-6, atol=1e-6)
    if feedback is None:
        assert torch.equal(sums[2], sums[1])
        return
    assert torch.equal(sums[1], sums[2])
    counted = [total for step, total in enumerate(sums) if step != 1]
    mean = torch.stack(counted).mean(0)
    exact = torch.stack(vectors).sum(0)
    assert (mean - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("clusters", [2, 3, 4])
def test_bf16_costs_no_more_than_a_ring(clusters: int) -> None:
    """2 (C - 1) / C of the vector leaves a cluster, not C - 1; each contribution and each sum is rounded once."""
    vectors = [torch.randn(TOTAL) for _ in range(clusters)]
    rounded = torch.stack([vector.bfloat16().float() for vector in vectors]).sum(0)

    def reduce(fabric: Fabric) -> Any:
        sync = GradientSync(vector_of(fabric), codec=parse_codec("bf16"))
        flats = cut_up(fabric, vectors[fabric.cluster])
        fabric.begin_step(0)
        fabric.meter.drain()
        squared = sync.reduce(flats)
        sent = sum(traffic.sent for traffic in fabric.meter.drain().values())
        flats_nan = cut_up(fabric, vectors[0] * (torch.nan if fabric.cluster == 1 else 1.0))
        return whole(flats), squared, sent, sync.codec_loss, sync.reduce(flats_nan)

    results = together(fabrics(clusters), reduce)
    first = results[0][0]
    assert all(torch.equal(first, other) and math.isnan(poisoned) for other, *_, poisoned in results)
    torch.testing.assert_close(first, rounded, rtol=2**-8, atol=1e-6)
    assert sum(sent for *_, sent, _, _ in results) == 2 * (clusters - 1) * 2 * TOTAL
    assert all(0 < loss[0] < 1e-5 * loss[1] for *_, loss, _ in results)


def test_contributors_divide_sparse_sums() -> None:
    """Disjoint supports: over contributors, an element that one of two clusters sent counts as if both had."""
    spikes = torch.zeros(2, TOTAL)
    spikes[0, 3], spikes[1, 20] = 4.0, 6.0

    def reduce(fabric: Fabric) -> Any:
        found = []
        for divide_by in ("clusters", "contributors"):
            codec = parse_codec([{"topk": {"k": 1, "block": 64}}])
            sync = GradientSync(vector_of(fabric), codec=codec, divide_by=divide_by)
            flats = cut_up(fabric, spikes[fabric.cluster])
            fabric.begin_step(0)
            sync.reduce(flats)
            found.append(whole(flats)[[3, 20]].tolist())
        return found

    assert together(fabrics(2), reduce) == [[[4.0, 6.0], [8.0, 12.0]]] * 2


def test_poisoned_gradient_makes_the_norm_say_so() -> None:
    """The step's verdict sees it on every cluster, and error feedback stays as it was."""

    def reduce(fabric: Fabric) -> Any:
        sync = GradientSync(vector_of(fabric), codec=parse_codec("int8"), error_feedback=1.0)
        for step, value in enumerate((1.0, torch.nan)):
            flats = cut_up(fabric, torch.linspace(0, 1, TOTAL) * (value if fabric.cluster else 1.0))
            before = [values.clone() for *_, values in sync.state()]
            fabric.begin_step(step)
            squared = sync.reduce(flats)
            sync.settle(math.isfinite(squared))
        after = [values for *_, values in sync.state()]
        return squared, all(torch.equal(one, other) for one, other in zip(before, after, strict=True))

    for squared, same in together(fabrics(2), reduce):
        assert math.isnan(squared)
        assert same

"""Error and size on a Gaussian against figures from theory or the papers; rounding without bias."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe_fragment.codecs import parse_codec

SIZE = 2**20


@pytest.fixture(scope="module")
def gaussian() -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(0))


def relative_error(spec: Any, vector: torch.Tensor) -> float:
    codec = parse_codec(spec)
    return float((codec.decode(codec.encode(vector), len(vector)) - vector).norm() / vector.norm())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("bf16", 0.00166),
        ("fp8", 0.0257),
        ("fp4", 0.195),
        ("int8", 0.0065),
        ("int4", 0.118),
        ("int2", 0.768),
        ("sign", math.sqrt(1 - 2 / math.pi)),  # the mean magnitude as scale; the root mean square gives .636
        ({"sign": {"block": None}}, math.sqrt(1 - 2 / math.pi)),
    ],
    ids=str,
)
def test_relative_error_of_a_gaussian(gaussian: torch.Tensor, spec: Any, expected: float) -> None:
    assert relative_error(spec, gaussian) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("size", [100_000, SIZE])
def test_int4_with_one_scale_errs_by_its_step(gaussian: torch.Tensor, size: int) -> None:
    """step / sqrt(12): .186 where the largest of the vector is 4.5, as of 10^5 values; it grows with the vector."""
    vector = gaussian[:size]
    step = float(vector.abs().max()) / 7
    assert relative_error({"int4": {"block": None}}, vector) == pytest.approx(step / math.sqrt(12), rel=0.01)
    if size == 100_000:
        assert relative_error({"int4": {"block": None}}, 4.5 / 7 / step * vector) == pytest.approx(
            0.186, rel=0.05
        )


def test_stochastic_rounding_doubles_the_squared_error(gaussian: torch.Tensor) -> None:
    """Of a fraction f of a step: f (1 - f), on average 1/6, against 1/12."""
    ratio = relative_error({"int8": {"rounding": "stochastic"}}, gaussian) / relative_error("int8", gaussian)
    assert ratio == pytest.approx(math.sqrt(2), rel=0.01)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_stochastic_rounding_is_unbiased(width: int) -> None:
    """The mean over seeds is within 5 deviations of the value; nearest rounding is not."""
    vector = torch.randn(256, generator=torch.Generator().manual_seed(1))
    codec = parse_codec({f"int{width}": {"rounding": "stochastic"}})
    rounds = torch.stack([codec.decode(codec.encode(vector, seed=seed), 256) for seed in range(400)])
    step = vector.view(2, 128).abs().amax(1).repeat_interleave(128) / codec.values.levels
    off = (rounds.mean(0) - vector) / step
    assert off.abs().max() <= 5 * 0.5 / math.sqrt(400)
    assert abs(float(off.mean())) <= 5 * 0.5 / math.sqrt(400 * 256)


def test_sparseloco_ratio_and_error(gaussian: torch.Tensor) -> None:
    """4096 * 32 / (64 * (12 + 2)) = 146.3 without codebooks; two of four bins in use, .111 of what travels."""
    codec = parse_codec([{"topk": {"k": 64, "block": 4096}}, "sigma"])
    payload = codec.encode(gaussian)
    assert gaussian.nbytes / len(payload) == pytest.approx(4096 * 32 / (64 * 14), rel=0.02)
    assert codec.bits == pytest.approx(8 * len(payload) / SIZE)
    decoded = codec.decode(payload, SIZE)
    sent = decoded != 0
    assert int(sent.sum()) == SIZE // 64
    error = (decoded - gaussian)[sent].norm() / gaussian[sent].norm()
    assert float(error) == pytest.approx(0.111, rel=0.03)
    levels = decoded[:4096].unique()
    assert levels.numel() == 3, "two of the bins, and what did not travel"
    assert levels[[0, 2]].tolist() == pytest.approx([-2.745, 2.745], rel=0.02)


@pytest.mark.parametrize(
    "spec",
    ["fp32", "bf16", "fp8", "fp4", "int8", "int4", "int2", "sign", "sigma", "topk", ["topk", "int8"],
     [{"threshold": {"rms": 2.4}}, "sigma"]],
    ids=str,
)  # fmt: skip
def test_bits_are_those_of_a_large_vector(gaussian: torch.Tensor, spec: Any) -> None:
    codec = parse_codec(spec)
    tolerance = 1e-4 if codec.payload_bytes(SIZE) else 0.02  # of `threshold`, bits is an expectation
    assert 8 * len(codec.encode(gaussian)) / SIZE == pytest.approx(codec.bits, rel=tolerance)


@pytest.mark.parametrize("share", [1.5, 2.4, 3.0])
def test_threshold_density_of_a_gaussian(gaussian: torch.Tensor, share: float) -> None:
    codec = parse_codec({"threshold": {"rms": share}})
    kept = int((codec.decode(codec.encode(gaussian), SIZE) != 0).sum())
    assert codec.sparsifier is not None
    assert kept / SIZE == pytest.approx(codec.sparsifier.density, rel=0.05)


def test_sigma_means_are_those_of_the_bins(gaussian: torch.Tensor) -> None:
    """The quantiser against a plain loop over one block."""
    block = gaussian[:4096] + 0.3
    codec = parse_codec("sigma")
    decoded = codec.decode(codec.encode(block), 4096)
    step = 6 * block.std() / 4
    code = ((block - block.mean()) / step + 2).round().clamp(0, 3)
    for level in range(4):
        members = code == level
        assert torch.allclose(decoded[members], block[members].mean().expand(int(members.sum())), rtol=1e-5)

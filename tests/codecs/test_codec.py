"""What every codec promises, over shapes, dtypes and all stages; formats that are exact somewhere are so."""

from __future__ import annotations

import copy
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fragment.codecs import PoisonedError, parse_codec

FORMATS: list[Any] = [
    "fp32", "bf16", "fp16", {"fp8": {"block": 3}}, "fp8", "fp4", {"fp4": {"block": 7}}, "int8", "int4", "int2",
    {"int4": {"block": None, "rounding": "stochastic"}}, {"int2": {"block": 5}}, "sign", {"sign": {"block": 3}},
    "sigma", {"sigma": {"bits": 3, "block": 6}},
]  # fmt: skip
SPARSIFIERS: list[Any] = [
    None, {"topk": {"k": 2, "block": 5}}, {"topk": {"k": 8, "block": 8}}, "topk",
    {"threshold": {"rms": 1.1, "block": 6}}, {"threshold": {"absolute": 0.7}},
]  # fmt: skip
SPECS = [spec if first is None else [first, spec] for first in SPARSIFIERS for spec in FORMATS]
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = st.lists(st.integers(0, 7), max_size=4)


@st.composite
def vectors(draw: st.DrawFn) -> torch.Tensor:
    """0 to 4 dimensions, of any dtype, transposed, strided or expanded; some with ties, zeros or huge values."""
    shape = draw(SHAPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    tensor = torch.randn(shape, generator=generator) * draw(st.sampled_from([1.0, 1e-42, 1e-3, 3e4, 5e37]))
    kind = draw(st.sampled_from(["plain", "transposed", "strided", "expanded", "zeros", "equal"]))
    tensor = tensor.to(torch.float64) if kind == "plain" else tensor.to(draw(st.sampled_from(DTYPES)))
    tensor = tensor.nan_to_num()  # huge values are infinite in fp16
    if kind == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if kind == "strided" and tensor.dim():
        return tensor[..., ::2]
    if kind == "expanded":
        return tensor.unsqueeze(-1).expand(*shape, 3)
    return tensor.mul(0) if kind == "zeros" else torch.full_like(tensor, -1.5) if kind == "equal" else tensor


@settings(max_examples=400)
@given(vector=vectors(), spec=st.sampled_from(SPECS), weight=st.sampled_from([1.0, -0.5, 3.0]))
def test_every_codec_on_every_tensor(vector: torch.Tensor, spec: Any, weight: float) -> None:
    """torchft#203: shapes; bytes as promised; the same twice; add is decode and add; the input is left alone."""
    codec, size, before = parse_codec(spec), vector.numel(), vector.clone()
    flat = vector.reshape(-1).float()
    payload = codec.encode(vector, seed=5)
    assert torch.equal(vector, before)
    assert payload.dtype == torch.uint8
    assert payload.dim() == 1
    assert codec.payload_bytes(size) in (None, len(payload))
    assert torch.equal(payload, parse_codec(spec).encode(flat, seed=5))
    decoded = codec.decode(payload, size)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (size,)
    assert decoded.isfinite().all()
    if codec.lossless:
        assert torch.equal(decoded.view(torch.int32), flat.view(torch.int32))
    if "sigma" not in str(spec):  # which takes values for the mean of their bin
        assert (decoded.sign() * flat.sign() >= 0).all()
    total, counts = torch.linspace(-1, 1, size), torch.full((size,), 2.0)
    expected = total + weight * decoded
    codec.add(payload, total, weight=weight, counts=counts)
    assert torch.allclose(total, expected, rtol=1e-6, atol=1e-7)
    touched = counts != 2
    assert torch.equal(counts[touched], torch.full_like(counts[touched], 2 + weight))
    assert not decoded[~touched].any()
    assert codec.sparse or touched.all()


@given(vector=vectors(), spec=st.sampled_from(["fp32", "bf16", "fp16", "fp4", "sign", ["topk", "fp32"]]))
def test_a_second_time_changes_nothing(vector: torch.Tensor, spec: Any) -> None:
    """Formats that are closed under their own rounding."""
    codec = parse_codec(spec)
    once = codec.decode(codec.encode(vector), vector.numel())
    if spec == "sign":  # its mean is one of equal magnitudes, to rounding
        assert torch.allclose(codec.decode(codec.encode(once), len(once)), once, rtol=1e-6, atol=1e-40)
    else:
        assert torch.equal(codec.decode(codec.encode(once), len(once)), once)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_integers_on_the_grid_are_exact(width: int) -> None:
    """Idempotence of the integers, up to the rounding of the scale; half a step is the largest error elsewhere."""
    levels = 2 ** (width - 1) - 1
    codec = parse_codec({f"int{width}": {"block": 2 * levels + 1}})
    grid = 0.25 * torch.arange(-levels, levels + 1).float()
    assert torch.equal(codec.decode(codec.encode(grid), len(grid)), grid)
    values = torch.randn(1000)
    error = (codec.decode(codec.encode(values), 1000) - values).abs().split(2 * levels + 1)
    for error_W, values_W in zip(error, values.split(2 * levels + 1), strict=True):
        assert error_W.max() <= values_W.abs().max() / levels / 2 * (1 + 1e-5)


@given(vector=vectors(), form=st.sampled_from(FORMATS))
def test_all_of_a_block_is_the_value_format_alone(vector: torch.Tensor, form: Any) -> None:
    """k = block: nothing is lost but what the format loses."""
    alone, behind = parse_codec(form), parse_codec([{"topk": {"k": 4, "block": 4}}, form])
    size = vector.numel()
    assert torch.equal(behind.decode(behind.encode(vector), size), alone.decode(alone.encode(vector), size))


def test_topk_keeps_the_largest_of_each_block_and_the_same_share_of_a_short_one() -> None:
    """A last block of 5 of 10 with k = 3 keeps ceil(1.5)."""
    vector = torch.tensor([0, 9, 1, -8, 2, 3, 7, 4, 5, 6, 1, -2, 3, 0, 1], dtype=torch.float32)
    codec = parse_codec([{"topk": {"k": 3, "block": 10}}])
    decoded = codec.decode(codec.encode(vector), 15)
    assert decoded.nonzero().flatten().tolist() == [1, 3, 6, 11, 12]
    assert torch.equal(decoded[decoded != 0], vector[[1, 3, 6, 11, 12]])
    assert codec.payload_bytes(15) == 5 * 4 + (5 * 4 + 7) // 8


def test_threshold_keeps_what_reaches_the_bound_and_never_a_zero() -> None:
    vector = torch.tensor([0.5, -2, 1.9, 2, 0, 0, 0, 0, 0])
    codec = parse_codec([{"threshold": {"absolute": 2.0, "block": 4}}])
    assert codec.decode(codec.encode(vector), 9).tolist() == [0, -2, 0, 2, 0, 0, 0, 0, 0]
    relative = parse_codec([{"threshold": {"rms": 1.15, "block": 4}}])  # rms 1.71, so the bound is 1.96
    assert relative.decode(relative.encode(vector), 9).tolist() == [0, -2, 0, 2, 0, 0, 0, 0, 0]
    assert relative.payload_bytes(9) is None
    nothing = torch.zeros(8)
    assert len(relative.encode(nothing)) == 1, "two counts of 3 bits"


@pytest.mark.parametrize("spec", SPECS[::5], ids=str)
def test_the_largest_numbers_stay_finite(spec: Any) -> None:
    """Neither a sum, a square nor a rounded product overflows."""
    largest, codec = torch.finfo(torch.float32).max, parse_codec(spec)
    for vector in (torch.full((999,), largest), largest * torch.linspace(-1, 1, 500)):
        decoded = codec.decode(codec.encode(vector), len(vector))
        assert decoded.isfinite().all()
        assert decoded.any() or "rms" in str(spec)  # of equal values, none is above their root mean square


def test_an_empty_tensor_with_a_stride() -> None:
    """It counts as contiguous, but not as bytes."""
    assert len(parse_codec("fp32").encode(torch.empty(0)[::2])) == 0


def test_stochastic_rounding_stays_on_the_grid() -> None:
    """The largest value is a level, although noise just below 1 added to it rounds up to the next one."""
    codec, vector = parse_codec({"int8": {"rounding": "stochastic"}}), torch.full((2**20,), 127.0)
    assert torch.equal(codec.decode(codec.encode(vector), len(vector)), vector)


def test_sign_of_zero_is_plus() -> None:
    codec = parse_codec("sign")
    assert codec.decode(codec.encode(torch.tensor([0.0, -0.0, -3.0])), 3).tolist() == [1, 1, -1]


def test_fp4_goes_to_the_nearest_of_its_numbers() -> None:
    """Seven powers of two and zero, against a search of all."""
    vector = torch.cat([torch.randn(5000), torch.linspace(-0.1, 0.1, 999)])
    codec = parse_codec("fp4")
    powers = vector.abs().max() * torch.tensor([0.0, *(2.0**-power for power in range(7))])
    nearest = (vector.abs().unsqueeze(1) - powers).abs().amin(1)
    lost = (codec.decode(codec.encode(vector), len(vector)) - vector).abs()
    assert torch.allclose(lost, nearest, atol=1e-7)


def test_the_seed_matters_only_to_stochastic_rounding() -> None:
    vector = torch.randn(1000)
    for spec in ("int4", "sigma"):
        assert torch.equal(parse_codec(spec).encode(vector, seed=1), parse_codec(spec).encode(vector, seed=2))
    noisy = parse_codec({"int4": {"rounding": "stochastic"}})
    assert torch.equal(noisy.encode(vector, seed=1), noisy.encode(vector, seed=1))
    assert not torch.equal(noisy.encode(vector, seed=1), noisy.encode(vector, seed=2))


@pytest.mark.parametrize("spec", SPECS[::5], ids=str)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_poison_is_refused(spec: Any, poison: float) -> None:
    """And 1e300 is infinity in fp32; a refused vector leaves nothing behind."""
    codec, good = parse_codec(spec), torch.randn(50)
    before = codec.encode(good)
    bad = good.clone()
    bad[33] = poison
    for vector in (bad, bad.bfloat16(), torch.tensor(1e300, dtype=torch.float64)):
        with pytest.raises(PoisonedError, match="NaN or infinity"):
            codec.encode(vector)
    assert torch.equal(codec.encode(good), before)


def test_integers_are_not_gradients() -> None:
    with pytest.raises(ValueError, match=r"floating-point vectors, got torch.int64"):
        parse_codec("int8").encode(torch.arange(3))


@pytest.mark.parametrize("spec", SPECS[::3], ids=str)
def test_scratch_does_not_grow(spec: Any) -> None:
    """After the first round of the largest size, nothing is allocated; payloads are never scratch."""
    codec, vector, total = parse_codec(spec), torch.randn(999), torch.zeros(999)
    codec.add(codec.encode(vector), total)
    held = codec.scratch.held_bytes
    kept = codec.encode(vector)
    before = kept.clone()
    for size in (999, 500, 1, 0):
        codec.add(codec.encode(-vector[:size]), total[:size])
        assert codec.scratch.held_bytes == held
    assert torch.equal(kept, before)
    assert copy.deepcopy(codec).scratch.held_bytes == 0


def test_threads_share_no_scratch() -> None:
    codec = parse_codec("int4")
    seen: list[int] = []
    codec.encode(torch.randn(100))
    thread = threading.Thread(target=lambda: seen.append(codec.scratch.held_bytes))
    thread.start()
    thread.join()
    assert seen == [0]
    assert codec.scratch.held_bytes > 0


def test_gloo_sends_payloads_but_not_the_dtypes_inside() -> None:
    """pytorch#111131: why a payload of fp8 or int16 codes is uint8."""
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    for dtype in (torch.float8_e4m3fn, torch.int16):
        with pytest.raises(RuntimeError, match="Invalid scalar type"):
            gloo.broadcast([torch.zeros(4, dtype=dtype)], dist.BroadcastOptions()).wait()
    for spec in FORMATS:
        gloo.broadcast([parse_codec(spec).encode(torch.ones(4))], dist.BroadcastOptions()).wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec", SPECS[::3], ids=str)
def test_a_gpu_decodes_what_the_host_encoded_and_back(spec: Any) -> None:
    """Bytes of one device mean the same on another; on either the same vector gives the same bytes twice."""
    codec, vector = parse_codec(spec), torch.randn(5003)
    payload = codec.encode(vector.cuda())
    assert payload.is_cuda
    assert torch.equal(payload, codec.encode(vector.cuda()))
    decoded = codec.decode(payload, 5003)
    assert torch.allclose(codec.decode(payload.cpu(), 5003), decoded.cpu(), rtol=1e-6, atol=0)
    total = torch.zeros(5003, device="cuda")
    codec.add(payload.cpu(), total)
    assert torch.allclose(total, decoded, rtol=1e-6, atol=0)

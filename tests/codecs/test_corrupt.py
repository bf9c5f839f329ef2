"""A payload that no encoder wrote is refused in one sentence, and leaves the total alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fragment.codecs import Codec, parse_codec

SIZE = 100
SPECS: list[Any] = [
    "fp32", "bf16", "fp16", "fp8", "fp4", "int8", "int4", "int2", "sign", "sigma",
    [{"topk": {"k": 4, "block": 32}}, "sign"], [{"threshold": {"rms": 1.0, "block": 30}}, "int8"],
]  # fmt: skip


def refuses(codec: Codec, payload: torch.Tensor, match: str = "corrupt payload") -> None:
    total, counts = torch.ones(SIZE), torch.zeros(SIZE)
    with pytest.raises(ValueError, match=match):
        codec.add(payload, total, counts=counts)
    assert torch.equal(total, torch.ones(SIZE))
    assert not counts.any()
    with pytest.raises(ValueError, match=match):
        codec.decode(payload, SIZE)


@pytest.fixture(params=SPECS, ids=str)
def codec(request: pytest.FixtureRequest) -> Codec:
    return parse_codec(request.param)


def payload_of(codec: Codec) -> torch.Tensor:
    return codec.encode(torch.randn(SIZE, generator=torch.Generator().manual_seed(3)))


def test_another_length(codec: Codec) -> None:
    payload = payload_of(codec)
    refuses(codec, payload[:-1])
    refuses(codec, payload[:0])
    refuses(codec, torch.cat([payload, payload[:9]]))


def test_not_bytes(codec: Codec) -> None:
    payload = payload_of(codec)
    refuses(codec, payload.to(torch.int16), "a payload is a uint8 tensor of one dimension, got torch.int16")
    refuses(codec, payload.view(1, -1), "one dimension")


def test_whatever_the_bytes_the_total_stays_finite(codec: Codec) -> None:
    """Random bytes are refused or decode to numbers; never a crash, a write elsewhere or a poisoned total."""
    length, generator = len(payload_of(codec)), torch.Generator().manual_seed(4)
    for _ in range(60):
        payload = torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)
        total = torch.zeros(SIZE)
        try:
            codec.add(payload, total)
        except ValueError as error:
            assert "corrupt payload" in str(error)  # noqa: PT017 (either outcome is right)
            assert not total.any()
        assert total.isfinite().all()


@pytest.mark.parametrize("spec", ["fp32", "bf16", "fp16", "fp8", "fp4", "int8", "sign", "sigma"])
def test_nan_in_values_or_scales(spec: str) -> None:
    codec = parse_codec(spec)
    payload = payload_of(codec)
    payload[:4] = 0xFF
    refuses(codec, payload, "not all finite")


def test_codes_without_meaning() -> None:
    named = {
        "int8": "int8 code above 254",
        "int4": "int4 code above 14",
        "int2": "int2 code",
        "fp8": "fp8 code",
    }
    for spec, code in named.items():
        codec = parse_codec(spec)
        payload = payload_of(codec)
        payload[-1] = 0xFF
        refuses(codec, payload, code)


def test_indices_out_of_range_or_twice() -> None:
    """Four kept of each 25: 16 indices of 5 bits, at the end of the payload."""
    codec = parse_codec({"topk": {"k": 4, "block": 25}})
    payload = payload_of(codec)
    twice, beyond = [0, 0, 0, 0] * 4, [0, 1, 2, 31] + [20, 21, 22, 23] * 3
    for indices, match in ((twice, "do not ascend"), (beyond, "beyond its block of 25")):
        bad = payload.clone()
        number = sum(index << 5 * place for place, index in enumerate(indices))
        bad[-10:] = torch.tensor(list(number.to_bytes(10, "little")), dtype=torch.uint8)
        refuses(codec, bad, match)
    short = parse_codec({"topk": {"k": 32, "block": 32}})  # the last block has 4 values
    whole = short.encode(torch.randn(128))[: 4 * 100].clone()
    indices = [*range(32)] * 3 + [0, 1, 2, 4]
    number = sum(index << 5 * place for place, index in enumerate(indices))
    tail = torch.tensor(list(number.to_bytes(63, "little")), dtype=torch.uint8)
    refuses(short, torch.cat([whole, tail]), "beyond its block of 32 or the vector of 100 values")


def test_counts_that_promise_too_much() -> None:
    codec = parse_codec([{"threshold": {"absolute": 1e9, "block": 25}}, "fp32"])
    payload = payload_of(codec)
    assert payload.tolist() == [0, 0, 0], "four counts of 5 bits, nothing else"
    payload[0] = 9
    refuses(codec, payload, "it counts 9 values, more than its 3 bytes can place")


def test_totals_that_cannot_be_added_to() -> None:
    codec = parse_codec("int8")
    payload = payload_of(codec)
    with pytest.raises(ValueError, match=r"total: expected fp32 \[100\], got torch.bfloat16"):
        codec.add(payload, torch.zeros(100, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"counts: expected fp32 \[100\]"):
        codec.add(payload, torch.zeros(100), counts=torch.zeros(99))
    with pytest.raises(ValueError, match="expected 107 bytes for 103 values, got 104"):
        codec.add(payload, torch.zeros(103))


def test_a_payload_may_lie_at_any_address(codec: Codec) -> None:
    """Payloads of several vectors arrive in one buffer."""
    payload = payload_of(codec)
    buffer = torch.cat([payload[:3], payload, payload[:5]])
    assert torch.equal(codec.decode(buffer[3:-5], SIZE), codec.decode(payload, SIZE))

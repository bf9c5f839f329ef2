"""Packed integers come back, lie as documented, and the fast widths agree with the plain way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fragment.codecs.bits import code_dtype, pack, pack_groups, packed_bytes, unpack, unpack_groups
from moe_fragment.codecs.scratch import Scratch


@st.composite
def codes(draw: st.DrawFn) -> tuple[int, torch.Tensor]:
    bits = draw(st.integers(1, 16))
    numbers = draw(st.lists(st.integers(0, 2**bits - 1), max_size=40))
    return bits, torch.tensor(numbers, dtype=code_dtype(bits))


@settings(max_examples=150)
@given(codes())
def test_the_bits_lie_lowest_first_and_come_back(case: tuple[int, torch.Tensor]) -> None:
    """One large integer of Python is the reference."""
    bits, given_codes = case
    size = packed_bytes(len(given_codes), bits)
    number = sum(code << bits * place for place, code in enumerate(given_codes.tolist()))
    packed = torch.full((size,), 0xA5, dtype=torch.uint8)
    pack(given_codes.clone(), bits, packed)
    assert bytes(packed.tolist()) == number.to_bytes(size, "little")
    back = torch.empty_like(given_codes)
    unpack(packed, bits, back, Scratch())
    assert torch.equal(back, given_codes)


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("offset", [0, 3])
def test_wide_integers_agree_with_groups(bits: int, offset: int) -> None:
    """Also for codes at an odd address, which no wide integer can view."""
    size = 8 * 999
    memory = torch.randint(0, 2**bits, (offset + size,), dtype=torch.uint8)
    fast, plain = torch.empty(2, packed_bytes(size, bits), dtype=torch.uint8)
    pack_groups(memory[offset:], bits, plain)
    pack(memory.clone()[offset:], bits, fast)
    assert torch.equal(fast, plain)
    wide, narrow = torch.empty(2, offset + size, dtype=torch.uint8)
    unpack_groups(plain, bits, narrow[offset:])
    unpack(plain, bits, wide[offset:], Scratch())
    assert torch.equal(wide[offset:], narrow[offset:])
    assert torch.equal(wide[offset:], memory[offset:])

"""b-bit integers back to back, the first in the lowest bits of the first byte; zeros fill the last byte.

Widths 1, 2 and 4 treat several one-byte codes as one wide integer (little-endian, as all machines PyTorch runs on):
a multiplication gathers their bits in its highest byte. Every other width goes byte by byte of a group of codes that
ends on a byte boundary; `pack_groups` and `unpack_groups` are also the plain version of the former.
"""

from __future__ import annotations

import math

import torch

from moe_fragment.codecs.scratch import Scratch

_WIDE = {1: torch.int64, 2: torch.int32, 4: torch.int16}


def packed_bytes(size: int, bits: int) -> int:
    """Bytes of `size` packed integers."""
    return (size * bits + 7) // 8


def code_dtype(bits: int) -> torch.dtype:
    """The dtype codes of this width have outside the payload: uint8 up to 8 bits, int32 above."""
    return torch.uint8 if bits <= 8 else torch.int32


def pack(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Codes [n] below 2**bits, of `code_dtype(bits)` and contiguous, to `out` uint8 [packed_bytes(n, bits)].

    What `codes` holds afterwards is undefined: it serves as working memory.
    """
    assert 1 <= bits <= 16
    if bits == 8:
        out.copy_(codes)
        return
    per = 8 // math.gcd(bits, 8)
    whole, whole_bytes = len(codes) // per * per, len(codes) // per * per * bits // 8
    if whole < len(codes):
        rest = codes.new_zeros(per)
        rest[: len(codes) - whole] = codes[whole:]
        last = out.new_empty(per * bits // 8)
        pack_groups(rest, bits, last)
        out[whole_bytes:] = last[: len(out) - whole_bytes]
    if bits not in _WIDE or codes.storage_offset() % 8:
        pack_groups(codes[:whole], bits, out[:whole_bytes])
    elif whole:
        # Code j sits at bit 8 j; the product's highest byte has it at bit `bits * j`, and no two terms meet below.
        codes[:whole].view(_WIDE[bits]).mul_(sum(1 << (8 * (per - 1) - (8 - bits) * j) for j in range(per)))
        out[:whole_bytes].copy_(codes[:whole].view(whole_bytes, per)[:, -1])


def unpack(packed: torch.Tensor, bits: int, out: torch.Tensor, scratch: Scratch) -> None:
    """Inverse of `pack`: `packed` uint8 [packed_bytes(n, bits)] to `out` [n] of `code_dtype(bits)`, contiguous."""
    assert 1 <= bits <= 16
    if bits == 8:
        out.copy_(packed)
        return
    per = 8 // math.gcd(bits, 8)
    whole, whole_bytes = len(out) // per * per, len(out) // per * per * bits // 8
    if whole < len(out):
        last = packed.new_zeros(per * bits // 8)
        last[: len(packed) - whole_bytes] = packed[whole_bytes:]
        rest = out.new_empty(per)
        unpack_groups(last, bits, rest)
        out[whole:] = rest[: len(out) - whole]
    if bits not in _WIDE or out.storage_offset() % 8:
        unpack_groups(packed[:whole_bytes], bits, out[:whole])
    elif whole:
        wide = out[:whole].view(_WIDE[bits]).copy_(packed[:whole_bytes])
        moved = scratch.get("unpack", len(wide), wide.dtype, wide.device)
        lanes = per
        while lanes > 1:  # the upper half of each run of lanes moves up until every lane has a byte
            lanes //= 2
            torch.bitwise_left_shift(wide, (8 - bits) * lanes, out=moved)
            run = (1 << lanes * bits) - 1
            wide.bitwise_or_(moved).bitwise_and_(sum(run << 8 * lanes * j for j in range(per // lanes)))


def pack_groups(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """`pack` for whole groups of 8 / gcd(bits, 8) codes, any integer dtype; `codes` is left alone."""
    per = 8 // math.gcd(bits, 8)
    lanes, columns = codes.view(-1, per).to(torch.int32), out.view(-1, per * bits // 8)
    for byte in range(columns.shape[1]):
        value = torch.zeros_like(lanes[:, 0])
        for lane in range(8 * byte // bits, (8 * byte + 7) // bits + 1):
            value |= _shifted(lanes[:, lane], lane * bits - 8 * byte)
        columns[:, byte] = value & 0xFF


def unpack_groups(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Inverse of `pack_groups`."""
    per = 8 // math.gcd(bits, 8)
    columns, lanes = packed.view(-1, per * bits // 8).to(torch.int32), out.view(-1, per)
    for lane in range(per):
        value = torch.zeros_like(columns[:, 0])
        for byte in range(lane * bits // 8, (lane * bits + bits - 1) // 8 + 1):
            value |= _shifted(columns[:, byte], 8 * byte - lane * bits)
        lanes[:, lane] = value & (1 << bits) - 1


def _shifted(values: torch.Tensor, left: int) -> torch.Tensor:
    return values << left if left >= 0 else values >> -left

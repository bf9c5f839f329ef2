"""`fp4`: E3M0, a sign and three exponent bits, as Streaming DiLoCo sends its fragments.

The seven powers of two below the largest magnitude, which is the scale, and zero, which the eighth exponent stands
for. A value goes to the nearest of them.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from moe_fragment.codecs.bits import pack, unpack
from moe_fragment.codecs.blocks import (
    SCALE_BYTES,
    absmax,
    block_count,
    by_block,
    inverse,
    look_up,
    read_floats,
    write_floats,
)
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.codecs.stage import BlockScaled, stage
from moe_fragment.schema import Count

_EXPONENT_SHIFT, _EXPONENT_BIAS = 23, 127
_HALF_MANTISSA = 1 << _EXPONENT_SHIFT - 1
_MAGNITUDES = [0.0, *(2.0**-power for power in range(6, -1, -1))]


@stage("fp4")
class Fp4(BlockScaled):
    """Half a byte a value: relative error .195 on a Gaussian, whatever the block, over 7 binary orders."""

    width: ClassVar[int] = 4
    block: Count | None = None
    """Values that share a scale; null: the whole vector."""

    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: Scratch, seed: int) -> None:
        """Code: 8 for a negative value, plus 7 for the scale itself, 6 for half of it, ... 0 for zero."""
        size, device = len(values), values.device
        scaled = scratch.get("scaled", size, torch.float32, device)
        scales = values.new_empty(block_count(size, self.block), 1)
        for scale_B1, values_BW, scaled_BW in by_block(self.block, scales, values, scaled):
            scale_B1.copy_(absmax(values_BW))
            torch.mul(values_BW, inverse(scale_B1), out=scaled_BW)
        pattern = scaled.view(torch.int32)
        sign = torch.bitwise_right_shift(pattern, 28, out=scratch.get("sign", size, torch.int32, device))
        sign.bitwise_and_(8)
        pattern.bitwise_and_(0x7FFFFFFF)
        # Exponents round at 1.5, half-way between powers of two; half the smallest and more is not zero either.
        smallest = _EXPONENT_BIAS - 6
        floor = torch.bitwise_right_shift(
            pattern, _EXPONENT_SHIFT, out=scratch.get("floor", size, torch.int32, device)
        )
        floor.sub_(smallest - 2).clamp_(0, 1)
        code = (
            pattern.add_(_HALF_MANTISSA).bitwise_right_shift_(_EXPONENT_SHIFT).sub_(smallest - 1).clamp_(0, 7)
        )
        torch.maximum(code, floor, out=code)
        codes = scratch.get("codes", size, torch.uint8, device).copy_(code.bitwise_or_(sign))
        split = scales.numel() * SCALE_BYTES
        write_floats(scales.view(-1), out[:split])
        pack(codes, 4, out[split:])

    def decode(self, payload: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """Power of two times scale."""
        split = block_count(len(out), self.block) * SCALE_BYTES
        scales = read_floats(payload[:split], "scales").view(-1, 1)
        codes = scratch.get("codes", len(out), torch.uint8, out.device)
        unpack(payload[split:], 4, codes, scratch)
        numbers = torch.tensor([*_MAGNITUDES, *(-number for number in _MAGNITUDES)], device=out.device)
        look_up(numbers, codes, out, scratch)
        for scale_B1, out_BW in by_block(self.block, scales, out):
            out_BW.mul_(scale_B1)

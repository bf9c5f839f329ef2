"""`int8`, `int4` and `int2`: a symmetric grid over each block, its step an fp32 scale.

The 2**(b-1) - 1 levels on each side of zero end at the block's largest magnitude, so zero and the largest value are
exact. `stochastic` rounding is unbiased: a value goes up with the probability of its distance from the level below.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch

from moe_fragment.codecs.bits import pack, unpack
from moe_fragment.codecs.blocks import (
    SCALE_BYTES,
    absmax,
    block_count,
    by_block,
    inverse,
    read_floats,
    step_for,
    write_floats,
)
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.codecs.stage import BlockScaled, stage


class _Integer(BlockScaled):
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """Stochastic is unbiased, at twice the squared error."""

    @property
    def levels(self) -> int:
        """On each side of zero."""
        return 2 ** (self.width - 1) - 1

    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: Scratch, seed: int) -> None:
        """Codes are level + `levels`, so from 0 to 2 `levels`."""
        size, device, levels = len(values), values.device, self.levels
        scaled = scratch.get("scaled", size, torch.float32, device)
        codes = scratch.get("codes", size, torch.uint8, device)
        scales = values.new_empty(block_count(size, self.block), 1)
        for scale_B1, values_BW, scaled_BW in by_block(self.block, scales, values, scaled):
            scale_B1.copy_(step_for(absmax(values_BW), levels))
            torch.mul(values_BW, inverse(scale_B1), out=scaled_BW)
        if self.rounding == "nearest":
            scaled.round_().add_(levels)
        else:
            noise = scratch.get("noise", size, torch.float32, device)
            noise.uniform_(generator=torch.Generator(device).manual_seed(seed))
            # Up to here a level may be off by a rounding error, and the noise may round up to 1.
            scaled.add_(noise).floor_().add_(levels).clamp_(0, 2 * levels)
        codes.copy_(scaled)
        split = scales.numel() * SCALE_BYTES
        write_floats(scales.view(-1), out[:split])
        pack(codes, self.width, out[split:])

    def decode(self, payload: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """Level times scale."""
        split = block_count(len(out), self.block) * SCALE_BYTES
        scales = read_floats(payload[:split], "scales").view(-1, 1)
        codes = scratch.get("codes", len(out), torch.uint8, out.device)
        unpack(payload[split:], self.width, codes, scratch)
        if len(codes) and codes.amax() > 2 * self.levels:
            raise ValueError(f"corrupt payload: an int{self.width} code above {2 * self.levels}")
        out.copy_(codes).sub_(self.levels)
        for scale_B1, out_BW in by_block(self.block, scales, out):
            out_BW.mul_(scale_B1)


@stage("int8")
class Int8(_Integer):
    """127 levels on each side: relative error .0065 on a Gaussian."""

    width: ClassVar[int] = 8


@stage("int4")
class Int4(_Integer):
    """7 levels on each side: relative error .118 on a Gaussian."""

    width: ClassVar[int] = 4


@stage("int2")
class Int2(_Integer):
    """Only -1, 0 and 1: relative error .77 on a Gaussian, ruinous without error feedback."""

    width: ClassVar[int] = 2

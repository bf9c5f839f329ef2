"""`fp8`: E4M3, with an fp32 scale per block that takes the largest magnitude to 448, the largest number of E4M3."""

from __future__ import annotations

from typing import ClassVar

import torch

from moe_fragment.codecs.blocks import (
    SCALE_BYTES,
    absmax,
    block_count,
    by_block,
    inverse,
    look_up,
    read_floats,
    refuse_poison,
    step_for,
    write_floats,
)
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.codecs.stage import BlockScaled, stage

_DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(_DTYPE).max


@stage("fp8")
class Fp8(BlockScaled):
    """4 significant bits over 18 binary orders: relative error .026 on a Gaussian, whatever the block."""

    width: ClassVar[int] = 8

    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: Scratch, seed: int) -> None:
        """Rounds to nearest even."""
        scaled = scratch.get("scaled", len(values), torch.float32, values.device)
        scales = values.new_empty(block_count(len(values), self.block), 1)
        for scale_B1, values_BW, scaled_BW in by_block(self.block, scales, values, scaled):
            scale_B1.copy_(step_for(absmax(values_BW), _LARGEST))
            torch.mul(values_BW, inverse(scale_B1), out=scaled_BW)
        split = scales.numel() * SCALE_BYTES
        write_floats(scales.view(-1), out[:split])
        out[split:].view(_DTYPE).copy_(scaled)

    def decode(self, payload: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """Number times scale."""
        split = block_count(len(out), self.block) * SCALE_BYTES
        scales = read_floats(payload[:split], "scales").view(-1, 1)
        numbers = torch.arange(256, dtype=torch.uint8, device=out.device).view(_DTYPE).float()
        look_up(numbers, payload[split:], out, scratch)  # ten times as fast as the conversion on a CPU
        refuse_poison(out, "corrupt payload: an fp8 code that is no number")
        for scale_B1, out_BW in by_block(self.block, scales, out):
            out_BW.mul_(scale_B1)

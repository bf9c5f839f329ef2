"""`sign`: one bit a value, times the mean magnitude of its block; the sign of zero is +1.

The mean is the scale with the least squared error: sqrt(1 - 2 / pi) = .603 of a Gaussian, where the root mean square
of 1-bit Adam leaves .636. Either needs error feedback.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from moe_fragment.codecs.bits import pack, unpack
from moe_fragment.codecs.blocks import SCALE_BYTES, block_count, by_block, read_floats, write_floats
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.codecs.stage import BlockScaled, stage
from moe_fragment.schema import Count


@stage("sign")
class Sign(BlockScaled):
    """One bit a value."""

    width: ClassVar[int] = 1
    block: Count | None = 4096
    """Values that share a scale; null: the whole vector."""

    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: Scratch, seed: int) -> None:
        """1 for plus."""
        size, device = len(values), values.device
        magnitude = scratch.get("scaled", size, torch.float32, device)
        scales = values.new_empty(block_count(size, self.block))
        for scale_B, values_BW, magnitude_BW in by_block(self.block, scales, values, magnitude):
            torch.abs(values_BW, out=magnitude_BW)
            # Divided first: the sum of a block could overflow.
            torch.sum(magnitude_BW.mul_(1 / magnitude_BW.shape[1]), 1, out=scale_B)
        codes = scratch.get("codes", size, torch.uint8, device)
        torch.ge(values, 0, out=codes.view(torch.bool))
        split = scales.numel() * SCALE_BYTES
        write_floats(scales, out[:split])
        pack(codes, 1, out[split:])

    def decode(self, payload: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """Sign times scale."""
        split = block_count(len(out), self.block) * SCALE_BYTES
        scales = read_floats(payload[:split], "scales").view(-1, 1)
        codes = scratch.get("codes", len(out), torch.uint8, out.device)
        unpack(payload[split:], 1, codes, scratch)
        out.copy_(codes).mul_(2).sub_(1)
        for scale_B1, out_BW in by_block(self.block, scales, out):
            out_BW.mul_(scale_B1)

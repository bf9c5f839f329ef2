"""`sigma`: SparseLoCo's quantiser, bins around the mean of a block and `range` standard deviations wide altogether.

A receiver takes a bin for the mean of its members, and these means travel: an fp32 codebook of 2**bits per block, 0.2 %
of the payload at 2 bits and 4096 values. Mean and deviation do not travel. Of the top k of a Gaussian, which has no
values near its mean, only two of the four bins have members (relative error .111).
"""

from __future__ import annotations

import torch
from pydantic import Field

from moe_fragment.codecs.bits import pack, packed_bytes, unpack
from moe_fragment.codecs.blocks import (
    SCALE_BYTES,
    absmax,
    block_count,
    by_block,
    inverse,
    read_floats,
    write_floats,
)
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.codecs.stage import ValueFormat, stage
from moe_fragment.schema import Count


@stage("sigma")
class Sigma(ValueFormat):
    """Code: clamp(round((x - mean) / step + 2**(bits - 1)), 0, 2**bits - 1) with step = range * deviation / 2**bits."""

    width: int = Field(default=2, alias="bits", strict=True, ge=1, le=8)
    """Bits of a code, 1 to 8."""
    span: float = Field(default=6.0, alias="range", gt=0, allow_inf_nan=False)
    """Standard deviations that the bins cover."""
    block: Count | None = 4096
    """Values that share a codebook, after the sparsifier; null: the whole vector."""

    @property
    def value_bits(self) -> int:
        """The option `bits`."""
        return self.width

    @property
    def bits(self) -> float:
        """Plus a codebook per block."""
        return self.width + (8 * SCALE_BYTES * self._bins / self.block if self.block else 0)

    def payload_bytes(self, size: int) -> int:
        """Codebooks, then codes."""
        return self._codebook_bytes(size) + packed_bytes(size, self.width)

    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: Scratch, seed: int) -> None:
        """A bin without members has mean zero."""
        size, device = len(values), values.device
        scaled = scratch.get("scaled", size, torch.float32, device)
        work = scratch.get("members", size, torch.float32, device)
        books = values.new_zeros(block_count(size, self.block), self._bins)
        for book_BL, values_BW, scaled_BW, work_BW in by_block(self.block, books, values, scaled, work):
            self._codes(values_BW, scaled_BW, work_BW)
            for level in range(self._bins):
                torch.eq(scaled_BW, level, out=work_BW)
                # Divided first: the sum of a bin could overflow.
                work_BW.div_(work_BW.sum(1, keepdim=True).clamp_(min=1)).mul_(values_BW)
                torch.sum(work_BW, 1, out=book_BL[:, level])
        codes = scratch.get("codes", size, torch.uint8, device).copy_(scaled)
        split = self._codebook_bytes(size)
        write_floats(books.view(-1), out[:split])
        pack(codes, self.width, out[split:])

    def decode(self, payload: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """Mean of the bin."""
        split = self._codebook_bytes(len(out))
        books = read_floats(payload[:split], "codebooks")
        codes = scratch.get("codes", len(out), torch.uint8, out.device)
        unpack(payload[split:], self.width, codes, scratch)
        index = scratch.get("look_up", len(out), torch.int32, out.device).copy_(codes)
        first = torch.arange(0, len(books), self._bins, dtype=torch.int32, device=out.device).view(-1, 1)
        for first_B1, index_BW in by_block(self.block, first, index):
            index_BW.add_(first_B1)
        torch.index_select(books, 0, index, out=out)

    def _codes(self, values_BW: torch.Tensor, out_BW: torch.Tensor, work_BW: torch.Tensor) -> None:
        """As fp32. In units of the block's largest magnitude, in which no square overflows."""
        width = values_BW.shape[1]
        torch.mul(values_BW, inverse(absmax(values_BW)), out=out_BW)
        out_BW.sub_(out_BW.mean(1, keepdim=True))
        torch.mul(out_BW, out_BW, out=work_BW)
        deviation_B1 = work_BW.sum(1, keepdim=True).div_(max(width - 1, 1)).sqrt_()
        out_BW.mul_(inverse(deviation_B1.mul_(self.span / self._bins)))
        out_BW.add_(self._bins // 2).round_().clamp_(0, self._bins - 1)

    @property
    def _bins(self) -> int:
        return 1 << self.width

    def _codebook_bytes(self, size: int) -> int:
        return block_count(size, self.block) * self._bins * SCALE_BYTES

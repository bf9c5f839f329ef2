"""`threshold`: every value whose magnitude reaches a bound, so how many travel depends on the data.

On the wire: an index inside its block for each value, then how many values each block has.
"""

from __future__ import annotations

import math

import torch
from pydantic import Field, model_validator

from moe_fragment.codecs.bits import code_dtype, pack, packed_bytes, unpack
from moe_fragment.codecs.blocks import absmax, block_count, by_block, inverse
from moe_fragment.codecs.coordinates import checked
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.codecs.stage import Sparsifier, stage
from moe_fragment.schema import FieldError

_SMALLEST = torch.finfo(torch.float32).tiny
"""Least bound, so that zeros never travel."""


@stage("threshold")
class Threshold(Sparsifier):
    """Keeps |x| >= `rms` times the root mean square of its block, or |x| >= `absolute`: exactly one of the two."""

    rms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Bound in units of the block's root mean square; of a Gaussian, 2.4 keeps one value in 61."""
    absolute: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Bound as a number; nothing may travel at all."""
    block: int = Field(default=4096, strict=True, ge=2, le=32768)
    """Values of a block."""

    @model_validator(mode="after")
    def _one_bound(self) -> Threshold:
        if (self.rms is None) == (self.absolute is None):
            raise FieldError(
                "rms", "expected either rms or absolute, got " + ("both" if self.rms else "neither")
            )
        return self

    @property
    def density(self) -> float:
        """What a Gaussian would send; for `absolute`, everything."""
        return 1.0 if self.rms is None else math.erfc(self.rms / math.sqrt(2))

    @property
    def index_bits(self) -> float:
        """ceil(log2(block)) for each value, and one count per block."""
        return self.density * self._index_width + self._count_width / self.block

    def kept(self, size: int) -> None:
        """The data decide."""

    def index_bytes(self, size: int) -> None:
        """The data decide."""

    def select(self, vector: torch.Tensor, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Coordinates, then indices and counts as they travel."""
        size, device = len(vector), vector.device
        magnitude = scratch.get("magnitude", size, torch.float32, device)
        work = scratch.get("square", size, torch.float32, device)
        chosen = scratch.get("chosen", size, torch.bool, device)
        counts = torch.zeros(block_count(size, self.block), 1, dtype=torch.int32, device=device)
        for count_B1, vector_BW, magnitude_BW, work_BW, chosen_BW in by_block(
            self.block, counts, vector, magnitude, work, chosen
        ):
            torch.abs(vector_BW, out=magnitude_BW)
            torch.ge(magnitude_BW, self._bound(magnitude_BW, work_BW), out=chosen_BW)
            torch.sum(chosen_BW, 1, keepdim=True, dtype=torch.int32, out=count_B1)
        coordinates = chosen.nonzero().view(-1)
        indices_bytes = packed_bytes(len(coordinates), self._index_width)
        packed = torch.empty(
            indices_bytes + packed_bytes(len(counts), self._count_width), dtype=torch.uint8, device=device
        )
        for codes, width, out in (
            (coordinates % self.block, self._index_width, packed[:indices_bytes]),
            (counts.view(-1), self._count_width, packed[indices_bytes:]),
        ):
            pack(codes.to(code_dtype(width)), width, out)
        return coordinates, packed

    def locate(self, payload: torch.Tensor, size: int, scratch: Scratch) -> tuple[torch.Tensor, int]:
        """Counts from as many bytes as `size` implies, indices from as many as the counts do."""
        device, blocks = payload.device, block_count(size, self.block)
        counts_bytes = packed_bytes(blocks, self._count_width)
        if len(payload) < counts_bytes:
            raise ValueError(
                f"corrupt payload: expected {counts_bytes} bytes of counts, got {len(payload)} in all"
            )
        counts = torch.empty(blocks, dtype=code_dtype(self._count_width), device=device)
        unpack(payload[len(payload) - counts_bytes :], self._count_width, counts, scratch)
        block_of = torch.repeat_interleave(torch.arange(blocks, device=device), counts.to(torch.int64))
        taken = counts_bytes + packed_bytes(len(block_of), self._index_width)
        if len(payload) < taken:
            raise ValueError(
                f"corrupt payload: it counts {len(block_of)} values, more than its {len(payload)} bytes can place"
            )
        inside = torch.empty(len(block_of), dtype=code_dtype(self._index_width), device=device)
        unpack(
            payload[len(payload) - taken : len(payload) - counts_bytes], self._index_width, inside, scratch
        )
        return checked(inside, block_of, self.block, size), taken

    def _bound(self, magnitude_BW: torch.Tensor, work_BW: torch.Tensor) -> torch.Tensor | float:
        if self.rms is None:
            assert self.absolute is not None
            return self.absolute
        largest_B1 = absmax(magnitude_BW)  # in units of it, no square overflows
        torch.mul(magnitude_BW, inverse(largest_B1), out=work_BW)
        return (
            work_BW.square_()
            .mean(1, keepdim=True)
            .sqrt_()
            .mul_(self.rms)
            .mul_(largest_B1)
            .clamp_(min=_SMALLEST)
        )

    @property
    def _index_width(self) -> int:
        return (self.block - 1).bit_length()

    @property
    def _count_width(self) -> int:
        return self.block.bit_length()

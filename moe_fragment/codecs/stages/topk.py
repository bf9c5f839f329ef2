"""`topk`: the k values of largest magnitude of every block, as SparseLoCo sends them."""

from __future__ import annotations

import torch
from pydantic import Field, model_validator

from moe_fragment.codecs.bits import code_dtype, pack, packed_bytes, unpack
from moe_fragment.codecs.blocks import by_block
from moe_fragment.codecs.coordinates import checked
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.codecs.stage import Sparsifier, stage
from moe_fragment.schema import Count, FieldError


@stage("topk")
class TopK(Sparsifier):
    """k of `block`; a short last block of n values keeps ceil(k n / block), the same density.

    An index inside its block takes ceil(log2(block)) bits; those of a block ascend.
    """

    k: Count = 64
    """Values kept of a block."""
    block: int = Field(default=4096, strict=True, ge=2, le=65536)
    """Values of a block."""

    @model_validator(mode="after")
    def _k_in_block(self) -> TopK:
        if self.k > self.block:
            raise FieldError("k", f"expected at most the block of {self.block}, got {self.k}")
        return self

    @property
    def density(self) -> float:
        """k / block."""
        return self.k / self.block

    @property
    def index_bits(self) -> float:
        """ceil(log2(block)) for each value kept."""
        return self.density * self._index_width

    def kept(self, size: int) -> int:
        """k of each whole block, as many in proportion of a short last one."""
        return size // self.block * self.k + self._kept_of_rest(size)

    def index_bytes(self, size: int) -> int:
        """One index for each value kept."""
        return packed_bytes(self.kept(size), self._index_width)

    def select(self, vector: torch.Tensor, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Equal magnitudes: which one is kept depends on the device."""
        size, device = len(vector), vector.device
        magnitude = scratch.get("magnitude", size, torch.float32, device)
        torch.abs(vector, out=magnitude)
        starts = torch.arange(0, size, self.block, device=device).view(-1, 1)
        coordinates = [
            magnitude_BW.topk(self._kept_of(magnitude_BW.shape[1]), sorted=False).indices.sort(1).values
            + starts_B1
            for starts_B1, magnitude_BW in by_block(self.block, starts, magnitude)
        ]
        chosen = torch.cat([part.view(-1) for part in coordinates]) if coordinates else starts.view(-1)
        packed = torch.empty(self.index_bytes(size), dtype=torch.uint8, device=device)
        pack((chosen % self.block).to(code_dtype(self._index_width)), self._index_width, packed)
        return chosen, packed

    def locate(self, payload: torch.Tensor, size: int, scratch: Scratch) -> tuple[torch.Tensor, int]:
        """From as many bytes as `size` implies."""
        kept, taken = self.kept(size), self.index_bytes(size)
        if len(payload) < taken:
            raise ValueError(
                f"corrupt payload: expected {taken} bytes of indices, got {len(payload)} bytes in all"
            )
        inside = torch.empty(kept, dtype=code_dtype(self._index_width), device=payload.device)
        unpack(payload[len(payload) - taken :], self._index_width, inside, scratch)
        block_of = torch.arange(kept, device=payload.device) // self.k
        return checked(inside, block_of, self.block, size), taken

    @property
    def _index_width(self) -> int:
        return (self.block - 1).bit_length()

    def _kept_of(self, width: int) -> int:
        return -(-self.k * width // self.block)

    def _kept_of_rest(self, size: int) -> int:
        return self._kept_of(size % self.block)

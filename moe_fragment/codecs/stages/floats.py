"""Floating-point values as they are: `fp32` bit for bit, `bf16` and `fp16` rounded to nearest even."""

from __future__ import annotations

from typing import ClassVar

import torch

from moe_fragment.codecs.blocks import refuse_poison
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.codecs.stage import ValueFormat, stage


class _Float(ValueFormat):
    dtype: ClassVar[torch.dtype]

    @property
    def value_bits(self) -> int:
        """Bits of the dtype."""
        return 8 * self.dtype.itemsize

    def payload_bytes(self, size: int) -> int:
        """Bytes of the dtype."""
        return size * self.dtype.itemsize

    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: Scratch, seed: int) -> None:
        """Saturates at the largest finite number of the dtype."""
        size, device = len(values), values.device
        limit = torch.finfo(self.dtype).max
        clamped = scratch.get("floats", size, torch.float32, device)
        torch.clamp(values, -limit, limit, out=clamped)
        out.copy_(scratch.get("halves", size, self.dtype, device).copy_(clamped).view(torch.uint8))

    def decode(self, payload: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """Exact."""
        narrow = scratch.get("halves", len(out), self.dtype, out.device)
        narrow.view(torch.uint8).copy_(payload)
        out.copy_(narrow)
        refuse_poison(out, "corrupt payload: its values are not all finite")


@stage("fp32")
class Fp32(_Float):
    """Four bytes a value, lossless."""

    dtype: ClassVar[torch.dtype] = torch.float32
    lossless: ClassVar[bool] = True

    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: Scratch, seed: int) -> None:
        """The bytes."""
        out.copy_(values.view(torch.uint8))

    def decode(self, payload: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """The bytes."""
        out.view(torch.uint8).copy_(payload)
        refuse_poison(out, "corrupt payload: its values are not all finite")


@stage("bf16")
class Bf16(_Float):
    """Two bytes a value, 8 significant bits over the range of fp32."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    cast: ClassVar[torch.dtype | None] = torch.bfloat16


@stage("fp16")
class Fp16(_Float):
    """Two bytes a value, 11 significant bits between 6e-5 and 65504; smaller values lose precision, larger saturate."""

    dtype: ClassVar[torch.dtype] = torch.float16

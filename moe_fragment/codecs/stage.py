"""What a stage of a codec is, and where stages register: adding one is one file in `moe_fragment/codecs/stages/`.

A stage is its options: a `Section` whose fields a recipe may set, with the methods that encode and decode. Stages have
no state; working memory comes from the codec's `Scratch`. All vectors here are fp32, contiguous, finite and [n].
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Callable
from types import ModuleType
from typing import ClassVar, TypeVar

import torch

from moe_fragment.codecs.bits import packed_bytes
from moe_fragment.codecs.blocks import SCALE_BYTES, block_count
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.schema import Count, Section


class ValueFormat(Section):
    """How the values look: the only stage of a dense codec, the last of a sparse one."""

    lossless: ClassVar[bool] = False
    """Whether decoding gives back every bit."""
    cast: ClassVar[torch.dtype | None] = None
    """A dtype with the range of fp32 that values are rounded to, if that is all there is to it."""

    @property
    @abstractmethod
    def value_bits(self) -> int:
        """Bits of one code."""

    @property
    def bits(self) -> float:
        """Bits per value with its share of the scales, for a large vector."""
        return float(self.value_bits)

    @abstractmethod
    def payload_bytes(self, size: int) -> int:
        """Bytes of `size` values on the wire."""

    @abstractmethod
    def encode(self, values: torch.Tensor, out: torch.Tensor, scratch: Scratch, seed: int) -> None:
        """`values` [n], left alone, to `out` uint8 [payload_bytes(n)]."""

    @abstractmethod
    def decode(self, payload: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
        """`payload` uint8 [payload_bytes(n)], at any address, to `out` [n]; ValueError if no encoder wrote it."""


class BlockScaled(ValueFormat):
    """A format of `width` bits a value, with an fp32 scale for every `block` values before the codes."""

    width: ClassVar[int]
    block: Count | None = 128
    """Values that share a scale; null: the whole vector."""

    @property
    def value_bits(self) -> int:
        """Of a code."""
        return self.width

    @property
    def bits(self) -> float:
        """Plus a scale per block."""
        return self.width + (8 * SCALE_BYTES / self.block if self.block else 0)

    def payload_bytes(self, size: int) -> int:
        """Scales, then codes."""
        return block_count(size, self.block) * SCALE_BYTES + packed_bytes(size, self.width)


class Sparsifier(Section):
    """Which values travel, and how a receiver learns where they belong."""

    @property
    @abstractmethod
    def density(self) -> float:
        """Fraction of a large vector that travels."""

    @property
    @abstractmethod
    def index_bits(self) -> float:
        """Bits per element of a large vector that place those that travel."""

    @abstractmethod
    def kept(self, size: int) -> int | None:
        """How many of `size` values travel; None where the data decide."""

    @abstractmethod
    def index_bytes(self, size: int) -> int | None:
        """Bytes that place them; None where the data decide."""

    @abstractmethod
    def select(self, vector: torch.Tensor, scratch: Scratch) -> tuple[torch.Tensor, torch.Tensor]:
        """Ascending coordinates int64 [m] of what travels, and as they travel, uint8."""

    @abstractmethod
    def locate(self, payload: torch.Tensor, size: int, scratch: Scratch) -> tuple[torch.Tensor, int]:
        """Coordinates int64 [m] from the end of a payload, and how many bytes there they took.

        Raises:
            ValueError: too short, or no encoder wrote it for a vector of `size`.
        """


Stage = ValueFormat | Sparsifier
STAGES: dict[str, type[Stage]] = {}
"""By the name that recipes use."""

_S = TypeVar("_S", ValueFormat, Sparsifier)


def stage(name: str) -> Callable[[type[_S]], type[_S]]:
    """Class decorator: recipes know the stage by this name."""

    def register(cls: type[_S]) -> type[_S]:
        known = STAGES.setdefault(name, cls)
        if known is not cls:
            raise ValueError(f"codec stage '{name}' is {known.__module__}.{known.__qualname__} already")
        return cls

    return register


def discover(package: ModuleType) -> None:
    """Imports every module of `package`, so that its stages register."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")

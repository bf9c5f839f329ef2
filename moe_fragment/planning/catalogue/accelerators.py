"""Accelerators: what they compute, hold, move and cost, and what they cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from moe_fragment.planning.catalogue.rows import read_rows
from moe_fragment.planning.quantities import NonNegative, Positive
from moe_fragment.schema import FieldError, Rate, Section, Size

Dtype = Literal["bf16", "fp16"]


class Accelerator(Section):
    """One kind of device that a process drives. Rates are dense: no 2:4 sparsity."""

    vendor: str
    """Who makes it."""
    bf16_dense_tflops: Positive | None = None
    """Data sheet rate with fp32 accumulation, TFLOP/s."""
    bf16_measured_tflops: Positive | None = None
    """Best matmul rate anyone measured, TFLOP/s."""
    fp16_dense_tflops: Positive | None = None
    """Data sheet rate, TFLOP/s; default that of bf16, as on all hardware that has both."""
    fp16_measured_tflops: Positive | None = None
    """Best matmul rate anyone measured, TFLOP/s; default that of bf16."""
    lacks: tuple[Dtype, ...] = ()
    """Number formats without native arithmetic; a plan that asks for one is refused."""
    memory: Size
    """Bytes, written ``80 GB``."""
    memory_bandwidth: Rate | None = None
    """Bytes per second between chip and memory."""
    node_all_to_all: Rate | None = None
    """Bytes per second each device sends when all of a node talk, one direction."""
    node_peer_to_peer: Rate | None = None
    """Bytes per second between two devices of a node, one direction."""
    node_link: str | None = None
    """What joins the devices of a node."""
    usd_per_hour: Annotated[list[NonNegative], Field(min_length=2, max_length=2)] | None = None
    """Lowest and highest listed price on demand, USD per device and hour."""
    usd_per_hour_spot: NonNegative | None = None
    """Lowest listed price that may be reclaimed, USD per device and hour; may be above on demand."""
    source: str = Field(min_length=1)
    """Where the figures are from."""
    as_of: str = Field(pattern=r"^\d{4}-\d{2}(-\d{2})?$")
    """When they were collected, ``2026-11`` or ``2026-11-30``."""
    note: str = ""
    """A trap in the figures."""

    @model_validator(mode="after")
    def _check(self) -> Accelerator:
        for dtype in ("bf16", "fp16"):
            for kind in ("dense", "measured"):
                if dtype in self.lacks and getattr(self, f"{dtype}_{kind}_tflops") is not None:
                    raise FieldError(
                        f"{dtype}_{kind}_tflops", f"expected nothing, because {dtype} is in lacks"
                    )
        if self.bf16_dense_tflops is None and self.fp16_dense_tflops is None:
            raise FieldError("bf16_dense_tflops", "required, or fp16_dense_tflops for a device without bf16")
        if self.bf16_dense_tflops is None and "bf16" not in self.lacks:
            raise FieldError("lacks", "expected bf16 in it when bf16_dense_tflops is not given")
        if self.usd_per_hour is not None and self.usd_per_hour[0] > self.usd_per_hour[1]:
            raise FieldError("usd_per_hour", "expected the lowest price before the highest")
        return self

    def dense_flops(self, dtype: Dtype) -> float:
        """Data sheet FLOP/s in ``dtype``.

        Raises:
            ValueError: the hardware has no such arithmetic.
        """
        if dtype in self.lacks:
            raise ValueError(f"this accelerator has no {dtype} arithmetic")
        tflops = (
            self.bf16_dense_tflops if dtype == "bf16" else self.fp16_dense_tflops or self.bf16_dense_tflops
        )
        assert tflops is not None
        return tflops * 1e12


def accelerators(own: str | Path | None = None) -> dict[str, Accelerator]:
    """The catalogue by name, with the rows of a person's own file added (they win).

    Args:
        own: YAML file with one field, ``accelerators``.

    Raises:
        ConfigError: a file or row that cannot be used; names file, row and field.
    """
    return read_rows(Accelerator, "accelerators", own)

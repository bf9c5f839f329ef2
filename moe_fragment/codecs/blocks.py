"""What the value formats share: blocks of a vector, their scales on the wire, codes looked up in a table.

A vector [n] with blocks of `block` elements is a matrix [n // block, block] and, if n is no multiple, one short row:
everything is vectorised over rows and no element is copied to pad the last one.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_fragment.codecs.scratch import Scratch

_LARGEST = torch.finfo(torch.float32).max
SCALE_BYTES = 4
"""A scale travels as fp32."""


def block_count(size: int, block: int | None) -> int:
    """Blocks of a vector of `size` elements; `None` is one block for the vector."""
    return min(size, 1) if block is None else -(-size // block)


def by_block(
    block: int | None, per_block: torch.Tensor, *vectors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Twice at most: the whole blocks, then the short last one.

    Args:
        block: elements of a block; `None` is one block for the vector.
        per_block: [block_count, ...], such as the scales.
        vectors: contiguous, [n] each.

    Yields:
        per_block's rows [b, ...] and for each vector its view [b, w].
    """
    size = len(vectors[0])
    width = max(size, 1) if block is None else block
    full = size // width
    if full:
        yield per_block[:full], *(vector[: full * width].view(full, width) for vector in vectors)
    if size % width:
        yield per_block[full:], *(vector[full * width :].view(1, -1) for vector in vectors)


def absmax(rows: torch.Tensor) -> torch.Tensor:
    """Largest magnitude of each row: [b, w] to [b, 1]."""
    return torch.maximum(rows.amax(1, keepdim=True), rows.amin(1, keepdim=True).neg_())


def inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, and 0 where that is no number: a block so small that it counts as zero."""
    return scale.reciprocal().nan_to_num_(nan=0.0, posinf=0.0)


def step_for(largest: torch.Tensor, levels: float) -> torch.Tensor:
    """The scale with which `levels` stands for `largest`, or for a hair less where their product would overflow."""
    return (largest / levels).clamp_(max=_LARGEST / levels * (1 - 2**-22))


def write_floats(values: torch.Tensor, out: torch.Tensor) -> None:
    """fp32 [m] to uint8 [4 m], at any address."""
    out.copy_(values.clamp(-_LARGEST, _LARGEST).view(torch.uint8))


def read_floats(payload: torch.Tensor, what: str) -> torch.Tensor:
    """uint8 [4 m] at any address to fp32 [m].

    Raises:
        ValueError: NaN or infinity, which no encoder writes.
    """
    values = torch.empty(len(payload) // SCALE_BYTES, dtype=torch.float32, device=payload.device)
    values.view(torch.uint8).copy_(payload)
    refuse_poison(values, f"corrupt payload: its {what} are not all finite")
    return values


def refuse_poison(values: torch.Tensor, message: str, error: type[ValueError] = ValueError) -> None:
    """Raises `error` if `values`, fp32 of any shape, hold NaN or infinity."""
    if values.numel() and not torch.stack(values.aminmax()).isfinite().all():  # one pass, no mask
        raise error(message)


def look_up(table: torch.Tensor, codes: torch.Tensor, out: torch.Tensor, scratch: Scratch) -> None:
    """out[i] = table[codes[i]]; `codes` uint8 [n], `out` fp32 [n]."""
    index = scratch.get("look_up", len(codes), torch.int32, codes.device).copy_(codes)
    torch.index_select(table, 0, index, out=out)

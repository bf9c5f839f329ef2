"""Rows of several columns as one byte matrix: what dispatch and combine put on the wire.

A dispatched row is one token for one cluster: its hidden vector, the K expert ids it chose (negative where the expert
lives elsewhere) and the K routing weights, back to back without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowLayout:
    """Columns of a row: (width, dtype) each."""

    columns: tuple[tuple[int, torch.dtype], ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return sum(width * dtype.itemsize for width, dtype in self.columns)

    def join(self, *tensors: torch.Tensor) -> torch.Tensor:
        """One tensor [n, width] per column to uint8 [n, row_bytes], where they are."""
        parts = [
            tensor.detach()
            .to(dtype)
            .contiguous()
            .view(-1)  # an empty tensor counts as contiguous whatever its stride, but not as bytes
            .view(torch.uint8)
            .view(-1, width * dtype.itemsize)
            for tensor, (width, dtype) in zip(tensors, self.columns, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def pack(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The same in host memory, pinned when they come from a GPU."""
        rows = self.join(*tensors)
        if rows.device.type == "cpu":
            return rows
        host = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=rows.device.type == "cuda")
        return host.copy_(rows)

    def unpack(self, rows: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Inverse of `join` and `pack`, on `device`, which the rows reach in one copy."""
        rows = rows.to(device)
        tensors, start = [], 0
        for width, dtype in self.columns:
            size = width * dtype.itemsize
            column = rows[:, start : start + size].clone(memory_format=torch.contiguous_format)
            tensors.append(column.view(-1).view(dtype).view(-1, width))
            start += size
        return tuple(tensors)

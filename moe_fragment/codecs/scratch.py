"""Working memory of a codec: allocated at the first call, used again at every later one."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Scratch(threading.local):
    """Buffers by name, dtype and device, each as large as its largest use; every thread has its own."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}

    def get(self, name: str, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised contiguous [size], the same memory at every call with this name."""
        key = (name, dtype, device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=device)
        return buffer[:size]

    @property
    def held_bytes(self) -> int:
        """What this thread's buffers take."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return Scratch, ()  # a copy starts empty

"""Activation checkpointing of decoder layers that routes no token twice.

A choice made again from other roundings (another kernel, another order of atomics) would send a token's rows elsewhere
than its forward did, whatever model's router makes it. So the indices of every `topk` in a layer are kept, and replayed
when the layer is run again; its values, which have a gradient, are computed anew.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_CHOICE = torch.ops.aten.topk.default


class _Record(TorchDispatchMode):
    """Keeps the indices of each choice in `kept`."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _CHOICE:
            self._kept.append(result[1])
        return result


class _Replay(TorchDispatchMode):
    """Chooses what was chosen before."""

    def __init__(self, kept: list[torch.Tensor]) -> None:
        super().__init__()
        self._kept = kept
        self._at = 0

    def __enter__(self) -> Any:
        self._at = 0
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not _CHOICE:
            return func(*args, **(kwargs or {}))
        indices = self._kept[self._at]
        self._at += 1
        values, dimension = args[0], args[2] if len(args) > 2 else -1
        return values.gather(dimension, indices), indices


def _contexts() -> tuple[_Record, _Replay]:
    kept: list[torch.Tensor] = []
    return _Record(kept), _Replay(kept)


def recompute_layers(model: Any) -> None:
    """Run each decoder layer again in backward instead of keeping its activations; routing is replayed.

    Args:
        model: a transformers model that supports activation checkpointing.
    """
    # Without reentrance, which would run a nested backward.
    model.activation_checkpointing_enable({"use_reentrant": False, "context_fn": _contexts})

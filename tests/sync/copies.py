"""Trunk copies without a model: named parameters in one flat buffer per cluster, on a fleet of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_fragment.codecs import parse_codec
from moe_fragment.fabric import Fabric
from moe_fragment.fabric.wire import Frame, kind_name
from moe_fragment.sync import CanonicalVector, Guard, OuterSGD, ParameterSync, RailVector, Rounds, Run
from moe_fragment.sync.fragments import split

SIZES = {"embed": 7, "layers.0.w": 11, "layers.1.w": 5, "layers.2.w": 8, "norm": 1}


class Copy:
    """One cluster's copy, stored in reverse name order; `train` moves it."""

    def __init__(self, sizes: dict[str, int], values: torch.Tensor | float = 1.0) -> None:
        self.sizes = sizes
        self.flat = torch.ones(sum(sizes.values())) * values
        self.positions: dict[str, int] = {}
        at = 0
        for name in sorted(sizes, reverse=True):
            self.positions[name] = at
            at += sizes[name]
        self.published = 0

    def masters(self) -> list[torch.Tensor]:
        """As a ZeRO optimizer gives them."""
        return [self.flat]

    def publish(self) -> None:
        """Counts."""
        self.published += 1

    def vector(self, fabric: Fabric, names: dict[str, int]) -> RailVector:
        """Of these parameters."""
        canonical = CanonicalVector(names)
        runs = [Run(canonical.starts[name], size, 0, self.positions[name]) for name, size in names.items()]
        return RailVector(fabric, canonical, runs)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.flat[self.positions[name] : self.positions[name] + self.sizes[name]]


def synced(
    fabric: Fabric,
    copy: Copy,
    rounds: Rounds,
    *,
    fragments: int = 1,
    codec: Any = None,
    error_feedback: float | None = None,
    guard: Guard | None = None,
    among: tuple[int, ...] | None = None,
) -> ParameterSync:
    """A parameter sync of a copy."""
    inside = among is None or fabric.cluster in among
    parts: list[dict[str, int]] = split(copy.sizes, fragments) if inside else [{}] * fragments
    return ParameterSync(
        [copy.vector(fabric, part) for part in parts],
        rounds,
        masters=copy.masters,
        publish=copy.publish,
        codec=parse_codec(codec) if codec is not None else None,
        error_feedback=error_feedback,
        guard=guard,
        among=among,
    )


AVERAGE = OuterSGD(1.0, 0.0)
Act = Callable[[Fabric], Any]


def swallow_trunk(message: torch.Tensor) -> torch.Tensor | None:
    """A link that loses what belongs to the trunk."""
    return None if kind_name(Frame.decode(message).kind) == "trunk" else message


def stored(sync: ParameterSync) -> dict[str, torch.Tensor]:
    """State by kind, the pieces in a row."""
    found: dict[str, list[torch.Tensor]] = {}
    for kind, _, _, values in sync.state():
        found.setdefault(kind, []).append(values.clone())
    return {kind: torch.cat(pieces) for kind, pieces in found.items()}


def read_piece(
    pieces: dict[tuple[str, str], torch.Tensor], kind: str, name: str, offset: int, size: int
) -> torch.Tensor:
    """A `Reader` of whole parameters."""
    return pieces[kind, name][offset : offset + size]

"""What a parameter strategy keeps: when it syncs, a fragment's global copy, and a sync between its two meetings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from moe_fragment.codecs import ErrorFeedback
from moe_fragment.fabric import Transfer
from moe_fragment.sync.merge import DivideBy
from moe_fragment.sync.outer import OuterSGD
from moe_fragment.sync.state import (
    FEEDBACK,
    IN_FLIGHT,
    LOST,
    OUTER,
    VELOCITY,
    Piece,
    Reader,
    pieces_of,
    read_interval,
)
from moe_fragment.sync.vector import RailVector


@dataclass(frozen=True)
class Rounds:
    """When a parameter strategy syncs what, and how it merges.

    Attributes:
        every: H, steps between two syncs of the same fragment.
        overlap: steps (tau) between capture and merge; smaller than H / fragments.
        mix: weight (alpha) of the own weights in the merge; 0 takes the global copy, 1 keeps the own.
        outer: moves the global copy.
        butterfly: exact means by recursive doubling.
        weights: `tokens` weighs clusters by the tokens they trained on since the last sync, `equal` does not.
        divide_by: what a sparse mean is over.
        check_every: compare the global copies of all clusters at every n-th merge of a fragment; 0 never.
    """

    every: int
    outer: OuterSGD
    overlap: int = 0
    mix: float = 0.0
    butterfly: bool = False
    weights: str = "tokens"
    divide_by: DivideBy = "clusters"
    check_every: int = 10


class Fragment:
    """A part of the trunk that is synced at once; tensors are this gateway's interval, empty on other ranks."""

    def __init__(self, vector: RailVector, masters: Sequence[torch.Tensor], decay: float | None) -> None:
        self.vector = vector
        self.outer = vector.collect(masters)
        self.velocity: torch.Tensor | None = None
        self.feedback = ErrorFeedback(vector.size, decay, torch.device("cpu")) if decay is not None else None
        self.tokens = 0.0
        self.owed_since = 0
        """Step at which it was due and has not been captured since; 0 if it is not owed."""
        self.not_before = 0
        """Step at which a failed sync may be tried again."""
        self.merges = 0
        self.ended = False
        """Whether it has had the last sync of the run."""

    def state(self, flying: InFlight | None) -> Iterator[Piece]:
        """What a checkpoint must hold of this gateway, with a sync of it that is under way."""
        yield from pieces_of(self.vector, OUTER, self.outer)
        if self.velocity is not None:
            yield from pieces_of(self.vector, VELOCITY, self.velocity)
        if self.feedback is not None:
            yield from pieces_of(self.vector, FEEDBACK, self.feedback.state)
        if flying is not None and flying.mean is not None:
            yield from pieces_of(self.vector, IN_FLIGHT, flying.mean)
        if flying is not None and self.feedback is not None and self.feedback.pending is not None:
            yield from pieces_of(self.vector, LOST, self.feedback.pending)

    def schedule(self) -> dict[str, Any]:
        """What decides when it is synced; the same on all clusters."""
        names = ("owed_since", "not_before", "merges", "ended")
        return {name: getattr(self, name) for name in names}

    def restore(
        self,
        read: Reader,
        schedule: Mapping[str, Any],
        own: Mapping[str, Any],
        flying: InFlight | None,
        *,
        owes: bool,
    ) -> None:
        """Inverse of `state` and `schedule`.

        Args:
            read: of a checkpoint.
            schedule: as stored.
            own: `tokens`, and whether it has `moved`, so that there is a velocity.
            flying: the sync of it that was under way; its mean is read.
            owes: whether this cluster contributed to that, so that the codec lost something.
        """
        for name, value in schedule.items():
            setattr(self, name, value)
        self.tokens = own["tokens"]
        self.outer = read_interval(self.vector, OUTER, read)
        self.velocity = read_interval(self.vector, VELOCITY, read) if own["moved"] else None
        if flying is not None:
            flying.mean = read_interval(self.vector, IN_FLIGHT, read)
        if self.feedback is not None:
            self.feedback.load(read_interval(self.vector, FEEDBACK, read))
            if owes:
                self.feedback.pending = read_interval(self.vector, LOST, read)


@dataclass
class InFlight:
    """A sync between its two meetings; the same on all ranks of a cluster but for transfer and mean."""

    fragment: int
    captured: int
    due: int
    tokens: float
    weights: dict[int, float]
    squares: list[float]
    outer_square: float
    poisoned: list[int]
    """Clusters whose contribution was refused."""
    last: bool
    """Whether it is the fragment's last sync: merged without mixing."""
    partial: bool
    """Whether its round was cut short by the end of the run: averaged, without an outer step."""
    lost: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Squared norms over this cluster: what the codec lost, was given, and sent."""
    transfer: Transfer[Any] | None = None
    mean: torch.Tensor | None = None

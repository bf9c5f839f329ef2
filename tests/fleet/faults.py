"""Steps that go wrong on purpose, and what the fleet makes of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tests.fleet.harness import Rank
from tests.fleet.training import Scenario, canonical, cluster_bias, digest, start


@dataclass(frozen=True)
class Drop:
    """The connections of one gateway close just before exchange `index` (from 0) of the step."""

    index: int
    cluster: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Poison:
    """One rank's logits become NaN."""

    cluster: int = 0
    rank: int = 0


@dataclass(frozen=True)
class Silence:
    """No token of the fleet bears a loss."""


Event = Drop | Poison | Silence
Script = tuple[tuple[int, Event | None], ...]
"""Data step and what happens in it, in order."""


@dataclass
class Trail:
    """What every attempt of a run came to: outcomes, reasons, losses; and hashes of all state after it."""

    outcomes: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    """Of the exchanges of the last attempt, on a gateway."""

    def committed(self) -> list[tuple[float, str]]:
        """Loss and state of the committed steps."""
        from moe_fragment.fabric import OK

        rows = zip(self.outcomes, self.losses, self.states, strict=True)
        return [(loss, state) for outcome, loss, state in rows if outcome == OK]


def run_script(rank: Rank, scenario: Scenario, script: Script) -> Trail:
    """Case: run the script's steps; a failed one is tried again without its event, as a run would."""
    from moe_fragment.fabric import FAILED

    stepper = start(rank, scenario)
    trail = Trail()
    for step, event in script:
        for happens in (event, None):
            batches = scenario.batches(step, scenario.reader(rank.place))
            if isinstance(happens, Silence):
                batches = [replace(batch, labels=torch.full_like(batch.labels, -100)) for batch in batches]
            with dropped(rank, happens, trail), _poisoned(rank, stepper.engine.module, happens):
                report = stepper.step(rank.next_step(), batches, learning_rate=scenario.learning_rate)
            trail.outcomes.append(report.outcome)
            trail.reasons.append(report.reason)
            trail.losses.append(report.loss)
            trail.states.append(_state_digest(rank, stepper))
            if report.outcome != FAILED:
                break
    stepper.engine.destroy()
    return trail


def _state_digest(rank: Rank, stepper: Any) -> str:
    """Hash of this cluster's weights, Adam moments and router biases."""
    shards = stepper.shards
    state = canonical(rank, stepper, shards.masters())
    for moment in ("exp_avg", "exp_avg_sq"):
        flats = [
            shards.moments(index).get(moment, torch.zeros_like(master))
            for index, master in enumerate(shards.masters())
        ]
        state.update({f"{name} {moment}": piece for name, piece in canonical(rank, stepper, flats).items()})
    bias = cluster_bias(rank, stepper)
    return digest(state | ({"bias": bias} if bias is not None else {}))


@contextmanager
def dropped(rank: Rank, event: Event | None, trail: Trail) -> Iterator[None]:
    rail = rank.fabric._rail
    if rail is None:
        yield
        return
    original = rail.exchange
    here = isinstance(event, Drop) and (event.cluster, event.rank) == (rank.place.cluster, rank.place.rank)
    trail.kinds.clear()

    def watched(kind: str, *arguments: Any, **options: Any) -> Any:
        if here and isinstance(event, Drop) and len(trail.kinds) == event.index:
            rail.drop()
        trail.kinds.append(kind)
        return original(kind, *arguments, **options)

    rail.exchange = watched  # type: ignore[method-assign]
    try:
        yield
    finally:
        rail.exchange = original  # type: ignore[method-assign]


@contextmanager
def _poisoned(rank: Rank, model: Any, event: Event | None) -> Iterator[None]:
    if not isinstance(event, Poison) or (event.cluster, event.rank) != (rank.place.cluster, rank.place.rank):
        yield
        return
    hook = model.lm_head.register_forward_hook(lambda _module, _inputs, output: output * float("nan"))
    try:
        yield
    finally:
        hook.remove()

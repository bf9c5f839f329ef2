"""How the clusters of a fleet talk to each other, as a recipe writes it."""

from __future__ import annotations

from itertools import pairwise

from pydantic import Field, model_validator

from moe_fragment.schema import Duration, FieldError, Section, Size
from moe_fragment.units import format_duration


class FabricConfig(Section):
    """The `fabric` section of a recipe.

    Durations are written with their unit (`60 s`) and kept in seconds.
    """

    emulate: bool = False
    """Hold every cross-cluster message back for as long as the topology's links would take (in process)."""

    seed: int = 0
    """Seed of the emulated jitter, so that two runs see the same delays per message."""

    join_timeout_s: Duration = Field(default=600.0, alias="join_timeout")
    """Longest wait for all clusters to appear at the start; long, because queues start clusters apart."""

    quorum_timeout_s: Duration = Field(default=120.0, alias="quorum_timeout")
    """Longest wait for the other clusters at the beginning of a step (the slowest cluster's step time)."""

    exchange_timeout_s: Duration = Field(default=60.0, alias="exchange_timeout")
    """Longest wait for one cross-cluster message before the step counts as failed."""

    heartbeat_timeout_s: Duration = Field(default=5.0, alias="heartbeat_timeout")
    """A cluster whose heartbeat is older than this leaves the membership."""

    eager_bytes: Size = Field(default=16 * 2**20, alias="eager_size", ge=4096, le=2**30)
    """Messages up to this size are received into buffers posted beforehand and take one trip; larger ones are announced
    first and take a round trip more. Two such buffers per peer cluster and gateway. Default 16 MiB."""

    max_retries: int = Field(default=3, ge=0)
    """How often in a row a failed step is tried again before the run stops with its last checkpoint."""

    @model_validator(mode="after")
    def _chain(self) -> FabricConfig:
        chain = ("heartbeat_timeout", "exchange_timeout", "quorum_timeout", "join_timeout")
        for shorter, longer in pairwise(chain):
            low, high = getattr(self, f"{shorter}_s"), getattr(self, f"{longer}_s")
            if low >= high:
                raise FieldError(
                    shorter,
                    f"expected time-outs that grow along heartbeat < exchange < quorum < join, "
                    f"got {shorter} {format_duration(low)} and {longer} {format_duration(high)}",
                )
        return self

"""One direction of the path between two clusters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pydantic import model_validator

from moe_fragment.schema import FieldError, Section


class Link(Section):
    """What ``source`` can send to ``target``. The way back is a link of its own."""

    source: str
    """Name of the sending cluster."""
    target: str
    """Name of the receiving cluster."""
    bandwidth_bytes_per_s: float
    """Shared by all that travels this way at the same time; ``inf`` for a link that is never the limit."""
    one_way_s: float
    """Delay of the first byte, one way; half the round trip that ping shows, if both ways are alike."""
    jitter_s: float = 0.0
    """How far the delay of single packets strays from ``one_way_s``."""
    loss: float = 0.0
    """Fraction of the packets that are lost, 0 to 1 (1 excluded)."""

    @model_validator(mode="after")
    def _check(self) -> Link:
        if self.source == self.target:
            raise FieldError("target", f"expected two different clusters, got '{self.source}' twice")
        if not self.bandwidth_bytes_per_s > 0:
            raise FieldError("bandwidth", "expected a rate above zero")
        if not 0 <= self.one_way_s < math.inf:
            raise FieldError("one_way", "expected a finite duration of zero or more")
        if not 0 <= self.jitter_s < math.inf:
            raise FieldError("jitter", "expected a finite duration of zero or more")
        if not 0 <= self.loss < 1:
            raise FieldError("loss", "expected at least 0 % and less than 100 %")
        return self


def check_pairs(names: Sequence[str], pairs: Iterable[tuple[str, str, str]]) -> None:
    """Every ordered pair of clusters has exactly one link.

    Args:
        names: the clusters.
        pairs: (field to blame, source, target) of every link.
    """
    given: dict[tuple[str, str], str] = {}
    for field, source, target in pairs:
        for name in (source, target):
            if name not in names:
                raise FieldError(field, f"unknown cluster '{name}', expected one of {', '.join(names)}")
        if (source, target) in given:
            earlier = given[source, target]
            raise FieldError(field, f"the link from '{source}' to '{target}' was given before, in {earlier}")
        given[source, target] = field
    for source in names:
        for target in names:
            if source != target and (source, target) not in given:
                raise FieldError(
                    "links", f"no link from '{source}' to '{target}', every pair needs one each way"
                )

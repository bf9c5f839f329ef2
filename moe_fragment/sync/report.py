"""What a sync did."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from moe_fragment.sync.guard import Judgement


@dataclass(frozen=True)
class SyncReport:
    """One sync of one fragment; the same on every rank of the fleet.

    Attributes:
        step: fleet step after which it ended.
        fragment: which one.
        outcome: `merged`; `failed` and tried again; `refused` by the guard; `empty`, as nobody had anything to merge.
        distance: between trunk copies before the merge, see `Divergence`.
        cosine: mean cosine between clusters' pseudo-gradients.
        codec_error: relative L2 error of what was sent against what was to be sent, over all clusters; None without a
            codec.
        experts: whether it is of replicated experts, not of the trunk.
        poisoned: clusters whose contribution was not finite and was refused.
        reason: a sentence for people; empty if there is nothing to say.
    """

    step: int
    fragment: int
    outcome: Literal["merged", "failed", "refused", "empty"]
    distance: float = 0.0
    cosine: float = 0.0
    codec_error: float | None = None
    experts: bool = False
    poisoned: list[int] = field(default_factory=list)
    reason: str = ""

    def judged(self, judgement: Judgement) -> SyncReport:
        """With what the guard said."""
        outcome = "refused" if judgement.refuses else self.outcome
        return replace(self, outcome=outcome, reason=judgement.reason)

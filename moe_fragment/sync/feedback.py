"""What a codec lost in a round, and when error feedback learns of it."""

from __future__ import annotations

import torch

from moe_fragment.codecs import Codec, ErrorFeedback


def loss_of(
    codec: Codec, payload: torch.Tensor, delta: torch.Tensor, feedback: ErrorFeedback | None
) -> tuple[float, float, float]:
    """Squared L2 norms of what `codec` lost, was given (with what it owed from before), and sent."""
    sent = codec.decode(payload, delta.numel())
    lost = delta - sent if feedback is None or feedback.pending is None else feedback.pending
    lost_square, given_square, sent_square = (
        float(part.double().square().sum()) for part in (lost, lost + sent, sent)
    )
    return lost_square, given_square, sent_square


def settle(feedback: ErrorFeedback | None, merged: bool) -> None:
    """End a round: what was lost is owed from now on if the round was merged, and forgotten if it was not.

    A cluster that contributed nothing to the round owes what it owed before.
    """
    if feedback is None:
        return
    if merged and feedback.pending is not None:
        feedback.commit()
    else:
        feedback.discard()

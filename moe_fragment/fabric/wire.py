"""What a cross-cluster message looks like: a fixed frame, then whole rows of bytes.

The frame says which exchange of which step this is, so that two clusters that fell out of step are told so by name
instead of adding each other's gradients up, and when an emulated link lets the message through.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FRAME_BYTES = 48
_MAGIC = 0x6D6F652D66726167  # "moe-frag"


@dataclass(frozen=True)
class Frame:
    """Header of one message: `sequence` counts the exchanges of a step, `kind` says what travels, `size` how much."""

    step: int
    sequence: int
    kind: int
    size: int = 0
    """Bytes that follow the frame."""
    deliver_at_s: float = 0.0
    """Monotonic time before which an emulated link does not let the message through."""

    def encode(self) -> torch.Tensor:
        """uint8 [FRAME_BYTES]."""
        head = torch.tensor([_MAGIC, self.step, self.sequence, self.kind, self.size], dtype=torch.int64)
        stamp = torch.tensor([self.deliver_at_s], dtype=torch.float64)
        return torch.cat([head.view(torch.uint8), stamp.view(torch.uint8)])

    @staticmethod
    def decode(data: torch.Tensor) -> Frame:
        """From uint8 [FRAME_BYTES or more]; raises ValueError when it is not a frame of ours."""
        head = data[:40].clone().view(torch.int64).tolist()
        if head[0] != _MAGIC:
            raise ValueError("the message does not start with a moe_fragment frame")
        return Frame(
            head[1], head[2], head[3], head[4], float(data[40:FRAME_BYTES].clone().view(torch.float64))
        )

    def agrees(self, other: Frame) -> bool:
        """Whether both frames belong to the same exchange of the same step."""
        return (self.step, self.sequence, self.kind) == (other.step, other.sequence, other.kind)


KINDS = ("dispatch", "combine", "trunk", "verdict", "heal")


def kind_name(kind: int) -> str:
    """Name of a frame's kind for messages to people."""
    return KINDS[kind] if 0 <= kind < len(KINDS) else f"unknown kind {kind}"

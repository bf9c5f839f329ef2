"""Error feedback: what a lossy codec left out of this contribution is added to the next one.

The residual e follows e <- (decay e + delta) - sent, so that with decay 1 everything arrives in the end (1-bit Adam,
DeMo, SparseLoCo). It belongs to this rank and to checkpoints, and changes only when a round has gone through.
"""

from __future__ import annotations

import torch

from moe_fragment.codecs.blocks import refuse_poison
from moe_fragment.codecs.codec import Codec


class ErrorFeedback:
    """The residual of one vector, fp32 [n], and the one it becomes if the round that is under way goes through."""

    def __init__(self, size: int, decay: float, device: torch.device | str = "cpu") -> None:
        """
        Args:
            size: elements of the vector.
            decay: what is left of the residual after a round, 0 to 1; SparseLoCo has 0.95.
            device: of the deltas.
        """
        if not 0 <= decay <= 1:
            raise ValueError(f"decay: expected 0 to 1, got {decay}")
        self.decay = decay
        self._residual = torch.zeros(size, dtype=torch.float32, device=device)
        self._next = torch.empty_like(self._residual)
        self._pending = False

    @property
    def state(self) -> torch.Tensor:
        """The residual fp32 [n] as of the last commit, for a checkpoint; later rounds overwrite it."""
        return self._residual

    @torch.no_grad()
    def load(self, state: torch.Tensor) -> None:
        """Sets the residual from [n], any floating dtype; a round under way is forgotten.

        Raises:
            ValueError: another size, or NaN or infinity.
        """
        self.pending = state  # checked as a whole before the residual changes
        self.commit()

    @property
    def pending(self) -> torch.Tensor | None:
        """What the residual becomes if the round under way goes through, fp32 [n]; None between rounds."""
        return self._next if self._pending else None

    @pending.setter
    def pending(self, state: torch.Tensor | None) -> None:
        """As `load`, for a checkpoint that was written during a round."""
        self.discard()
        if state is None:
            return
        if state.shape != self._residual.shape:
            raise ValueError(f"residual: expected {len(self._residual)} values, got {list(state.shape)}")
        self._next.copy_(state.detach())
        refuse_poison(self._next, "a residual to load holds NaN or infinity")
        self._pending = True

    @torch.no_grad()
    def encode(self, codec: Codec, delta: torch.Tensor, seed: int = 0) -> torch.Tensor:
        """The payload of decay * residual + delta; the residual stays as it is until `commit`.

        Args:
            codec: the same at every round, though nothing breaks if it changes.
            delta: floating point, n elements in any shape.
            seed: as in `Codec.encode`.

        Raises:
            PoisonedError: NaN or infinity in the sum; nothing is pending then.
            ValueError: `delta` has another size.
        """
        self.discard()
        if delta.numel() != len(self._residual):
            raise ValueError(f"delta: expected {len(self._residual)} values, got {delta.numel()}")
        torch.mul(self._residual, self.decay, out=self._next)
        self._next.view(delta.shape).add_(delta)
        payload = codec.encode(self._next, seed=seed)
        codec.add(payload, self._next, weight=-1.0)
        self._pending = True
        return payload

    def commit(self) -> None:
        """The round went through: what the last `encode` left out is the residual."""
        if not self._pending:
            raise RuntimeError("commit without an encode before it")
        self._residual, self._next = self._next, self._residual
        self._pending = False

    def discard(self) -> None:
        """The round did not go through: the residual stays as it was."""
        self._pending = False

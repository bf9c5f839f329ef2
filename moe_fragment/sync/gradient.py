"""Gradient strategies: the trunk's gradient is summed over all clusters in every step.

DeepSpeed has already reduced the gradient inside each cluster and left every rank with the runs it owns. Each gateway
takes its interval over its rail, and the sums go back. Without a codec the sum is exact: a hierarchical all-reduce (2
(C - 1) / C of the vector leaves each cluster) or a butterfly (log2 C of it). With one, every cluster sends its encoded
interval to all others, and all decode and add the same bytes in the same order; but bf16 among three or more is reduced
like exact sums, as C - 1 encoded vectors would be more than that. Trunk copies stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moe_fragment.codecs import Codec, ErrorFeedback, PoisonedError
from moe_fragment.fabric.collectives import all_gather, all_reduce, butterfly
from moe_fragment.sync.feedback import loss_of, settle
from moe_fragment.sync.merge import DivideBy, decoded_mean
from moe_fragment.sync.state import FEEDBACK, Piece, Reader, pieces_of, read_interval
from moe_fragment.sync.vector import RailVector


class GradientSync:
    """Sums a canonical vector over all clusters; every method is collective over the fleet.

    Args:
        vector: the trunk.
        butterfly: by recursive doubling instead of reduce-scatter and all-gather; for exact sums.
        codec: how contributions look on the wire; None or a lossless one for exact sums.
        error_feedback: decay of what a codec lost last time, None for none.
        divide_by: what a sparse sum stands for, see `decoded_mean`.
        among: indices of the clusters that hold copies; None for all.
    """

    def __init__(
        self,
        vector: RailVector,
        *,
        butterfly: bool = False,
        codec: Codec | None = None,
        error_feedback: float | None = None,
        divide_by: DivideBy = "clusters",
        among: tuple[int, ...] | None = None,
    ) -> None:
        self._vector = vector
        self._fabric = vector.fabric
        self.among = among if among is not None else self._fabric.everybody
        self._butterfly = butterfly
        self._codec = None if codec is None or codec.lossless else codec
        self._wire: torch.dtype | None = None
        if self._codec is not None and error_feedback is None and len(self.among) > 2:
            self._wire = self._codec.cast
        self._divide_by: DivideBy = divide_by
        self._feedback: ErrorFeedback | None = None
        if self._codec is not None and error_feedback is not None and self._fabric.is_gateway:
            self._feedback = ErrorFeedback(vector.size, error_feedback, torch.device("cpu"))
        self.codec_loss = (0.0, 0.0)
        """Of the last step on this gateway: squared L2 norms of what the codec lost, and of what it was given."""

    def reduce(self, flats: Sequence[torch.Tensor], *, seed: int = 0) -> float:
        """Sum this rank's runs over the clusters, in place.

        Args:
            flats: 1-D buffers the runs point into, any device.
            seed: of stochastic rounding.

        Returns:
            the squared L2 norm of the summed interval on gateways (in fp64, the same on every cluster), else 0; not a
            number when a cluster's contribution was not finite. After a failed exchange it means nothing.
        """
        interval = self._vector.collect(flats)
        squared = 0.0
        if self._fabric.is_gateway:
            if self._codec is None or self._wire is not None:
                interval = self._summed(interval)
            else:
                interval = self._encoded(interval, seed)
            squared = float(interval.double().square().sum())
        self._vector.distribute(interval, flats)
        return squared

    def _summed(self, interval: torch.Tensor) -> torch.Tensor:
        if self._butterfly:
            self._fabric.collective(butterfly, interval, "trunk", self.among).wait()
            return interval
        if self._wire is not None:
            lost = interval - interval.to(self._wire)
            self.codec_loss = float(lost.double().square().sum()), float(interval.double().square().sum())
        self._fabric.collective(all_reduce, interval, "trunk", self.among, self._wire).wait()
        return interval

    def _encoded(self, interval: torch.Tensor, seed: int) -> torch.Tensor:
        codec, fabric = self._codec, self._fabric
        assert codec is not None
        seed = seed * fabric.clusters + fabric.cluster
        try:
            if self._feedback is not None:
                payload = self._feedback.encode(codec, interval, seed=seed)
            else:
                payload = codec.encode(interval, seed=seed)
        except PoisonedError:
            payload = torch.empty(0, dtype=torch.uint8)  # the others learn it from its emptiness
        else:
            self.codec_loss = loss_of(codec, payload, interval, self._feedback)[:2]
        ok, payloads = fabric.collective(all_gather, payload, "trunk", self.among).wait()
        if not ok:
            return interval
        assert payloads is not None
        if not interval.numel() or fabric.cluster not in self.among:
            return interval
        contributions = {cluster: payloads[cluster] for cluster in self.among}
        if any(not payload.numel() for payload in contributions.values()):
            return torch.full_like(interval, torch.nan)
        weights = dict.fromkeys(self.among, 1.0)
        mean = decoded_mean(codec, contributions, weights, interval.numel(), self._divide_by)
        return mean * len(self.among)

    def settle(self, committed: bool) -> None:
        """Keep what the codec lost for the next step if the step was committed, else forget it."""
        settle(self._feedback, committed)

    def state(self) -> Iterator[Piece]:
        """What a checkpoint must hold of this gateway."""
        if self._feedback is not None:
            yield from pieces_of(self._vector, FEEDBACK, self._feedback.state)

    def restore(self, read: Reader) -> None:
        """Inverse of `state`, from whatever layout wrote it."""
        if self._feedback is not None:
            self._feedback.load(read_interval(self._vector, FEEDBACK, read))

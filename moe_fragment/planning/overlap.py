"""Compute utilisation of data-parallel and DiLoCo-style training: a step graph of layers and one link.

A step is forward, backward of activations and backward of parameters, a third each, layer by layer. When a layer's
backward is done its reduction queues on the link (first in, first out); the layer's next forward (the one after,
with ``streaming_overlap``) waits for it. This is the simulator of Streaming DiLoCo (arXiv:2501.18512) as far as the
paper describes it. Latency, stragglers and sharing of the link are not in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

Strategy = Literal["dp", "diloco", "streaming", "streaming_overlap"]

WIRE_BITS_PER_BIT = 13.5 / 16
"""Bits that cross the link per bit of a parameter's number format, which the paper does not give. Fitted in
steps of a half (of 16) on the 25 rows of the 10B model in its Table 4: the most rows in exactly the published
cell (22). The rows of 1B and 100B were not used; there 45 of 50 are in that cell."""

_ROUNDS = 3
_STEPS = 20
_FASTEST_BITS_PER_S = 1e18


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One model under one strategy, on one link."""

    strategy: Strategy
    """``dp``: every layer in every step; ``diloco``: all at once every ``sync_every``; ``streaming``: a fragment
    at a time; ``streaming_overlap``: with one step to arrive (tau = 1)."""
    layers: int
    """Equal layers; everything counts to one of them."""
    parameters: float
    """Synchronised parameters."""
    step_s: float
    """Seconds of compute per step."""
    sync_every: int
    """Steps between two syncs of the same parameter; not used by ``dp``."""
    bits: float
    """Width of a parameter's number format, before ``WIRE_BITS_PER_BIT``."""
    fragment_layers: int = 1
    """Layers per fragment, strided over the depth; only for the streaming strategies."""

    @property
    def period(self) -> int:
        """Steps after which the pattern repeats."""
        return 1 if self.strategy == "dp" else self.sync_every

    def due(self) -> dict[int, list[int]]:
        """Layers to synchronise, by step of the period, deepest first (the order in which backward reaches them)."""
        if self.strategy in ("dp", "diloco"):
            return {0: list(reversed(range(self.layers)))}
        fragments = math.ceil(self.layers / self.fragment_layers)
        due: dict[int, list[int]] = defaultdict(list)
        for fragment in range(fragments):
            due[fragment * self.sync_every // fragments] += range(fragment, self.layers, fragments)
        return {step: sorted(layers, reverse=True) for step, layers in due.items()}


def utilisation(plan: Plan, bits_per_s: float) -> float:
    """Compute seconds over all seconds, once the pattern has settled; above 0, at most 1.

    Args:
        bits_per_s: the link's rate, one direction.
    """
    period, due = plan.period, plan.due()
    forward = plan.step_s / 3 / plan.layers
    backward = 2 * forward
    reduction = plan.parameters / plan.layers * plan.bits * WIRE_BITS_PER_BIT / bits_per_s
    grace = 2 if plan.strategy == "streaming_overlap" else 1
    rounds = max(_ROUNDS, math.ceil(_STEPS / period))
    now, link_free = 0.0, 0.0
    waiting: list[tuple[int, int, float]] = []  # the step whose forward needs it, the layer, when it arrives
    starts: list[float] = []
    before = 0
    # Between these steps nothing is sent or awaited.
    eventful = {
        start + step + wait
        for start in range(0, rounds * period, period)
        for step in due
        for wait in (0, grace)
    }
    for step in sorted(eventful | set(range(0, rounds * period, period))):
        now += (step - before) * plan.step_s
        before = step
        if step % period == 0:
            starts.append(now)
        needed = [(layer, arrival) for needed, layer, arrival in waiting if needed <= step]
        waiting = [entry for entry in waiting if entry[0] > step]
        now = max([now, *(arrival - layer * forward for layer, arrival in needed)])
        for layer in due.get(step % period, ()):
            done = now + plan.layers * forward + (plan.layers - layer) * backward
            link_free = max(link_free, done) + reduction
            waiting.append((step + grace, layer, link_free))
    # The first rounds start with an idle link; what the last one sent is still to arrive.
    first, last = rounds // 2, rounds - 1
    return period * plan.step_s * (last - first) / (starts[last] - starts[first])


def bandwidth_for(plan: Plan, target: float) -> float:
    """Bits per second, one direction, at which ``utilisation`` reaches ``target``; 0 < target < 1.

    Found by bisection to one part in a million; ``inf`` if no link is fast enough.
    """
    low, high = 1.0, _FASTEST_BITS_PER_S
    if not utilisation(plan, high) >= target:  # also when the numbers overflow to NaN
        return math.inf
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if utilisation(plan, middle) >= target else (middle, high)
    return high


def outer_utilisation(compute_s: float, communication_s: float) -> float:
    """Compute seconds over all seconds when every round of compute is followed by an exchange nothing hides.

    Source: reproduces INTELLECT-1 (arXiv:2412.01152, Table 2) and Covenant-72B (arXiv:2603.08163) from their seconds.
    """
    return compute_s / (compute_s + communication_s)

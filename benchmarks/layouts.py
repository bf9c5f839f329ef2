"""Ways to lay a model out over a cluster's ranks, against ZeRO-3 on the same ranks: tokens per second and memory.

Two clusters of two ranks each, four layers, half of the experts on either. Under plain ZeRO-3 each rank of a cluster
computes all of the cluster's experts, gathered when they are needed. Spread (`experts.local_parallel`), each rank holds
and computes half of them, and tokens travel. In a pipeline of two stages a rank holds half of the layers, and runs the
sequences of both ranks in micro-batches. The layouts are separate groups of processes that take turns of a few steps;
figures are medians over turns, and the first turn is dropped. All see the same batches from the same weights, and the
largest difference of their losses is printed.

CPU only, and all ranks share this machine's cores: a ratio compares work per step, not what a cluster would do. Memory
is what a rank has at its peak above what it had before the model was built.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks import fleet
from benchmarks.fleet import Wiring, say
from benchmarks.training import MODELS, Case, build_fragmented, turn_fragmented

SIZES = (2, 2)


@dataclass(frozen=True)
class Layout:
    """How a cluster's ranks hold the model."""

    stage: int
    expert_parallel: bool = False
    stages: int = 1
    micro_batches: int = 1


REFERENCE = "ZeRO-3"
LAYOUTS = {
    REFERENCE: Layout(3),
    "expert parallel, ZeRO-3": Layout(3, expert_parallel=True),
    "expert parallel, ZeRO-1": Layout(1, expert_parallel=True),
    "2 stages, 4 micro-batches": Layout(1, stages=2, micro_batches=4),
    "2 stages, 8 micro-batches": Layout(1, stages=2, micro_batches=8),
    "ZeRO-1": Layout(1),
}


def measure(case: Case, turns: int, steps: int) -> list[dict[str, Any]]:
    """A row per layout."""
    cases = {name: replace(case, stage=layout.stage) for name, layout in LAYOUTS.items()}
    found: dict[str, list[Any]] = {name: [] for name in LAYOUTS}
    with fleet.start(*(Wiring(sizes=SIZES, stages=layout.stages) for layout in LAYOUTS.values())) as groups:
        for group, (name, layout) in zip(groups, LAYOUTS.items(), strict=True):
            parameters = group.run(
                functools.partial(
                    build_fragmented,
                    expert_parallel=layout.expert_parallel,
                    stages=layout.stages,
                    micro_batches=layout.micro_batches,
                ),
                cases[name],
            )[0]
        for turn in range(turns + 1):
            for group, name in zip(groups, LAYOUTS, strict=True):
                found[name].append(group.run(turn_fragmented, cases[name], turn * steps, steps))
    seconds = {name: [max(r["wall_s"] for r in ranks) for ranks in got[1:]] for name, got in found.items()}
    peaks = {name: max(answer["peak_bytes"] for answer in got[-1]) for name, got in found.items()}
    losses = {name: [loss for ranks in got for loss in ranks[0]["losses"]] for name, got in found.items()}
    return [
        asdict(case)
        | {
            "layout": name,
            "parameters": parameters,
            "tokens_per_s": case.tokens / statistics.median(seconds[name]),
            "speed_ratio": fleet.median_ratio(seconds[REFERENCE], seconds[name]),
            "peak_bytes": peaks[name],
            "memory_ratio": peaks[name] / peaks[REFERENCE],
            "loss_gap": max(abs(a - b) for a, b in zip(losses[name], losses[REFERENCE], strict=True)),
        }
        for name in LAYOUTS
    ]


COLUMNS = {
    "hidden / experts / top-k": "{hidden} / {experts} / {top_k}",
    "parameters": "{parameters:,}",
    "layout": "{layout}",
    "tokens/s": "{tokens_per_s:,.0f}",
    "**speed ratio**": "**{speed_ratio:.2f}**",
    "peak MB per rank": "{peak_mb:,.0f}",
    "**memory ratio**": "**{memory_ratio:.2f}**",
    "loss gap": "{loss_gap:.0e}",
}


def main() -> None:
    """Command line."""
    parser = fleet.command_line("layouts", __doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["64/32", "256/8", "256/32"],
        help="hidden size / experts",
    )
    parser.add_argument("--turns", type=int, default=6, help="turns per layout that count (6)")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn (2)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for hidden, experts, top_k in (MODELS[name] for name in options.models):
        case = Case(sizes=SIZES, stage=3, hidden=hidden, experts=experts, top_k=top_k, layers=4, sequences=4)
        say(f"layouts: {case}")
        rows += measure(case, options.turns, options.steps)
    text = fleet.table(COLUMNS, [row | {"peak_mb": row["peak_bytes"] / 1e6} for row in rows])
    fleet.answer("layouts", {"rows": rows}, text, as_json=options.json)


if __name__ == "__main__":
    main()

"""A pipeline's bubble as it is measured, against (p - 1) / (m + p - 1), on stages whose compute time is known.

One cluster of p ranks runs a small model in p stages. Each stage sleeps a fixed time in the forward of every
micro-batch and twice that in its backward, so that all stages take the same time, however busy the machine is; what the
model itself computes is a few per cent of it. Figures are medians over steps; the first is dropped.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

from benchmarks import fleet
from benchmarks.fleet import Rank, Wiring, say
from benchmarks.training import Case, batches_of, build_fragmented

FORWARD_S = 0.25


def build(rank: Rank, case: Case, micro_batches: int) -> None:
    """A pipeline over all ranks whose stages take their time."""
    import torch

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
            time.sleep(FORWARD_S)
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            time.sleep(2 * FORWARD_S)
            return gradient

    one_each = [2, *[1] * (case.ranks - 2), 3]  # of the decoder's layers
    build_fragmented(rank, case, stages=case.ranks, micro_batches=micro_batches, partition=one_each)
    pipelined = rank.keep["stepper"].engine.deepspeed.module
    run = pipelined.forward
    pipelined.forward = lambda inputs: Slow.apply(run(inputs))


def bubbles(rank: Rank, case: Case, micro_batches: int, steps: int) -> list[float]:
    """What the product measures, step by step."""
    from moe_fragment.train.measure import measure

    found = []
    for step in range(steps + 1):
        stepper = rank.keep["stepper"]
        report = stepper.step(step, batches_of(rank, case, step), learning_rate=1e-3)
        measured = measure(
            rank.fabric,
            stepper.statistics.drain(),
            report,
            [],
            rank.topology.names,
            stages=case.ranks,
            micro_batches=micro_batches,
        )
        found.append(measured.scalars["bubble"])
    return found[1:]


COLUMNS = {
    "stages": "{stages}",
    "micro-batches": "{micro_batches}",
    "measured": "{measured:.3f}",
    "(p - 1) / (m + p - 1)": "{expected:.3f}",
    "**ratio**": "**{ratio:.2f}**",
}


def main() -> None:
    """Command line."""
    from moe_fragment.planning.bubble import bubble_fraction

    parser = fleet.command_line("bubble", __doc__)
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4], help="stages (2 4)")
    parser.add_argument(
        "--micro-batches",
        nargs="+",
        type=int,
        default=[1, 2, 4, 8, 16],
        help="micro-batches per step (1 2 4 8 16)",
    )
    parser.add_argument("--steps", type=int, default=3, help="steps that count (3)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for stages in options.stages:
        for micro_batches in options.micro_batches:
            case = Case(
                sizes=(stages,),
                stage=1,
                hidden=64,
                experts=4,
                top_k=2,
                layers=stages,
                sequence=16,
                sequences=16,
            )
            say(f"bubble: {stages} stages, {micro_batches} micro-batches")
            with fleet.start(Wiring(sizes=(stages,), stages=stages)) as (group,):
                group.run(functools.partial(build, micro_batches=micro_batches), case)
                found = group.run(bubbles, case, micro_batches, options.steps)[0]
            measured, expected = statistics.median(found), bubble_fraction(stages, micro_batches)
            row = {
                "stages": stages,
                "micro_batches": micro_batches,
                "measured": measured,
                "expected": expected,
            }
            rows.append(row | {"ratio": measured / expected})
    fleet.answer("bubble", {"rows": rows}, fleet.table(COLUMNS, rows), as_json=options.json)


if __name__ == "__main__":
    main()

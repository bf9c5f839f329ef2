"""Evaluation over the whole fleet, broken connections and unequal shares included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fleet.faults import Drop, Trail, dropped
from tests.fleet.harness import Fleets, Rank
from tests.fleet.training import Scenario, start

SEQUENCES = torch.randint(0, 60, (19, 13), generator=torch.Generator().manual_seed(5))


def evaluate_on(rank: Rank, scenario: Scenario, drop: Drop | None) -> tuple[float, int, int]:
    """Case: (loss, tokens, rows counted as training traffic)."""
    from moe_fragment.train.evaluation import evaluate

    stepper = start(rank, scenario)
    places = scenario.places()
    with dropped(rank, drop, Trail()):
        loss, tokens = evaluate(
            stepper.engine,
            rank.fabric,
            SEQUENCES,
            step=rank.next_step(),
            rank=places.index(scenario.reader(rank.place)),
            ranks=len(places),
            filler=0,
            retries=3,
        )
    # The fleet goes on training after it.
    batches = scenario.batches(0, scenario.reader(rank.place))
    report = stepper.step(rank.next_step(), batches, learning_rate=1e-3)
    assert report.outcome == 2, report.reason
    counted = stepper.statistics.drain()
    stepper.engine.destroy()
    return loss, tokens, counted.remote_rows


@pytest.mark.parametrize(
    ("sizes", "partition"), [((1, 1), ()), ((2, 1), ()), ((4, 2), (2, 3))], ids=["1x1", "2+1", "pipeline 4+2"]
)
def test_evaluation_equals_one_process_and_survives_a_broken_connection(
    fleets: Fleets, sizes: tuple[int, ...], partition: tuple[int, ...]
) -> None:
    from moe_fragment.train.loss import Batch, micro_batch_losses

    scenario = Scenario(sizes=sizes, partition=partition)
    model = scenario.model_of().eval()
    with torch.no_grad():
        losses = micro_batch_losses(model, Batch.of(SEQUENCES, 0), auxiliary=False)
    expected = float(losses.cross_entropy) / losses.tokens
    fleet = fleets(*sizes, stages=scenario.stages)
    for drop in (None, Drop(0), Drop(2)):
        for results in fleet.run(evaluate_on, scenario, drop):
            for loss, tokens, _ in results:
                assert loss == pytest.approx(expected, abs=1e-5)
                assert tokens == SEQUENCES.shape[0] * (SEQUENCES.shape[1] - 1)


def test_an_idle_rank_counts_in_no_statistics(fleets: Fleets) -> None:
    """Its one token without loss is nobody's."""
    idle = Scenario(sizes=(2, 1), share="idle")
    busy = replace(idle, share="unequal")
    (*_, (idle_rows,)) = [
        [result[2] for result in cluster] for cluster in fleets(2, 1).run(evaluate_on, idle, None)
    ]
    (*_, (busy_rows,)) = [
        [result[2] for result in cluster] for cluster in fleets(2, 1).run(evaluate_on, busy, None)
    ]
    assert idle_rows == 0 < busy_rows

"""Which sequences a rank's micro-batches hold: every sequence of the cluster's step once, whatever cuts it up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.train.loss import IGNORED, Batch
from moe_fragment.train.run import ClusterRun

FILLER = 7


class Numbers:
    """Data whose sequence j is j, j + 1, j + 2."""

    tokenizer = SimpleNamespace(eos_token_id=FILLER)

    def sequences(self, start: int, count: int) -> torch.Tensor:
        return torch.arange(start, start + count)[:, None] + torch.arange(3)


def batches(count: int, ranks: int, rank: int, accumulation: int, consumed: int = 0) -> list[Batch]:
    run: Any = SimpleNamespace(
        batch_C=(count,),
        index=0,
        recipe=SimpleNamespace(train=SimpleNamespace(accumulation=accumulation)),
        replicas=(ranks,),
        replica=rank,
        data=Numbers(),
        consumed=consumed,
    )
    return ClusterRun._batches(run)


def ids(batch: Batch) -> list[int]:
    """Numbers of the sequences that bear a loss."""
    return batch.input_ids[batch.labels[:, 0] != IGNORED, 0].tolist()


@given(
    count=st.integers(0, 40),
    ranks=st.integers(1, 5),
    accumulation=st.integers(1, 6),
    consumed=st.integers(0, 99),
)
def test_every_sequence_once(count: int, ranks: int, accumulation: int, consumed: int) -> None:
    """DeepSpeed#2223, pytorch#33148: every rank runs the same number of micro-batches, even with nothing to do."""
    seen: list[int] = []
    for rank in range(ranks):
        mine = batches(count, ranks, rank, accumulation, consumed)
        assert len(mine) == accumulation
        sizes = [len(ids(batch)) for batch in mine]
        assert max(sizes) <= -(-count // (ranks * accumulation))
        seen += [number for batch in mine for number in ids(batch)]
    assert sorted(seen) == list(range(consumed, consumed + count))


@pytest.mark.parametrize("count", [4, 8])
def test_same_micro_batches_for_ranks_and_for_accumulation(count: int) -> None:
    """Two ranks once, or one rank twice: the same cells, so that another rank count resumes the same run."""
    two = [batches(count, 2, rank, 1)[0] for rank in range(2)]
    one = batches(count, 1, 0, 2)
    assert [ids(batch) for batch in two] == [ids(batch) for batch in one]


def test_nothing_to_do_is_one_token_without_loss() -> None:
    (batch,) = batches(0, 1, 0, 1)
    assert batch.input_ids.tolist() == [[FILLER]]
    assert batch.tokens == 0


def test_steps_follow_one_another() -> None:
    """torchft#58: the position moves on by the cluster's share, nothing is repeated or skipped."""
    seen = []
    for step in range(4):
        for rank in range(2):
            seen += [number for batch in batches(5, 2, rank, 2, consumed=5 * step) for number in ids(batch)]
    assert sorted(seen) == list(range(20))

"""What crosses between clusters, to the byte, from the routing of each step.

Per (token, remote cluster) one row travels. With D the model width, K experts per token, e bytes per element
of a vector, w bytes per routing weight and 2 bytes per expert id:

    dispatch   forward   D e + K (2 + w)   out        backward   D e + K w   back
    combine    forward   D e               back       backward   D e         out

Recomputing a checkpointed layer of a stock model sends its dispatch once more and nothing else: recompute
stops at the last tensor that backward needs, which comes before combine. FragmentMoe computes its shared
experts and router losses after combine, so its recompute repeats the forward's combine as well. The trunk's
all-reduce sends 2 (C - 1) / C of its fp32 gradient per cluster.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from moe_fragment.fabric.wire import FRAME_BYTES
from tests.fleet.harness import Fleets, Rank
from tests.fleet.models import HIDDEN, LAYERS, VOCABULARY
from tests.fleet.training import LAYOUTS, Scenario, start

ID_BYTES = 2
TOP_K = 2


@dataclass
class Record:
    """Of one rank and one step: the routing of every layer's forward, and what the meter counted."""

    ids: list[torch.Tensor] = field(default_factory=list)
    """Per layer and micro-batch, [T, K]."""
    sent: dict[tuple[int, str], int] = field(default_factory=dict)
    framing: dict[tuple[int, str], int] = field(default_factory=dict)
    rows: int = 0
    """Of the expert statistics."""
    trunk_elements: int = 0


def measure(rank: Rank, scenario: Scenario) -> Record:
    """Case: one step under the meter."""
    from moe_fragment.experts.interface import ATTRIBUTE
    from moe_fragment.experts.statistics import in_recompute

    stepper = start(rank, scenario)
    record = Record(trunk_elements=sum(stepper.shards.sizes(experts=False).values()))
    for layer in stepper.engine.module.fragmented.layers:
        path = getattr(layer.module, ATTRIBUTE)
        preprocess = path.dispatch_preprocess

        def watched(ids_TK: torch.Tensor, *, preprocess: Any = preprocess, **options: Any) -> Any:
            if not in_recompute():
                record.ids.append(ids_TK.clone())
            return preprocess(ids_TK, **options)

        path.dispatch_preprocess = watched
    rank.fabric.meter.drain()
    stepper.step(rank.next_step(), scenario.batches(0, rank.place), learning_rate=1e-3)
    for key, traffic in rank.fabric.meter.drain().items():
        record.sent[key], record.framing[key] = traffic.sent, traffic.sent_framing
    record.rows = stepper.statistics.drain().remote_rows
    stepper.engine.destroy()
    return record


def rows_between(records: list[list[Record]], layout: list[list[int]], source: int, target: int) -> int:
    """Tokens of `source` with at least one expert on `target`, over its ranks, layers and micro-batches."""
    there = torch.tensor(layout[target], dtype=torch.int64)
    return sum(
        int(torch.isin(ids_TK, there).any(dim=1).sum()) for record in records[source] for ids_TK in record.ids
    )


def counted(records: list[list[Record]], source: int, target: int, channel: str, what: str = "sent") -> int:
    """Bytes from one cluster to another, over all its gateways."""
    return sum(getattr(record, what).get((target, channel), 0) for record in records[source])


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ((1, 1), {"model": "qwen3"}),
        ((1, 1), {"model": "fragment", "checkpointing": True}),
        ((1, 1), {"model": "fragment", "zero": "zero1-bf16", "checkpointing": True}),
        ((1, 1), {"model": "qwen3", "zero": "zero1-bf16"}),
        ((2, 1), {"model": "mixtral", "accumulation": 3, "checkpointing": True, "padding": "left"}),
        ((2, 2), {"model": "qwen3", "zero": "zero3-fp32"}),
        ((1, 1, 1), {"model": "qwen3", "layout": "thirds", "checkpointing": True}),
        ((1, 1), {"model": "qwen3", "layout": "uneven", "steered": "starved"}),
    ],
    ids=str,
)
def test_payload_is_the_closed_form(fleets: Fleets, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    """Several experts on one remote cluster cost one row; the meter and the statistics count the same rows."""
    scenario = Scenario(sizes=sizes, **options)
    records = fleets(*sizes).run(measure, scenario)
    layout, clusters = LAYOUTS[scenario.layout], len(sizes)
    half = "bf16" in scenario.zero
    vector = HIDDEN * (2 if half else 4)
    # FragmentMoe keeps routing weights in fp32; Qwen3-MoE casts them to the model's dtype.
    weights = TOP_K * (2 if half and scenario.model != "fragment" else 4)
    dispatched = vector + TOP_K * ID_BYTES + weights
    forwards = 2 if scenario.checkpointing else 1
    pairs = [(one, other) for one in range(clusters) for other in range(clusters) if one != other]
    for one, other in pairs:
        out = rows_between(records, layout, one, other)
        back = rows_between(records, layout, other, one)
        assert counted(records, one, other, "dispatch") == forwards * out * dispatched + back * (
            vector + weights
        )
        assert counted(records, one, other, "combine") == (out + back) * vector
    for cluster in range(clusters):
        expected = sum(
            rows_between(records, layout, cluster, peer) for peer in range(clusters) if peer != cluster
        )
        assert sum(record.rows for record in records[cluster]) == expected
        pairs_out = sum(
            int((~torch.isin(ids, torch.tensor(layout[cluster], dtype=torch.int64))).sum())
            for record in records[cluster]
            for ids in record.ids
        )
        assert expected < pairs_out or expected == 0 or scenario.steered, "nothing was de-duplicated"


@pytest.mark.parametrize(
    ("sizes", "layout", "zero"),
    [
        ((2, 1), "scattered", "zero3-fp32"),
        ((2, 2), "even", "zero1-fp32"),
        ((1, 1, 1), "thirds", "zero1-bf16"),
    ],
)
def test_trunk_sends_its_share(fleets: Fleets, sizes: tuple[int, ...], layout: str, zero: str) -> None:
    """2 (C - 1) / C of the fp32 gradient per cluster, up to one element per piece, whatever the number of ranks."""
    scenario = Scenario(sizes=sizes, layout=layout, zero=zero)
    records = fleets(*sizes).run(measure, scenario)
    clusters, rails = len(sizes), min(sizes)
    elements = records[0][0].trunk_elements
    for one in range(clusters):
        sent = sum(counted(records, one, other, "trunk") for other in range(clusters) if other != one)
        assert sent == pytest.approx(
            2 * (clusters - 1) / clusters * 4 * elements, abs=4 * 2 * clusters * rails
        )


def test_framing_is_small_and_counted(fleets: Fleets) -> None:
    """One frame a message; on a batch of a few hundred tokens at most 2 % of dispatch and combine."""
    scenario = Scenario(layout="even", share="equal", length=128, options={"max_position_embeddings": 256})
    records = fleets(1, 1).run(measure, scenario)
    for one, other in ((0, 1), (1, 0)):
        payload = sum(counted(records, one, other, channel) for channel in ("dispatch", "combine"))
        framing = sum(counted(records, one, other, channel, "framing") for channel in ("dispatch", "combine"))
        assert framing == 4 * LAYERS * FRAME_BYTES
        print(f"FRAMING {framing / payload:.2%} of {payload} bytes")
        assert framing <= 0.02 * payload


def test_layouts_are_whole() -> None:
    """The closed form relies on these layouts giving every expert one owner, as all but two do."""
    owned = {
        name: sorted(functools.reduce(operator.iadd, layout, [])) == list(range(8))
        for name, layout in LAYOUTS.items()
    }
    assert [name for name, once in owned.items() if not once] == ["replicated", "hot"]
    assert VOCABULARY > 0

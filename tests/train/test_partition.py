"""Where a model is cut into stages: DeepSpeed's own methods, by measurement, by hand; and what cannot be cut."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.placement import Placement
from moe_fragment.schema import ConfigError
from moe_fragment.train.stages import Stage, alone, cut, pieces, run
from tests.fleet.models import VOCABULARY, build

os.environ.setdefault("LOCAL_RANK", "0")


def config(stages: int, partition: Any) -> dict[str, Any]:
    return {"pipeline": {"stages": stages, "partition": partition}}


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "fragment"])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_one_after_the_other_are_the_model(kind: str, tied: bool) -> None:
    """For every cut in three, to the bit; what a stage has keeps its name, and nobody has anything twice."""
    whole = build(kind, tie_word_embeddings=tied, num_hidden_layers=3).eval()
    tokens = torch.randint(0, VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    count = len(pieces(whole))
    names = dict(whole.named_parameters())
    with torch.no_grad():
        expected = whole(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        for low, high in itertools.combinations(range(1, count), 2):
            bounds, hidden, held = [0, low, high, count], tokens, []
            for number in range(3):
                model = build(kind, tie_word_embeddings=tied, num_hidden_layers=3).eval()
                cut(model, stage := Stage.of(bounds, number))
                hidden, _ = run(model, stage, hidden, attention_mask=mask)
                held += [name for name, _ in model.named_parameters()]
            assert torch.equal(hidden, expected), bounds
            twice = ["model.embed_tokens.weight"] if tied else []
            assert sorted(held) == sorted([*names, *twice])


def test_methods_are_deepspeeds() -> None:
    """Against `PipelineModule._partition_layers` on the same pieces."""
    from types import SimpleNamespace

    from deepspeed.pipe import PipelineModule

    from moe_fragment.train.partition import partition

    model = build("fragment", num_hidden_layers=5, first_k_dense=2)
    for method, stages in itertools.product(("uniform", "parameters", "type:DecoderLayer"), (2, 3)):
        theirs: Any = SimpleNamespace(
            num_stages=stages,
            global_rank=1,
            _topo=SimpleNamespace(get_coord=lambda _: SimpleNamespace(pipe=0)),
            _layer_specs=[piece.module for piece in pieces(model)],
            _set_bounds=lambda **_: None,
        )
        theirs._count_layer_params = lambda theirs=theirs: PipelineModule._count_layer_params(theirs)
        theirs._find_layer_type = lambda name, theirs=theirs: PipelineModule._find_layer_type(theirs, name)
        PipelineModule._partition_layers(theirs, method=method)
        assert partition(model, config(stages, method)) == list(theirs.parts), method
    assert partition(model, config(3, [1, 5, 2])) == [0, 1, 6, 8]


def test_a_model_of_another_shape_is_refused() -> None:
    model = build("qwen3")
    model.model.add_module("vision_tower", torch.nn.Linear(1, 1))
    with pytest.raises(
        ConfigError, match="Qwen3MoeForCausalLM cannot be cut into stages: it has vision_tower"
    ):
        pieces(model)


COSTS = st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 10)), min_size=3, max_size=7)


@given(first=COSTS, second=COSTS, stages=st.integers(2, 3), micro_batches=st.integers(1, 4))
def test_balance_is_the_best_of_all_cuts(first: Any, second: Any, stages: int, micro_batches: int) -> None:
    """The slowest stage of any cluster is at most 3 % slower than it must be, and of those cuts memory decides."""
    from moe_fragment.train.layer_costs import Cost, balance

    count = min(len(first), len(second))
    costs = [[Cost(*row) for row in rows[:count]] for rows in (first, second)]

    def worst(bounds: tuple[int, ...], weigh: Any) -> float:
        return max(
            sum(weigh(cost, stage) for cost in rows[bounds[stage] : bounds[stage + 1]])
            for rows in costs
            for stage in range(stages)
        )

    def seconds(bounds: tuple[int, ...]) -> float:
        return worst(bounds, lambda cost, _: cost.seconds)

    def size(bounds: tuple[int, ...]) -> float:
        return worst(
            bounds,
            lambda cost, stage: cost.state_bytes + min(stages - stage, micro_batches) * cost.activation_bytes,
        )

    every = [(0, *inner, count) for inner in itertools.combinations(range(1, count), stages - 1)]
    fastest = min(map(seconds, every))
    good = [bounds for bounds in every if seconds(bounds) <= 1.03 * fastest * (1 + 1e-12)]
    found = tuple(balance(costs, stages, micro_batches))
    assert found in every
    assert seconds(found) <= 1.03 * fastest * (1 + 1e-9)
    assert size(found) <= min(map(size, good)) * (1 + 1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_costs_are_measured_on_copies(tied: bool) -> None:
    """The model stays as it is; experts elsewhere cost no memory; recomputed layers keep less."""
    from moe_fragment.models.recompute import recompute_layers
    from moe_fragment.train.layer_costs import measure_costs

    model = build("fragment", tie_word_embeddings=tied)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    layers = {layer: [[0, 1], [2, 3, 4, 5, 6, 7]] for layer in range(2)}
    placement = Placement(clusters=("ada", "bob"), num_experts=8, layers=layers)
    ada, bob = (measure_costs(model, {}, placement, cluster, width=1, sample=(2, 32)) for cluster in range(2))
    assert all(cost.seconds > 0 for cost in ada)
    assert ada[1].state_bytes < bob[1].state_bytes
    assert (ada[0].state_bytes, ada[4].state_bytes) == (bob[0].state_bytes, bob[4].state_bytes)
    experts = 3 * 24 * 32
    assert bob[1].state_bytes - ada[1].state_bytes == pytest.approx(4 * experts * 20)
    recompute_layers(model)
    less = measure_costs(model, {}, placement, 0, width=1, sample=(2, 32))
    assert less[1].activation_bytes < ada[1].activation_bytes
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_piece_alone() -> None:
    model = build("qwen3")
    copy, stage = alone(model, 1)
    assert (stage.is_first, stage.is_last) == (False, False)
    assert [name for name, _ in copy.model.layers.named_children()] == ["0"]
    assert len(model.model.layers) == 2


def test_shipped_configurations_name_a_method() -> None:
    from moe_fragment.train.deepspeed_config import METHODS, load_deepspeed_config, partition_method

    for path in Path(__file__).parents[2].glob("ds_configs/pipeline*.json"):
        assert partition_method(load_deepspeed_config(path)) in METHODS

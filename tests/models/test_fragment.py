"""`fragment` takes effect, and refuses what it could not do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fragment.experts import IMPLEMENTATION
from moe_fragment.fabric import Fabric
from moe_fragment.models.fragment import expert_layers, fragment, local_state
from moe_fragment.placement import Placement
from tests.fabric.pair import fabrics
from tests.fleet.models import LAYERS, build

KINDS = ("qwen3", "mixtral", "fragment")
HELD = [[6, 1, 3], [7, 5, 4, 2, 0]]


@pytest.fixture
def fabric() -> Fabric:
    """Of cluster bob, which nobody answers; nothing is exchanged here."""
    return fabrics(2)[1]


def placed(**changes: Any) -> Placement:
    fields: dict[str, Any] = {
        "clusters": ("ada", "bob"),
        "num_experts": 8,
        "layers": dict.fromkeys(range(LAYERS), HELD),
    }
    return Placement(**{**fields, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_keeps_this_clusters_experts_in_packed_order(kind: str, fabric: Fabric) -> None:
    model, whole = build(kind), build(kind).state_dict()
    assert fragment(model, placed(), fabric) is model
    state = model.state_dict()
    assert state.keys() == whole.keys()
    for name, tensor in local_state(whole, model.fragmented).items():
        assert torch.equal(state[name], tensor), name
    stacked = [name for name in whole if model.fragmented.expert_ids(name) is not None]
    assert len(stacked) == 2 * LAYERS
    for name in stacked:
        assert model.fragmented.expert_ids(name) == tuple(HELD[1])
        assert torch.equal(state[name], whole[name][HELD[1]])


@pytest.mark.parametrize("kind", KINDS)
def test_took_effect(kind: str, fabric: Fabric) -> None:
    model = fragment(build(kind), placed(), fabric)
    for layer in model.fragmented.layers:
        assert layer.module.config._experts_implementation == IMPLEMENTATION
        assert layer.module.num_experts == len(HELD[1])
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_that_does_not_take_the_implementation_is_refused(
    fabric: Fabric, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that transformers takes for one without experts silently stays with its own loop."""
    model = build("qwen3")
    monkeypatch.setattr(type(model), "set_experts_implementation", lambda *_: None)
    with pytest.raises(
        ValueError, match="Qwen3MoeForCausalLM did not take the cross_cluster experts implementation"
    ):
        fragment(model, placed(), fabric)


def test_a_cluster_without_experts_has_nothing_to_train_there(fabric: Fabric) -> None:
    layers = {layer: [list(range(8)), []] for layer in range(LAYERS)}
    model = fragment(build("mixtral"), placed(layers=layers), fabric)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert len(frozen) == 2 * LAYERS
    assert all(".experts." in name for name in frozen)


def test_refuses_a_second_time(fabric: Fabric) -> None:
    model = fragment(build("qwen3"), placed(), fabric)
    with pytest.raises(ValueError, match="fragmented already"):
        fragment(model, placed(), fabric)


def test_refuses_after_an_optimizer_was_built(fabric: Fabric) -> None:
    """It would go on training the whole experts, which the model no longer uses."""
    model = build("qwen3")
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="AdamW was built before fragmenting and holds"):
        fragment(model, placed(), fabric)
    del optimizer
    fragment(model, placed(), fabric)


def test_looking_for_optimizers_leaves_lazy_objects_alone(fabric: Fabric) -> None:
    class Lazy:
        @property
        def __class__(self) -> type:  # type: ignore[override]
            raise RuntimeError("resolved")

    lazy = Lazy()
    fragment(build("qwen3"), placed(), fabric)
    assert type(lazy) is Lazy


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (placed(clusters=("ada", "cyd")), r"for clusters \('ada', 'cyd'\), the fabric has \('ada', 'bob'\)"),
        (
            placed(num_experts=9, layers={layer: [[8, 6, 1, 3], HELD[1]] for layer in range(LAYERS)}),
            "places 9 experts, .* has 8",
        ),
        (placed(layers={0: HELD}), "says nothing about layer 1, which has experts"),
        (placed(layers=dict.fromkeys(range(LAYERS + 1), HELD)), r"layers \[2\], which have none"),
    ],
    ids=["clusters", "experts", "missing layer", "extra layer"],
)
def test_refuses_a_placement_that_does_not_fit(placement: Placement, message: str, fabric: Fabric) -> None:
    model = build("qwen3")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        fragment(model, placement, fabric)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not hasattr(model, "fragmented")


def test_a_model_without_experts_is_refused(fabric: Fabric) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts module"):
        expert_layers(LlamaForCausalLM(config))

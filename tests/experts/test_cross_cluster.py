"""The expert path between clusters that are threads: outputs and gradients of the whole model, and no token at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fragment.experts.interface import ATTRIBUTE
from moe_fragment.fabric import FAILED, OK, Fabric
from moe_fragment.models.fragment import fragment
from moe_fragment.models.recompute import recompute_layers
from moe_fragment.placement import Placement
from tests.fabric.pair import NAMES, fabrics, group_of, together
from tests.fleet.models import LAYERS, VOCABULARY, build

LAYOUTS: dict[str, list[list[int]]] = {
    "even": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "scattered": [[6, 1, 3], [7, 5, 4, 2, 0]],
    "none": [[0, 1, 2, 3, 4, 5, 6, 7], []],
    "thirds": [[0, 5, 7], [1, 6], [2, 3, 4]],
}


def fragments(kind: str, layout: str) -> tuple[list[Fabric], dict[int, Any]]:
    """A fragmented copy of the same model on every cluster."""
    held = LAYOUTS[layout]
    clusters = fabrics(len(held))
    models = {}
    for fabric in clusters:
        placement = Placement(
            clusters=NAMES[: len(held)], num_experts=8, layers=dict.fromkeys(range(LAYERS), held)
        )
        models[fabric.cluster] = fragment(build(kind), placement, fabric)
    return clusters, models


def tokens_of(cluster: int, length: int = 6) -> torch.Tensor:
    """[cluster + 1, length]: clusters have unequal batches."""
    generator = torch.Generator().manual_seed(cluster)
    return torch.randint(0, VOCABULARY, (cluster + 1, length), generator=generator)


def loss_of(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and a loss that is a sum, so that clusters add up."""
    logits = model(input_ids=tokens, use_cache=False).logits
    return logits, logits.log_softmax(-1)[..., :3].sum()


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "fragment"])
@pytest.mark.parametrize("layout", ["even", "scattered", "none", "thirds"])
def test_outputs_and_gradients_are_the_whole_models(kind: str, layout: str) -> None:
    """DeepSpeed#5259, #6546: an expert's gradient is the sum over all clusters' tokens, once."""
    clusters, models = fragments(kind, layout)

    def work(fabric: Fabric) -> torch.Tensor:
        fabric.begin_step(0)
        logits, loss = loss_of(models[fabric.cluster], tokens_of(fabric.cluster))
        loss.backward()
        assert fabric.verdict(OK, []).outcome == OK
        return logits

    found = together(clusters, work)
    whole = build(kind)
    for cluster, logits in enumerate(found):
        expected, loss = loss_of(whole, tokens_of(cluster))
        loss.backward()
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in whole.named_parameters():
        pieces = [dict(model.named_parameters())[name] for model in models.values()]
        ids = [model.fragmented.expert_ids(name) for model in models.values()]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in pieces]
        if ids[0] is None:
            total = torch.stack([gradient.double() for gradient in gradients]).sum(0)
        else:
            total = torch.zeros_like(parameter, dtype=torch.float64)
            for experts, gradient in zip(ids, gradients, strict=True):
                total[list(experts)] = gradient.double()
        error = (total - parameter.grad.double()).norm() / parameter.grad.double().norm()
        assert error < 5e-6, name


@pytest.mark.parametrize("busy", [(), (0,), (0, 1)], ids=["none", "one", "both"])
def test_zero_tokens(busy: tuple[int, ...]) -> None:
    """sglang#38773: [0, D] passes through on one cluster and on all, with gradients; DeepSpeed#4808: every parameter
    still has a gradient."""
    clusters, models = fragments("qwen3", "even")

    def work(fabric: Fabric) -> Any:
        experts = models[fabric.cluster].model.layers[0].mlp.experts
        count = 5 if fabric.cluster in busy else 0
        hidden = torch.randn(count, 32, requires_grad=True)
        ids = torch.arange(2 * count).view(count, 2) % 8
        weights = torch.full((count, 2), 0.5, requires_grad=True)
        fabric.begin_step(0)
        output = experts(hidden, ids, weights)
        assert output.shape == (count, 32)
        output.sum().backward()
        assert hidden.grad is not None
        assert weights.grad is not None
        return experts.gate_up_proj.grad, experts.down_proj.grad

    for gradients in together(clusters, work):
        assert all(gradient is not None for gradient in gradients)
        assert all(bool(gradient.abs().sum() > 0) == bool(busy) for gradient in gradients)


@pytest.mark.parametrize("cut", ["before", "between"])
@pytest.mark.parametrize("kind", ["qwen3", "fragment"])
def test_a_failure_raises_nothing_in_a_recompute(kind: str, cut: str) -> None:
    """A checkpointed layer runs again after the links broke: its rows have the shapes that backward expects."""
    clusters, models = fragments(kind, "scattered")

    def work(fabric: Fabric) -> Any:
        model = models[fabric.cluster]
        fabric.begin_step(0)
        if cut == "before":
            group_of(fabric).drop()
        _, loss = loss_of(model, tokens_of(fabric.cluster))
        if cut == "between":
            group_of(fabric).drop()
        loss.backward()
        return fabric.verdict(OK, []).outcome

    for model in models.values():
        recompute_layers(model)
    assert together(clusters, work) == [FAILED, FAILED]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_repeats_dispatch_only(reentrant: bool) -> None:
    """And its gradients are those without recomputation; several micro-batches take their own routes again.

    Reentrant checkpointing has no early stop: it repeats combine as well.
    """

    def messages(checkpointed: bool) -> Any:
        clusters, models = fragments("qwen3", "scattered")
        for model in models.values():
            if checkpointed:
                model.activation_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()

        def work(fabric: Fabric) -> Any:
            model = models[fabric.cluster]
            fabric.begin_step(0)
            for length in (6, 9):
                _, loss = loss_of(model, tokens_of(fabric.cluster, length))
                loss.backward()
            assert fabric.failure is None
            counts = {key[1]: traffic.messages for key, traffic in fabric.meter.drain().items()}
            return counts, [parameter.grad for parameter in model.parameters()]

        return together(clusters, work)

    for (plain, expected), (counts, found) in zip(messages(False), messages(True), strict=True):
        repeated = 2 * LAYERS
        assert counts["dispatch"] == plain["dispatch"] + repeated
        assert counts["combine"] == plain["combine"] + repeated * reentrant
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


def test_statistics_count_a_forward_once() -> None:
    """Rows, pairs and load; not again in a recompute, and not in evaluation."""
    clusters, models = fragments("qwen3", "even")

    def work(fabric: Fabric) -> Any:
        model = models[fabric.cluster]
        recompute_layers(model)
        fabric.begin_step(0)
        loss_of(model, tokens_of(fabric.cluster))[1].backward()
        model.eval()
        with torch.no_grad():
            loss_of(model, tokens_of(fabric.cluster))
        return model.fragmented.statistics.drain(), model.fragmented.statistics

    for fabric, (counted, rest) in zip(clusters, together(clusters, work), strict=True):
        pairs = tokens_of(fabric.cluster).numel() * LAYERS * 2
        assert counted.local_pairs + counted.remote_pairs == pairs == int(counted.load_LE.sum())
        assert (
            counted.remote_rows
            == int(counted.traffic_LC[:, 1 - fabric.cluster].sum())
            < counted.remote_pairs + 1
        )
        assert rest.local_pairs == rest.remote_rows == int(rest.load_LE.sum()) == 0


def test_one_row_for_several_experts() -> None:
    """Two experts of one remote cluster: one row out, one sum back."""
    clusters, models = fragments("qwen3", "even")

    def work(fabric: Fabric) -> Any:
        experts = models[fabric.cluster].model.layers[0].mlp.experts
        remote = torch.tensor([[4, 5], [6, 7], [0, 4]]) if fabric.cluster == 0 else torch.zeros(0, 2).long()
        fabric.begin_step(0)
        experts(torch.randn(len(remote), 32), remote, torch.ones(len(remote), 2))
        return {key[1]: traffic.sent for key, traffic in fabric.meter.drain().items()}

    ada, bob = together(clusters, work)
    assert ada == {"dispatch": 3 * (32 * 4 + 2 * (2 + 4)), "combine": 0}
    assert bob == {"dispatch": 0, "combine": 3 * 32 * 4}


def test_paths_are_on_every_layer() -> None:
    _, models = fragments("mixtral", "even")
    for model in models.values():
        assert all(hasattr(layer.module, ATTRIBUTE) for layer in model.fragmented.layers)

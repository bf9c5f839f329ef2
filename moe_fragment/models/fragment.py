"""`fragment`: keep only this cluster's experts of a MoE model and route the others' tokens over the fabric.

Works on any transformers model whose experts module holds `gate_up_proj` and `down_proj` (or `up_proj`) with experts in
the first dimension and dispatches through `ALL_EXPERTS_FUNCTIONS`; tested on Qwen3-MoE, Mixtral and FragmentMoe.
Weights and names stay as they are, only the first dimension shrinks.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from moe_fragment.experts import (
    IMPLEMENTATION,
    ExpertParallel,
    ExpertPath,
    ExpertStatistics,
    LayerPlacement,
    register,
)
from moe_fragment.experts.interface import ATTRIBUTE
from moe_fragment.fabric import Fabric
from moe_fragment.models.router import FragmentMoeRouter, routers
from moe_fragment.placement import Placement

_STACKED = ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias")


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer of a model: decoder layer index, dotted name of its experts module, and the module."""

    index: int
    name: str
    module: Any

    def stacked(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters with experts in their first dimension, by attribute name."""
        for attribute in _STACKED:
            parameter = getattr(self.module, attribute, None)
            if isinstance(parameter, nn.Parameter):
                yield attribute, parameter


@dataclass(frozen=True)
class Fragmented:
    """What `fragment` did to a model; found on it as `model.fragmented`."""

    placement: Placement
    cluster: int
    layers: tuple[ExpertLayer, ...]
    """Those of this rank; of a pipeline, of its stage."""
    statistics: ExpertStatistics
    routers: tuple[FragmentMoeRouter, ...] = ()
    """Of `layers`; none in a stock model."""
    parallel: ExpertParallel | None = None
    """How the cluster's experts are spread over its ranks; None where each rank holds them all.

    If they are, the parameters that hold them are attributes of their modules, but not registered ones: nothing that
    walks over a model's parameters may take them for something that all ranks have."""

    def held(self, layer: ExpertLayer) -> tuple[int, ...]:
        """Global ids of the experts of a layer on this rank, in the order of its stacked parameters."""
        experts = self.placement.experts_of(layer.index, self.cluster)
        return experts if self.parallel is None else self.parallel.own(experts)

    def expert_ids(self, parameter_name: str) -> tuple[int, ...] | None:
        """Global expert ids along the first dimension of a stacked parameter; None for a trunk parameter."""
        for layer in self.layers:
            prefix, _, attribute = parameter_name.rpartition(".")
            if prefix == layer.name and attribute in _STACKED:
                return self.held(layer)
        return None

    def stacked(self) -> Iterator[tuple[str, ExpertLayer, nn.Parameter]]:
        """Name, layer and parameter of every stack of experts on this rank."""
        for layer in self.layers:
            for attribute, parameter in layer.stacked():
                yield f"{layer.name}.{attribute}", layer, parameter

    def holders(self, parameter_name: str, expert: int) -> tuple[int, ...]:
        """Indices of the clusters that hold a copy of an expert of a stacked parameter."""
        return self.placement.holders(layer_index(parameter_name), expert)

    def replica_sets(self) -> tuple[tuple[int, ...], ...]:
        """The sets of clusters that share experts, each once; the same on every cluster."""
        found = {
            self.placement.holders(layer, expert)
            for layer in self.placement.layers
            for expert in range(self.placement.num_experts)
        }
        return tuple(sorted(holders for holders in found if len(holders) > 1))

    @contextmanager
    def micro_batch(self, index: int, *, counted: bool = True) -> Iterator[None]:
        """What runs inside is a step's micro-batch `index`, counted from 0.

        Args:
            index: errors name it.
            counted: whether statistics and router load see it; a filler's token is nobody's.
        """
        self.statistics.micro_batch = index
        if counted:
            yield
            return
        before = [router.tokens_per_expert.clone() for router in self.routers]
        self.statistics.paused = True
        yield
        self.statistics.paused = False
        for router, load_E in zip(self.routers, before, strict=True):
            router.tokens_per_expert.copy_(load_E)

    def positions(self) -> list[int]:
        """Of this rank's layers, their places among all MoE layers of the model."""
        every = sorted(self.placement.layers)
        return [every.index(layer.index) for layer in self.layers]

    def route_locally(self, local: bool) -> None:
        """Restrict routing to this cluster's experts (`exchange: local`), or lift that.

        FragmentMoe's routers choose among them; of a stock router's choice the others are dropped.

        Raises:
            ValueError: a FragmentMoe router is to choose more experts than this cluster holds in its layer.
        """
        for layer in self.layers:
            path: ExpertPath = getattr(layer.module, ATTRIBUTE)
            path.local_only = local
        for layer, router in zip(self.layers if self.routers else (), self.routers, strict=True):
            router.restrict(self.placement.experts_of(layer.index, self.cluster) if local else None)


def expert_layers(model: nn.Module, *, may_have_none: bool = False) -> tuple[ExpertLayer, ...]:
    """The MoE layers of a transformers model, or of a part that `may_have_none`, by decoder layer.

    Raises:
        ValueError: the model has none, or one whose experts cannot be told apart by their first dimension.
    """
    found = []
    for name, module in model.named_modules():
        if not hasattr(module, "_is_expert_parallel") or not hasattr(module, "num_experts"):
            continue
        layer = ExpertLayer(layer_index(name), name, module)
        wrong = [
            f"{attribute} {tuple(parameter.shape)}"
            for attribute, parameter in layer.stacked()
            if parameter.shape[0] != module.num_experts
        ]
        if wrong or not list(layer.stacked()):
            raise ValueError(
                f"{name}: expected {module.num_experts} experts in the first dimension, got {wrong}"
            )
        found.append(layer)
    if not found and not may_have_none:
        raise ValueError(
            f"{type(model).__name__} has no experts module that dispatches through transformers' experts interface"
        )
    return tuple(found)


def layer_index(name: str) -> int:
    """Which decoder layer a module or parameter of this dotted name belongs to.

    Raises:
        ValueError: the name does not say.
    """
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if not numbers:
        raise ValueError(f"{name}: cannot tell which decoder layer these experts belong to")
    return numbers[-1]


def fragment(
    model: Any,
    placement: Placement,
    fabric: Fabric,
    parallel: ExpertParallel | None = None,
    *,
    part: bool = False,
) -> Any:
    """Keep this cluster's experts and send other tokens to where their experts live; changes `model` in place.

    Args:
        model: a transformers MoE model with all its experts.
        placement: over the fabric's clusters, covering every MoE layer of the model. Copies of a replicated expert are
            used where they are nearest; keeping them together is the sync's business.
        fabric: of this rank.
        parallel: how the cluster's ranks share its experts: each keeps its own only, in parameters that are attributes
            of their modules but not registered. `model.to`, `state_dict` and `parameters` do not see them,
            `build_engine` does. None keeps all of them on each rank.
        part: the model is a stage of a pipeline and lacks some of the placement's layers.

    Returns:
        the same model, with `model.fragmented` describing what was done.

    Raises:
        ValueError: the placement does not fit the model or the fabric, the model is fragmented already, an
            optimizer holds its parameters, or the model did not take the `cross_cluster` implementation.
    """
    if hasattr(model, "fragmented"):
        raise ValueError("the model is fragmented already")
    layers = expert_layers(model, may_have_none=part)
    _check_no_optimizer(model)
    _check_placement(layers, placement, fabric, part)
    register()
    statistics = ExpertStatistics(len(placement.layers), fabric.clusters, placement.num_experts)
    fragmented = Fragmented(placement, fabric.cluster, layers, statistics, tuple(routers(model)), parallel)
    for position, layer in zip(fragmented.positions(), layers, strict=True):
        experts = list(fragmented.held(layer))
        for attribute, parameter in list(layer.stacked()):
            # A cluster without experts in this layer has nothing to train; DeepSpeed cannot partition empty groups.
            trains = parameter.requires_grad and (bool(experts) or parallel is not None)
            kept = nn.Parameter(parameter.detach()[experts].clone(), requires_grad=trains)
            if parallel is not None:
                del layer.module._parameters[attribute]
                layer.module.__dict__[attribute] = kept
            else:
                setattr(layer.module, attribute, kept)
        layer.module.num_experts = len(experts)
        tables = LayerPlacement.of(placement, layer.index, fabric.cluster, fabric.near)
        path = ExpertPath(
            fabric, tables, index=layer.index, layer=position, statistics=statistics, parallel=parallel
        )
        setattr(layer.module, ATTRIBUTE, path)
    _use_cross_cluster(model, layers)
    model.fragmented = fragmented
    return model


def _check_placement(
    layers: tuple[ExpertLayer, ...], placement: Placement, fabric: Fabric, part: bool
) -> None:
    if tuple(placement.clusters) != tuple(fabric.names):
        raise ValueError(f"the placement is for clusters {placement.clusters}, the fabric has {fabric.names}")
    for layer in layers:
        if layer.index not in placement.layers:
            raise ValueError(f"the placement says nothing about layer {layer.index}, which has experts")
        if placement.num_experts != layer.module.num_experts:
            raise ValueError(
                f"the placement places {placement.num_experts} experts, {layer.name} has {layer.module.num_experts}"
            )
    unknown = set(placement.layers) - {layer.index for layer in layers}
    if unknown and not part:
        raise ValueError(
            f"the placement places experts of layers {sorted(unknown)}, which have none in this model"
        )


def _check_no_optimizer(model: nn.Module) -> None:
    """An optimizer built before would keep the whole experts and never see the ones the model uses afterwards."""
    if any(
        hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping") for parameter in model.parameters()
    ):
        raise ValueError("DeepSpeed already wraps this model; fragment it before deepspeed.initialize")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for held in gc.get_objects():
        # Not isinstance: it asks every object of the process for its __class__, which lazy ones answer with code.
        if not issubclass(type(held), torch.optim.Optimizer):
            continue
        for group in held.param_groups:
            for parameter in group["params"]:
                if id(parameter) in names:
                    raise ValueError(
                        f"{type(held).__name__} was built before fragmenting and holds {names[id(parameter)]}; "
                        f"fragment the model first, then build the optimizer"
                    )


def _use_cross_cluster(model: Any, layers: tuple[ExpertLayer, ...]) -> None:
    model.set_experts_implementation(IMPLEMENTATION)
    ignored = [
        layer.name for layer in layers if layer.module.config._experts_implementation != IMPLEMENTATION
    ]
    if ignored:
        raise ValueError(
            f"{type(model).__name__} did not take the {IMPLEMENTATION} experts implementation ({ignored[0]} still "
            f"uses {layers[0].module.config._experts_implementation}); its experts class must be decorated with "
            f"transformers' use_experts_implementation"
        )


def local_state(state: Mapping[str, torch.Tensor], fragmented: Fragmented) -> dict[str, torch.Tensor]:
    """Of a whole model's state dict, what this rank holds (stacked parameters sliced to its experts)."""
    local = {}
    for name, tensor in state.items():
        ids = fragmented.expert_ids(name)
        local[name] = tensor if ids is None else tensor[list(ids)]
    return local

"""The model of a run: built from a transformers configuration, the same on every cluster, or loaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

import moe_fragment.models.register  # noqa: F401 (makes the model type known)
from moe_fragment.models.fragment import expert_layers
from moe_fragment.models.recompute import recompute_layers
from moe_fragment.models.router import routers
from moe_fragment.placement import Placement
from moe_fragment.schema import ConfigError
from moe_fragment.topology import Topology
from moe_fragment.train.recipe import ModelConfig, Recipe
from moe_fragment.train.tokenizer import load_tokenizer
from moe_fragment.train.zero import expert_name

_UNDECLARED = {"head_dim"}
"""Fields that attention reads in every family although some, Qwen3-MoE among them, do not declare them."""


def model_configuration(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The transformers configuration of a new model.

    Raises:
        ConfigError: unknown model type or field, or a value the architecture refuses.
    """
    tokens = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    try:
        known = AutoConfig.for_model(config.architecture).to_dict()
    except ValueError:
        raise ConfigError(
            f"model.architecture: {config.architecture!r} is not a model type of transformers"
        ) from None
    aliases = AutoConfig.for_model(config.architecture).attribute_map
    for field in config.config:
        if field not in known and field not in aliases and field not in _UNDECLARED:
            raise ConfigError(f"model.config.{field}: unknown field of {config.architecture}")
    try:
        return AutoConfig.for_model(config.architecture, **{**tokens, **config.config})
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.config: {str(error).strip().splitlines()[-1]}") from None


def build_model(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    """The whole model with all its experts, in fp32, on the CPU.

    Args:
        config: the `model` section.
        tokenizer: gives vocabulary size and special tokens to a new model.

    Raises:
        ConfigError: see `model_configuration`; or the weights cannot be loaded.
    """
    if config.pretrained:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                config.pretrained, dtype=torch.float32, attn_implementation=config.attention
            )
        except (OSError, ValueError) as error:
            raise _cannot_load(config.pretrained, error) from None
    else:
        torch.manual_seed(config.seed)
        model = AutoModelForCausalLM.from_config(
            model_configuration(config, tokenizer),
            dtype=torch.float32,
            attn_implementation=config.attention,
        )
    if config.activation_checkpointing:
        recompute_layers(model)
    return model


def place_model(model: Any, recipe: Recipe, topology: Topology) -> Placement:
    """Which cluster holds which expert of the model.

    Raises:
        ConfigError: the model has no experts that can be placed, or the placement does not fit.
    """
    try:
        layers = expert_layers(model)
    except ValueError as error:
        raise ConfigError(f"model.architecture: {error}") from None
    return recipe.place(
        topology, num_experts=layers[0].module.num_experts, layers=[layer.index for layer in layers]
    )


def check_model(recipe: Recipe, topology: Topology) -> None:
    """Refuse a model or placement that cannot be, before anybody waits for anybody; makes no weights.

    Raises:
        ConfigError: see `build_model` and `place_model`.
    """
    if recipe.model.pretrained:
        try:
            configuration = AutoConfig.from_pretrained(recipe.model.pretrained)
        except (OSError, ValueError) as error:
            raise _cannot_load(recipe.model.pretrained, error) from None
        tokenizer = load_tokenizer(recipe.data.tokenizer)
    else:
        tokenizer = load_tokenizer(recipe.data.tokenizer)
        configuration = model_configuration(recipe.model, tokenizer)
    if len(tokenizer) > configuration.vocab_size:
        raise ConfigError(
            f"data.tokenizer: has {len(tokenizer)} tokens, but the model's vocabulary only {configuration.vocab_size}"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(configuration)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"model: {str(error).strip().splitlines()[0]}") from None
    if recipe.stages > 1:
        from moe_fragment.train.partition import partition

        for name in topology.names:
            partition(model, recipe.deepspeed_config(name))
    placement = place_model(model, recipe, topology)
    own_routers = routers(model)
    if recipe.experts.exchange == "local" and own_routers:
        top_k = own_routers[0].top_k
        for layer, counts in placement.counts().items():
            if min(counts) < top_k:
                name = topology.names[counts.index(min(counts))]
                raise ConfigError(
                    f"placement: cluster {name} holds {min(counts)} experts of layer {layer}, but each token chooses "
                    f"{top_k} of its own cluster's (experts.exchange: local)"
                )


def _cannot_load(pretrained: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"model.pretrained: {pretrained!r} cannot be loaded ({str(error).strip().splitlines()[0]})"
    )


def parameter_shapes(model: Any) -> dict[str, list[int]]:
    """Shape of every canonical parameter of a fragmented model, or of this rank's stage of it."""
    shapes: dict[str, list[int]] = {}
    fragmented = model.fragmented
    for name, parameter in nn.Module.named_parameters(model):
        if fragmented.expert_ids(name) is None:
            shapes[name] = list(_shape(parameter))
    for name, layer, parameter in fragmented.stacked():
        for expert in fragmented.placement.experts_of(layer.index, fragmented.cluster):
            shapes[expert_name(name, expert)] = list(_shape(parameter)[1:])
    return shapes


def _shape(parameter: Any) -> torch.Size:
    """Also of what ZeRO-3 has partitioned."""
    found: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return found

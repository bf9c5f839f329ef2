"""A DeepSpeed engine around a fragmented model, inside one cluster.

DeepSpeed sees the cluster's ranks only. It reduces gradients and partitions optimizer state there; clipping, learning
rate and the decision to step are the fleet's (`step.py`), so a configuration that sets them is refused, not ignored.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_fragment.models.fragment import Fragmented
from moe_fragment.schema import ConfigError
from moe_fragment.train.local_experts import LocalExperts

FLEET_FIELDS = {
    "optimizer": "train.learning_rate, train.weight_decay and train.betas",
    "scheduler": "train.schedule",
    "gradient_clipping": "train.clip_norm",
    "train_batch_size": "train.batch",
    "train_micro_batch_size_per_gpu": "train.batch and train.accumulation",
    "gradient_accumulation_steps": "train.accumulation",
}
"""DeepSpeed fields that belong to the fleet, and where a recipe sets them."""


def load_deepspeed_config(path: Path) -> dict[str, Any]:
    """The JSON file at `path`.

    Raises:
        ConfigError: missing file or bad JSON.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error.msg} at line {error.lineno}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return config


def check_deepspeed_config(config: Mapping[str, Any], where: str) -> None:
    """Refuse what the fleet could not honour.

    Raises:
        ConfigError: a field that belongs to the recipe, an unsupported stage, fp16 or offloading.
    """
    for field, instead in FLEET_FIELDS.items():
        if config.get(field):
            raise ConfigError(f"{where}: {field}: is decided fleet-wide; set {instead} in the recipe")
    zero = _section(config, "zero_optimization", where)
    stage = zero.get("stage", 0)
    if stage not in (1, 2, 3):
        raise ConfigError(f"{where}: zero_optimization.stage: expected 1, 2 or 3, got {stage}")
    for device in ("offload_optimizer", "offload_param"):
        if _section(zero, device, f"{where}: zero_optimization").get("device", "none") != "none":
            raise ConfigError(f"{where}: zero_optimization.{device}: offloading is not supported")
    if _section(config, "bf16", where).get("bf16_master_weights_and_grads"):
        raise ConfigError(f"{where}: bf16.bf16_master_weights_and_grads: master weights are fp32 here")
    if _section(config, "fp16", where).get("enabled"):
        raise ConfigError(f"{where}: fp16.enabled: fp16 is not supported, use bf16 or fp32")


def _section(config: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    section = config.get(name)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise ConfigError(f"{where}: {name}: expected a mapping of fields, got {section!r}")
    return section


def is_bf16(config: Mapping[str, Any]) -> bool:
    """Whether a DeepSpeed configuration computes in bf16; fp32 otherwise."""
    return bool(config.get("bf16", {}).get("enabled"))


def parameter_groups(model: nn.Module, fragmented: Fragmented, weight_decay: float) -> list[dict[str, Any]]:
    """Trunk matrices, trunk vectors (not decayed), and experts, each in name order."""
    groups: dict[str, list[nn.Parameter]] = {"matrices": [], "vectors": [], "experts": []}
    for name, parameter in sorted(model.named_parameters()):
        if not parameter.requires_grad:
            continue
        if fragmented.expert_ids(name) is not None:
            groups["experts"].append(parameter)
        else:
            groups["matrices" if parameter.ndim > 1 else "vectors"].append(parameter)
    return [
        {"params": parameters, "weight_decay": 0.0 if kind == "vectors" else weight_decay}
        for kind, parameters in groups.items()
        if parameters
    ]


def build_engine(
    model: nn.Module,
    fragmented: Fragmented,
    config: Mapping[str, Any],
    *,
    accumulation: int,
    learning_rate: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Any:
    """Wrap `model` for the cluster's ranks (the default group), AdamW inside.

    Args:
        model: fragmented, the same on all ranks of the cluster.
        fragmented: tells experts from trunk.
        config: DeepSpeed configuration, checked by `check_deepspeed_config`.
        accumulation: micro-batches per step.
        learning_rate, betas, eps, weight_decay: of AdamW; the rate is set anew before each step.

    Returns:
        DeepSpeed's engine, without clipping of its own. Its `local_experts` is None, or what this rank trains besides.
    """
    import deepspeed

    optimizer = torch.optim.AdamW(
        parameter_groups(model, fragmented, weight_decay), lr=learning_rate, betas=betas, eps=eps
    )
    full = {
        "steps_per_print": 10**9,
        **config,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
    }
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=full)
    engine.local_experts = None
    if fragmented.parallel is not None:
        engine.local_experts = LocalExperts(
            fragmented,
            torch.device(engine.device),
            torch.bfloat16 if is_bf16(config) else torch.float32,
            learning_rate=learning_rate,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
        )
    return engine

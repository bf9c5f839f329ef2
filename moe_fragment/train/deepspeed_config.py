"""What a DeepSpeed configuration may say here, and what it says.

DeepSpeed sees a cluster's ranks only. Clipping, learning rate and the decision to step are the fleet's (`step.py`), so
a configuration that sets them is refused, not ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_fragment.schema import ConfigError

FLEET_FIELDS = {
    "optimizer": "train.learning_rate, train.weight_decay and train.betas",
    "scheduler": "train.schedule",
    "gradient_clipping": "train.clip_norm",
    "train_batch_size": "train.batch",
    "train_micro_batch_size_per_gpu": "train.batch and train.accumulation",
    "gradient_accumulation_steps": "train.accumulation",
}
"""DeepSpeed fields that belong to the fleet, and where a recipe sets them."""


MEASURED = "measured"
METHODS = ("parameters", "uniform", MEASURED)
"""Ways to cut a model into stages, by name; the first is the default."""
BY_TYPE = "type:"
"""Begins a way of cutting: as many layers whose class matches a regular expression in each stage."""


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
    _check_pipeline(config, stage, where)
    for device in ("offload_optimizer", "offload_param"):
        if _section(zero, device, f"{where}: zero_optimization").get("device", "none") != "none":
            raise ConfigError(f"{where}: zero_optimization.{device}: offloading is not supported")
    if _section(config, "bf16", where).get("bf16_master_weights_and_grads"):
        raise ConfigError(f"{where}: bf16.bf16_master_weights_and_grads: master weights are fp32 here")
    if _section(config, "fp16", where).get("enabled"):
        raise ConfigError(f"{where}: fp16.enabled: fp16 is not supported, use bf16 or fp32")


def _check_pipeline(config: Mapping[str, Any], zero_stage: int, where: str) -> None:
    section = _section(config, "pipeline", where)
    stages = section.get("stages", 1)
    if stages != "auto" and (not isinstance(stages, int) or isinstance(stages, bool) or stages < 1):
        raise ConfigError(f"{where}: pipeline.stages: expected a number of stages from 1, got {stages!r}")
    if section.get("activation_checkpoint_interval"):
        raise ConfigError(
            f"{where}: pipeline.activation_checkpoint_interval: set model.activation_checkpointing in the recipe, "
            f"which routes no token twice"
        )
    if pipeline_stages(config) > 1 and zero_stage != 1:
        raise ConfigError(
            f"{where}: zero_optimization.stage: expected 1, which is all that DeepSpeed's pipeline works with, got "
            f"{zero_stage}"
        )
    method = section.get("partition", METHODS[0])
    if isinstance(method, list):
        counts = [count for count in method if isinstance(count, int) and count > 0]
        if len(counts) != len(method) or len(method) != pipeline_stages(config):
            raise ConfigError(
                f"{where}: pipeline.partition: expected the number of layers of each of the {pipeline_stages(config)} "
                f"stages, each at least 1, got {method}"
            )
    elif method not in (*METHODS, "best") and not (isinstance(method, str) and method.startswith(BY_TYPE)):
        raise ConfigError(
            f"{where}: pipeline.partition: expected {', '.join(METHODS)}, {BY_TYPE}REGEX or a list of numbers of "
            f"layers, got {method!r}"
        )


def pipeline_stages(config: Mapping[str, Any]) -> int:
    """How many stages a DeepSpeed configuration cuts the model into; 1 for no pipeline."""
    stages = config.get("pipeline", {}).get("stages", 1)
    return 1 if stages == "auto" else int(stages)


def partition_method(config: Mapping[str, Any]) -> str | list[int]:
    """How: see `METHODS`, or the number of layers of each stage. DeepSpeed's own default is called `best`."""
    method: str | list[int] = config.get("pipeline", {}).get("partition", METHODS[0])
    return METHODS[0] if method == "best" else method


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

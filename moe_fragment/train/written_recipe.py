"""A recipe as it is written: the files that it names put in their place, and fields changed by dotted name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from moe_fragment.schema import ConfigError
from moe_fragment.topology import Topology
from moe_fragment.train.deepspeed_config import load_deepspeed_config


def inline_files(data: dict[str, Any], recipe: Path, base: Path | None = None) -> None:
    """Replace the files a recipe names by what they say.

    Args:
        data: changed in place.
        recipe: its file, beside which they are looked up.
        base: another directory to look in.

    Raises:
        ConfigError: a file is missing or not valid.
    """
    folder = recipe.parent if base is None else base
    topology = data.get("topology")
    if isinstance(topology, str):
        path = folder / topology
        data["topology"] = Topology.load(path).to_dict()
    deepspeed = data.get("deepspeed")
    if isinstance(deepspeed, str):
        deepspeed = data["deepspeed"] = {"config": deepspeed}
    if isinstance(deepspeed, dict):
        if isinstance(deepspeed.get("config"), str):
            deepspeed["config"] = load_deepspeed_config(folder / deepspeed["config"])
        clusters = deepspeed.get("clusters")
        if isinstance(clusters, dict):
            for name, value in clusters.items():
                if isinstance(value, str):
                    clusters[name] = load_deepspeed_config(folder / value)


def override_field(data: dict[str, Any], override: str) -> None:
    """Set a field by `section.field=value`, the value in YAML.

    Raises:
        ConfigError: it is no such thing.
    """
    dotted, separator, text = override.partition("=")
    if not separator or not dotted:
        raise ConfigError(f"override {override!r}: expected section.field=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {dotted}: not valid YAML: {text!r}") from error
    *path, last = dotted.split(".")
    node: Any = data
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"override {dotted}: {part} is not a section")
    node[last] = value

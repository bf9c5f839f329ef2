"""What clusters must agree on before they train together."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from moe_fragment.train.recipe import Recipe

_VERSIONS = ("moe_fragment", "torch", "transformers", "deepspeed", "torchft")


def joining_facts(recipe: Recipe, data: str) -> dict[str, Any]:
    """Recipe, package versions and the data's fingerprint (tokenizer included), by the name that a refusal gives."""
    return {
        **recipe.facts(),
        **{f"version of {name}": importlib.metadata.version(name) for name in _VERSIONS},
        f"data (it depends on Python's version, here {platform.python_version()})": data,
    }

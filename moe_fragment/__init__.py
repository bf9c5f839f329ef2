"""moe_fragment: train mixture-of-experts transformers across fragmented GPU clusters.

Importing this package makes the model type `moe_fragment` known to transformers' Auto classes and `cross_cluster` to
its experts interface. Both happen when transformers is imported, and the public names are loaded when they are first
used, so that `import moe_fragment` itself is quick and needs neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from moe_fragment import _hooks

if TYPE_CHECKING:
    from moe_fragment.fabric import Fabric
    from moe_fragment.models import FragmentMoeConfig, FragmentMoeForCausalLM
    from moe_fragment.models.fragment import fragment
    from moe_fragment.observe import RunLog
    from moe_fragment.placement import Placement, place_experts
    from moe_fragment.topology import Topology
    from moe_fragment.train.recipe import Recipe

__all__ = [
    "Fabric",
    "FragmentMoeConfig",
    "FragmentMoeForCausalLM",
    "Placement",
    "Recipe",
    "RunLog",
    "Topology",
    "fragment",
    "place_experts",
]

_HOMES = {
    "Fabric": "moe_fragment.fabric",
    "FragmentMoeConfig": "moe_fragment.models",
    "FragmentMoeForCausalLM": "moe_fragment.models",
    "Placement": "moe_fragment.placement",
    "Recipe": "moe_fragment.train.recipe",
    "RunLog": "moe_fragment.observe",
    "Topology": "moe_fragment.topology",
    "fragment": "moe_fragment.models.fragment",
    "place_experts": "moe_fragment.placement",
}

_hooks.install()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

"""FragmentMoe, the package's own mixture-of-experts model; `models.fragment` spreads it, or a stock one, over clusters.

The configuration can be had without the model, and both without the fabric.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_fragment.models.configuration import FragmentMoeConfig
    from moe_fragment.models.modeling import FragmentMoeForCausalLM

__all__ = ["FragmentMoeConfig", "FragmentMoeForCausalLM"]

_HOMES = {
    "FragmentMoeConfig": "moe_fragment.models.configuration",
    "FragmentMoeForCausalLM": "moe_fragment.models.modeling",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

"""Registrations with transformers, made as soon as the module they concern is imported by anybody."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import wrapt

_MODELING = "moe_fragment.models.modeling"


def install() -> None:
    """Register now what is imported already, and the rest when it is."""
    wrapt.register_post_import_hook(_configurations, "transformers.models.auto.configuration_auto")
    wrapt.register_post_import_hook(_models, "transformers.models.auto.modeling_auto")
    wrapt.register_post_import_hook(_register_models, _MODELING)
    wrapt.register_post_import_hook(_experts, "transformers.integrations.moe")


def _configurations(auto: ModuleType) -> None:
    from moe_fragment.models.configuration import FragmentMoeConfig

    auto.AutoConfig.register(FragmentMoeConfig.model_type, FragmentMoeConfig, exist_ok=True)


def _models(_auto: ModuleType) -> None:
    if _MODELING not in sys.modules:  # else it is being imported, and is not complete yet
        _register_models(_auto)


def _register_models(_module: ModuleType) -> None:
    import moe_fragment.models.register  # noqa: F401 (it registers on import)


def _experts(moe: ModuleType) -> None:
    moe.ALL_EXPERTS_FUNCTIONS.register("cross_cluster", _cross_cluster)


def _cross_cluster(*arguments: Any) -> Any:
    from moe_fragment.experts.interface import cross_cluster_experts_forward

    return cross_cluster_experts_forward(*arguments)

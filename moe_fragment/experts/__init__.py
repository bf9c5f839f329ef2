"""The expert path: each token reaches its experts, wherever they live."""

from moe_fragment.experts.interface import IMPLEMENTATION, register
from moe_fragment.experts.local import LocalSpread
from moe_fragment.experts.path import ExpertPath, LayerPlacement
from moe_fragment.experts.statistics import ExpertStatistics

__all__ = ["IMPLEMENTATION", "ExpertPath", "ExpertStatistics", "LayerPlacement", "LocalSpread", "register"]

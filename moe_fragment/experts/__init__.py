"""The expert path: each token reaches its experts, wherever they live."""

from moe_fragment.experts.interface import IMPLEMENTATION, register
from moe_fragment.experts.parallel import ExpertParallel
from moe_fragment.experts.path import ExpertPath, LayerPlacement
from moe_fragment.experts.statistics import ExpertStatistics

__all__ = ["IMPLEMENTATION", "ExpertParallel", "ExpertPath", "ExpertStatistics", "LayerPlacement", "register"]

"""Which cluster holds which expert."""

from moe_fragment.placement.placement import Placement, PlacementError
from moe_fragment.placement.policies import place_experts

__all__ = ["Placement", "PlacementError", "place_experts"]

"""Predict what a fleet will do: one module per term of the cost model, and the check against published figures.

Nothing here imports what it predicts (``train``, ``fabric``, ``sync``) or torch: predicted and measured never
share code. Each term is a few pure functions in SI units (bytes, bytes per second, seconds) whose docstrings
name their source. Not here yet: the simulator and the search over placements and strategies.
"""

from moe_fragment.planning.check.run import Outcome, check_file

__all__ = ["Outcome", "check_file"]

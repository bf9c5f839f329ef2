"""Many runs of one recipe, one after another, and one table of what they measured."""

from moe_fragment.sweep.config import Job, Sweep
from moe_fragment.sweep.run import SweepError, run_sweep
from moe_fragment.sweep.show import print_table
from moe_fragment.sweep.table import Table, build_table

__all__ = ["Job", "Sweep", "SweepError", "Table", "build_table", "print_table", "run_sweep"]

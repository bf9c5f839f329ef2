"""The run log: what a cluster measures while it trains, and how people and programs read it."""

from moe_fragment.observe.layout import (
    CHANNELS,
    SCALARS,
    STEP_DISCARDED,
    STEP_SKIPPED,
    SYNC_FAILED,
    SYNC_POISONED,
    SYNC_REFUSED,
    RunLogError,
)
from moe_fragment.observe.report import print_report, render, report
from moe_fragment.observe.runlog import RunLog
from moe_fragment.observe.writer import RunWriter

__all__ = [
    "CHANNELS",
    "SCALARS",
    "STEP_DISCARDED",
    "STEP_SKIPPED",
    "SYNC_FAILED",
    "SYNC_POISONED",
    "SYNC_REFUSED",
    "RunLog",
    "RunLogError",
    "RunWriter",
    "print_report",
    "render",
    "report",
]

"""Sync: keeping the copies of the trunk, and of replicated experts, together."""

from moe_fragment.sync.asynchronous import HOST, AsynchronousSync
from moe_fragment.sync.canonical import CanonicalVector, Run
from moe_fragment.sync.config import SyncConfig
from moe_fragment.sync.gradient import GradientSync
from moe_fragment.sync.guard import Guard
from moe_fragment.sync.mixing import MixingSync
from moe_fragment.sync.outer import OuterSGD
from moe_fragment.sync.parameter import ParameterSync
from moe_fragment.sync.report import SyncReport
from moe_fragment.sync.rounds import Rounds
from moe_fragment.sync.state import checksum
from moe_fragment.sync.syncer import Policy
from moe_fragment.sync.vector import RailVector

__all__ = [
    "HOST",
    "AsynchronousSync",
    "CanonicalVector",
    "GradientSync",
    "Guard",
    "MixingSync",
    "OuterSGD",
    "ParameterSync",
    "Policy",
    "RailVector",
    "Rounds",
    "Run",
    "SyncConfig",
    "SyncReport",
    "checksum",
]

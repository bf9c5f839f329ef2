"""Trunk sync: keeping the copies of the trunk on all clusters together."""

from moe_fragment.sync.allreduce import TrunkAllReduce
from moe_fragment.sync.canonical import CanonicalVector, Run

__all__ = ["CanonicalVector", "Run", "TrunkAllReduce"]

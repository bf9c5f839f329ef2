"""How clusters talk: membership, rails, routes, the byte meter and link emulation."""

from moe_fragment.fabric.config import FabricConfig
from moe_fragment.fabric.connect import connect
from moe_fragment.fabric.fabric import Fabric
from moe_fragment.fabric.membership import Coordinator, FleetError
from moe_fragment.fabric.routes import Route
from moe_fragment.fabric.transfer import Transfer, WaitClock
from moe_fragment.fabric.verdict import FAILED, OK, OVERFLOW, Verdict

__all__ = [
    "FAILED",
    "OK",
    "OVERFLOW",
    "Coordinator",
    "Fabric",
    "FabricConfig",
    "FleetError",
    "Route",
    "Transfer",
    "Verdict",
    "WaitClock",
    "connect",
]

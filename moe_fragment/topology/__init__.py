"""What a fleet is: its clusters, and the links between them."""

from moe_fragment.topology.cluster import Cluster, Host
from moe_fragment.topology.link import Link
from moe_fragment.topology.topology import Topology, TopologyError

__all__ = ["Cluster", "Host", "Link", "Topology", "TopologyError"]

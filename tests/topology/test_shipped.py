from __future__ import annotations

from pathlib import Path

import pytest

from moe_fragment.topology import Topology

SHIPPED = sorted((Path(__file__).parents[2] / "recipes" / "topologies").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_every_shipped_topology_loads(path: Path) -> None:
    fleet = Topology.load(path)
    assert Topology.from_dict(fleet.to_dict()) == fleet
    assert 1 <= fleet.num_rails <= min(fleet.sizes)


def test_they_are_what_their_names_say() -> None:
    fleets = {path.stem: Topology.load(path) for path in SHIPPED}
    assert fleets["two-local"].sizes == (1, 1)
    assert fleets["two-by-two"].sizes == (2, 2)
    assert fleets["two-plus-one"].sizes == (2, 1)
    assert all(fleets[name].is_local for name in ("two-local", "two-by-two", "two-plus-one"))
    assert fleets["two-local"].link("alpha", "beta").one_way_s == 0.01
    assert fleets["three-regions"].sizes == (16, 8, 8)

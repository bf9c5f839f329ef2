from __future__ import annotations

import copy
import math
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moe_fragment.topology import Cluster, Host, Link, Topology, TopologyError


def _data() -> dict[str, Any]:
    return {
        "clusters": [
            {"name": "alpha", "processes": 3},
            {"name": "beta", "hosts": [{"host": "b1", "slots": 1}, {"host": "b2", "slots": 1}]},
            {"name": "gamma", "processes": 2},
        ],
        "links": [
            {"between": ["alpha", "beta"], "bandwidth": "5 Gbit/s", "rtt": "30 ms"},
            {"between": ["gamma", "alpha"], "bandwidth": "unlimited", "distance": "80 km"},
            {"from": "beta", "to": "gamma", "bandwidth": "100 MB/s", "one_way": "5 ms", "jitter": "1 ms"},
            {"from": "gamma", "to": "beta", "bandwidth": "50 MB/s", "one_way": "7 ms", "loss": "0.1 %"},
        ],
    }


def _changed(path: str, value: Any) -> dict[str, Any]:
    """The good topology with the value at a dotted path (list indices are parts of it) set, or deleted."""
    data = copy.deepcopy(_data())
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    node: Any = data
    for part in parents:
        node = node[part]
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return data


def _sentence(data: Any, **options: Any) -> str:
    with pytest.raises(TopologyError) as caught:
        Topology.from_dict(data, "fleet.yaml", **options)
    assert "\n" not in str(caught.value)
    assert "more)" not in str(caught.value)
    return str(caught.value)


def test_what_a_topology_answers() -> None:
    fleet = Topology.from_dict(_data())
    assert fleet.names == ("alpha", "beta", "gamma")
    assert fleet.index("gamma") == 2
    assert fleet.sizes == (3, 2, 2)
    assert fleet.world_size == 7
    assert fleet.num_rails == 2
    assert fleet.coordinator is None
    assert not fleet.is_local
    assert [cluster.address for cluster in fleet.clusters] == ["localhost", "b1", "localhost"]
    assert fleet.clusters[0].accelerator == "cpu"


def test_links_are_per_direction() -> None:
    fleet = Topology.from_dict(_data())
    assert fleet.link("alpha", "beta") == Link(
        source="alpha", target="beta", bandwidth_bytes_per_s=625e6, one_way_s=0.015
    )
    assert fleet.link("beta", "alpha").source == "beta"
    assert fleet.link("alpha", "gamma").one_way_s == 0.0004
    assert fleet.link("gamma", "alpha").bandwidth_bytes_per_s == math.inf
    assert fleet.link("beta", "gamma").jitter_s == 0.001
    assert fleet.link("gamma", "beta").loss == 0.001
    for source in fleet.names:
        for target in fleet.names:
            if source != target:
                link = fleet.link(source, target)
                assert (link.source, link.target) == (source, target)
    with pytest.raises(TopologyError, match="no link from 'alpha' to itself"):
        fleet.link("alpha", "alpha")
    with pytest.raises(TopologyError, match="unknown cluster 'delta', expected one of alpha, beta, gamma"):
        fleet.link("alpha", "delta")


def test_the_order_of_the_links_does_not_matter() -> None:
    data = _data()
    data["links"].reverse()
    assert Topology.from_dict(data) == Topology.from_dict(_data())


def test_one_cluster_needs_no_link() -> None:
    fleet = Topology.from_dict({"clusters": [{"name": "alone", "processes": 4}]})
    assert fleet.is_local
    assert fleet.num_rails == 4
    assert Topology.from_dict(fleet.to_dict()) == fleet


@pytest.mark.parametrize(("sizes", "rails"), [((2, 3, 3), 2), ((4, 1), 1)])
def test_clusters_of_unequal_size_are_ordinary(sizes: tuple[int, ...], rails: int) -> None:
    """accelerate 1291 (2 + 3 + 3 GPUs: stuck) and 2780 (different device counts cannot be launched)."""
    names = "abc"[: len(sizes)]
    fleet = Topology(
        clusters=tuple(Cluster(name=name, processes=size) for name, size in zip(names, sizes, strict=True)),
        links=tuple(
            Link(source=a, target=b, bandwidth_bytes_per_s=1e6, one_way_s=0)
            for a, b in permutations(names, 2)
        ),
    )
    assert fleet.sizes == sizes
    assert fleet.world_size == sum(sizes)
    assert fleet.num_rails == rails


def test_cluster_details() -> None:
    data = _data()
    data["clusters"][1] |= {
        "accelerator": "h100",
        "bandwidth": "400 Gbit/s",
        "latency": {"rtt": "20 us"},
        "address": "beta.example",
    }
    data["clusters"][0]["latency"] = {"one_way": "10 us"}
    data |= {"rails": 1, "coordinator": "[fd00::1]:29400"}
    fleet = Topology.from_dict(data)
    assert fleet.clusters[1].bandwidth_bytes_per_s == 50e9
    assert fleet.clusters[0].one_way_s == fleet.clusters[1].one_way_s == 1e-5
    assert fleet.clusters[1].address == "beta.example"
    assert fleet.num_rails == 1
    assert fleet.coordinator == "[fd00::1]:29400"
    assert Topology.from_dict(fleet.to_dict()) == fleet


def test_the_user_of_an_ssh_host_is_no_part_of_its_address() -> None:
    cluster = Cluster(name="a", hosts=(Host(host="me@node1", slots=2),))
    assert cluster.address == "node1"


LINK = {"bandwidth": "5 Gbit/s", "rtt": "30 ms"}
RATE = "expected a rate with its unit such as '5 Gbit/s', got "


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        # Latency that does not say which, or says it twice.
        (
            "links.0",
            {"between": ["alpha", "beta"], "bandwidth": "5 Gbit/s", "latency": "30 ms"},
            "links[0].latency: does not say round trip or one way, expected rtt, one_way or distance instead",
        ),
        (
            "links.0.one_way",
            "15 ms",
            "links[0].one_way: expected only one of rtt, one_way, distance, got rtt and",
        ),
        (
            "links.0.distance",
            "8 km",
            "links[0].distance: expected only one of rtt, one_way, distance, got rtt and",
        ),
        ("links.0.rtt", ..., "links[0].rtt: expected a round trip such as '30 ms' (or one_way or distance)"),
        (
            "clusters.0.latency",
            "30 us",
            "clusters[0].latency: expected 'one_way:' or 'rtt:' before the duration",
        ),
        ("clusters.0.latency", {}, "clusters[0].latency: expected either one_way or rtt, got neither"),
        (
            "clusters.0.latency",
            {"rtt": "2 us", "one_way": "1 us"},
            "clusters[0].latency: expected either one_way or rtt, got both",
        ),
        # Units.
        ("links.0.bandwidth", 5, f"links[0].bandwidth: {RATE}5"),
        ("links.0.bandwidth", "5", f"links[0].bandwidth: {RATE}'5'"),
        ("links.0.bandwidth", "5 Gb/s", f"links[0].bandwidth: {RATE}'5 Gb/s': 'Gb/s' may mean bits or bytes"),
        ("links.0.bandwidth", "5 parsec", f"links[0].bandwidth: {RATE}'5 parsec': unknown unit 'parsec'"),
        ("links.0.bandwidth", "30 ms", f"links[0].bandwidth: {RATE}'30 ms', which is a duration"),
        ("links.0.bandwidth", ..., "links[0].bandwidth: required, but not given"),
        ("links.0.bandwidth", "0 Gbit/s", "links[0].bandwidth: expected a rate above zero"),
        ("links.0.rtt", 30, "links[0].rtt: expected a duration with its unit such as '30 ms', got 30"),
        (
            "links.0.rtt",
            "-1 ms",
            "links[0].rtt: expected a duration with its unit such as '30 ms', got '-1 ms'",
        ),
        ("links.1.distance", "80", "links[1].distance: expected a distance with its unit such as '80 km'"),
        ("links.0.jitter", 2, "links[0].jitter: expected a duration with its unit such as '30 ms', got 2"),
        (
            "links.0.loss",
            0.01,
            "links[0].loss: expected a percentage with its unit such as '0.1 %', got 0.01",
        ),
        ("links.0.loss", "100 %", "links[0].loss: expected less than 100 %"),
        ("clusters.1.bandwidth", 400, f"clusters[1].bandwidth: {RATE}400"),
        ("clusters.1.bandwidth", "0 B/s", "clusters[1].bandwidth: expected a rate above zero"),
        # Which links there are.
        ("links.3", ..., "links: no link from 'gamma' to 'beta'"),
        ("links", ..., "links: no link from 'alpha' to 'beta'"),
        (
            "links.0.between",
            ["alpha", "delta"],
            "links[0]: unknown cluster 'delta', expected one of alpha, beta",
        ),
        (
            "links.0.between",
            ["alpha", "alpha"],
            "links[0].between: expected two different clusters, got 'alpha'",
        ),
        (
            "links.0.between",
            ["alpha"],
            "links[0].between: expected two clusters, such as [alpha, beta], got 1",
        ),
        ("links.0.between", ..., "links[0].between: expected two clusters, such as [alpha, beta]"),
        ("links.0.from", "alpha", "links[0].between: expected either between, or from and to, got both"),
        ("links.2.to", ..., "links[2].to: required, but not given"),
        ("links.2.from", ..., "links[2].from: required, but not given"),
        ("links.2.to", "beta", "links[2].to: expected two different clusters, got 'beta' twice"),
        (
            "links.1",
            {"between": ["beta", "alpha"], **LINK},
            "links[1]: the link from 'beta' to 'alpha' was given before, in links[0]",
        ),
        ("links", {"between": ["alpha", "beta"]}, "links: expected a list, got a mapping"),
        ("links.0.bandwidths", "5 Gbit/s", "links[0].bandwidths: unknown field, did you mean 'bandwidth'?"),
        # Clusters.
        ("clusters", ..., "clusters: required, but not given"),
        ("clusters", [], "clusters: expected at least 1 entry, got 0"),
        ("clusters", ["alpha"], "clusters[0]: expected a mapping of fields, got 'alpha'"),
        ("clusters.2.name", "alpha", "clusters[2].name: 'alpha' is used twice"),
        ("clusters.0.name", ..., "clusters[0].name: required, but not given"),
        ("clusters.0.name", 5, "clusters[0].name: expected text, got 5"),
        (
            "clusters.0.name",
            "a/b",
            "clusters[0].name: expected letters, digits, '_', '.' and '-' only, got 'a/b'",
        ),
        ("clusters.0.processes", 0, "clusters[0].processes: expected at least 1, got 0"),
        ("clusters.0.processes", -1, "clusters[0].processes: expected at least 1, got -1"),
        ("clusters.0.processes", "2", "clusters[0].processes: expected a whole number, got '2'"),
        ("clusters.0.processes", 1.5, "clusters[0].processes: expected a whole number, got 1.5"),
        ("clusters.0.processes", True, "clusters[0].processes: expected a whole number, got true"),
        ("clusters.0.processes", ..., "clusters[0].processes: expected a number of local processes"),
        ("clusters.1.processes", 2, "clusters[1].hosts: expected only one of processes, hosts, hostfile"),
        ("clusters.1.hosts", [], "clusters[1].hosts: expected at least 1 entry, got 0"),
        ("clusters.1.hosts.1.host", "b1", "clusters[1].hosts[1].host: 'b1' is listed twice"),
        (
            "clusters.1.hosts.0.host",
            "-oX",
            "clusters[1].hosts[0].host: expected a host name or address, got '-oX'",
        ),
        ("clusters.1.hosts.0.slots", 0, "clusters[1].hosts[0].slots: expected at least 1, got 0"),
        ("clusters.1.hosts.0.slots", ..., "clusters[1].hosts[0].slots: required, but not given"),
        ("clusters.1.hosts.0.lots", 1, "clusters[1].hosts[0].lots: unknown field, did you mean 'slots'?"),
        ("clusters.1.address", "", "clusters[1].address: expected a host name or address, got ''"),
        ("clusters.1.accelerator", "", "clusters[1].accelerator: expected text that is not empty, got ''"),
        ("clusters.1.color", "red", "clusters[1].color: unknown field, expected one of accelerator, address"),
        # The fleet.
        (
            "rails",
            3,
            "rails: expected at most 2, the size of the smallest cluster 'beta' (each rail needs a rank of "
            "its own in every cluster), got 3",
        ),
        ("rails", 0, "rails: expected at least 1, got 0"),
        ("coordinator", "alpha", "coordinator: expected 'host:port', got 'alpha'"),
        ("coordinator", "alpha:99999", "coordinator: expected 'host:port', got 'alpha:99999'"),
        ("coordinator", "fd00::1:29400", "coordinator: expected 'host:port', got 'fd00::1:29400'"),
        ("cluster", [], "cluster: unknown field, did you mean 'clusters'?"),
    ],
)
def test_one_sentence_names_file_field_and_expectation(path: str, value: Any, sentence: str) -> None:
    assert _sentence(_changed(path, value)).startswith(f"fleet.yaml: {sentence}")


def test_a_topology_inside_a_recipe_is_named_with_its_whole_path() -> None:
    data = _changed("links.0.bandwidth", 5)
    assert _sentence(data, within="topology").startswith("fleet.yaml: topology.links[0].bandwidth: ")
    data = _changed("links.3", ...)
    assert _sentence(data, within="topology").startswith("fleet.yaml: topology.links: no link from 'gamma'")


def test_not_even_a_mapping() -> None:
    assert _sentence("two-local") == "fleet.yaml: expected a mapping of fields, got 'two-local'"


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    with pytest.raises(TopologyError, match="fleet.yaml: no such file"):
        Topology.load(path)
    path.write_text("")
    with pytest.raises(TopologyError, match="fleet.yaml: the file is empty"):
        Topology.load(path)
    path.write_text("clusters: [\n")
    with pytest.raises(TopologyError, match="fleet.yaml: line 2, column 1: not valid YAML"):
        Topology.load(path)
    path.write_text(yaml.safe_dump(_changed("links.0.bandwidth", 5)))
    with pytest.raises(TopologyError, match=r"fleet.yaml: links\[0\].bandwidth: expected a rate"):
        Topology.load(path)
    path.write_text(yaml.safe_dump(_data()))
    assert Topology.load(path) == Topology.from_dict(_data())


def test_what_is_built_in_python_is_checked_too() -> None:
    alpha, beta = Cluster(name="alpha", processes=1), Cluster(name="beta", processes=1)
    there = Link(source="alpha", target="beta", bandwidth_bytes_per_s=1e6, one_way_s=0.01)
    back = Link(source="beta", target="alpha", bandwidth_bytes_per_s=1e6, one_way_s=0.01)
    fleet = Topology(clusters=(alpha, beta), links=(back, there))
    assert fleet.link("alpha", "beta") is there
    with pytest.raises(ValueError, match="links: no link from 'beta' to 'alpha'"):
        Topology(clusters=(alpha, beta), links=(there,))
    with pytest.raises(ValueError, match=r"links\[1\]: the link from 'alpha' to 'beta' was given before"):
        Topology(clusters=(alpha, beta), links=(there, there))
    with pytest.raises(ValueError, match=r"clusters\[1\].name: 'alpha' is used twice"):
        Topology(clusters=(alpha, alpha))
    with pytest.raises(ValueError, match="bandwidth: expected a rate above zero"):
        Link(source="alpha", target="beta", bandwidth_bytes_per_s=math.nan, one_way_s=0.01)
    with pytest.raises(ValueError, match="one_way: expected a finite duration"):
        Link(source="alpha", target="beta", bandwidth_bytes_per_s=1e6, one_way_s=-1)
    with pytest.raises(ValueError, match="processes: expected either processes or hosts, got both"):
        Cluster(name="a", processes=1, hosts=(Host(host="h", slots=1),))
    with pytest.raises(ValidationError, match="frozen"):
        fleet.rails = 1  # type: ignore[misc]


_RATES = st.one_of(st.just(math.inf), st.floats(min_value=1e-3, max_value=1e14))
_DELAYS = st.floats(min_value=0, max_value=100)


@st.composite
def _fleets(draw: st.DrawFn) -> Topology:
    names = draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=4, unique=True))
    clusters = []
    for name in names:
        inside = {"bandwidth_bytes_per_s": draw(st.none() | _RATES), "one_way_s": draw(st.none() | _DELAYS)}
        slots = draw(st.lists(st.integers(1, 9), max_size=3))
        if slots:
            hosts = tuple(Host(host=f"{name}{i}", slots=n) for i, n in enumerate(slots))
            clusters.append(Cluster(name=name, hosts=hosts, **inside))
        else:
            clusters.append(Cluster(name=name, processes=draw(st.integers(1, 9)), **inside))
    alike = draw(st.booleans())
    links: dict[tuple[str, str], Link] = {}
    for source in names:
        for target in names:
            if source == target:
                continue
            back = links.get((target, source))
            if alike and back is not None:
                links[source, target] = back.model_copy(update={"source": source, "target": target})
            else:
                links[source, target] = Link(
                    source=source,
                    target=target,
                    bandwidth_bytes_per_s=draw(_RATES),
                    one_way_s=draw(_DELAYS),
                    jitter_s=draw(_DELAYS),
                    loss=draw(st.floats(min_value=0, max_value=0.99)),
                )
    rails = draw(st.none() | st.integers(1, min(cluster.size for cluster in clusters)))
    coordinator = draw(st.sampled_from([None, "10.0.0.1:29400"]))
    return Topology(clusters=clusters, links=links.values(), rails=rails, coordinator=coordinator)


@given(_fleets())
def test_to_dict_reads_back_equal_through_a_file(fleet: Topology) -> None:
    text = yaml.safe_dump(fleet.to_dict())
    assert Topology.from_dict(yaml.safe_load(text)) == fleet
    assert hash(Topology.from_dict(yaml.safe_load(text))) == hash(fleet)

"""DeepSpeed 3669 and 575 (errors that name nothing, a missing file), mpich 6719 (no newline at the end)."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_fragment.topology import Host, Topology, TopologyError


def _load(folder: Path, hostfile: str | None) -> Topology:
    if hostfile is not None:
        (folder / "alpha.hosts").write_text(hostfile)
    path = folder / "fleet.yaml"
    path.write_text("clusters:\n  - {name: alpha, hostfile: alpha.hosts}\n")
    return Topology.load(path)


@pytest.mark.parametrize(
    "text",
    [
        "node-1 slots=8\nnode-2 slots=4\n",
        "node-1 slots=8\nnode-2 slots=4",  # the last line counts whole
        "# the fleet\n\n  node-1\tslots=8  # rack 1\r\nnode-2 slots=4\r\n",
    ],
)
def test_hosts_of_a_hostfile(tmp_path: Path, text: str) -> None:
    cluster = _load(tmp_path, text).clusters[0]
    assert cluster.hosts == (Host(host="node-1", slots=8), Host(host="node-2", slots=4))
    assert cluster.size == 12
    assert cluster.address == "node-1"


def test_what_is_written_does_not_need_the_hostfile(tmp_path: Path) -> None:
    fleet = _load(tmp_path, "node-1 slots=8\n")
    assert Topology.from_dict(fleet.to_dict()) == fleet
    assert "hostfile" not in fleet.to_dict()["clusters"][0]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ok slots=1\nhost lots=8\n", "alpha.hosts, line 2: expected 'host slots=8', got 'host lots=8'"),
        ("host\n", "alpha.hosts, line 1: expected 'host slots=8', got 'host'"),
        ("host slots=\n", "alpha.hosts, line 1: expected 'host slots=8', got 'host slots='"),
        ("host slots=0\n", "alpha.hosts, line 1: expected 'host slots=8', got 'host slots=0'"),
        ("host slots=8x\n", "alpha.hosts, line 1: expected 'host slots=8', got 'host slots=8x'"),
        ("host slots=8 4\n", "alpha.hosts, line 1: expected 'host slots=8', got 'host slots=8 4'"),
        ("a slots=1\n\na slots=2\n", "alpha.hosts, line 3: host 'a' is listed twice"),
        ("", "alpha.hosts: expected lines such as 'host slots=8', got none"),
        ("# none\n", "alpha.hosts: expected lines such as 'host slots=8', got none"),
        (None, "alpha.hosts: no such hostfile"),
    ],
)
def test_a_bad_hostfile_names_file_line_and_text(tmp_path: Path, text: str | None, sentence: str) -> None:
    with pytest.raises(TopologyError) as caught:
        _load(tmp_path, text)
    start = f"{tmp_path / 'fleet.yaml'}: clusters[0].hostfile: {tmp_path}"
    assert str(caught.value) == f"{start}/{sentence}"


def test_a_hostfile_that_is_no_path() -> None:
    with pytest.raises(
        TopologyError, match=r"clusters\[0\].hostfile: expected the path of a hostfile, got 8"
    ):
        Topology.from_dict({"clusters": [{"name": "alpha", "hostfile": 8}]})

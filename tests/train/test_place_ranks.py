"""Which devices each cluster of a local fleet gets."""

from __future__ import annotations

import pytest

from moe_fragment.schema import ConfigError
from moe_fragment.topology import Topology
from moe_fragment.train.launch import place_ranks


def fleet(*accelerators: str) -> Topology:
    """Clusters of 2, 1 and 1 processes on these accelerators."""
    names = ("alpha", "beta", "gamma")
    return Topology.from_dict(
        {
            "clusters": [
                {"name": name, "processes": processes, "accelerator": accelerator}
                for name, processes, accelerator in zip(names, (2, 1, 1), accelerators, strict=True)
            ],
            "links": [
                {"between": list(pair), "bandwidth": "1 Gbit/s", "rtt": "10 ms"}
                for pair in (names[:2], names[1:], names[::2])
            ],
        }
    )


def test_a_cluster_on_the_cpu_gets_a_number_of_processes_whatever_the_machine_has() -> None:
    expected = {"alpha": ["--num_gpus", "2"], "beta": ["--num_gpus", "1"], "gamma": ["--num_gpus", "1"]}
    assert place_ranks(fleet("cpu", "cpu", "cpu"), 0) == expected
    assert place_ranks(fleet("cpu", "cpu", "cpu"), 8) == expected


def test_no_two_clusters_share_a_gpu() -> None:
    assert place_ranks(fleet("h100", "cpu", "a100"), 4) == {
        "alpha": ["--include", "localhost:0,1"],
        "beta": ["--num_gpus", "1"],
        "gamma": ["--include", "localhost:2"],
    }


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="4 ranks need a GPU each, this machine has 2"):
        place_ranks(fleet("h100", "h100", "h100"), 2)

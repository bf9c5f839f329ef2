"""Which devices each cluster of a local fleet gets."""

from __future__ import annotations

import pytest

from moe_fragment.schema import ConfigError
from moe_fragment.topology import Topology
from moe_fragment.train.launch import place_ranks

FLEET = Topology.from_dict(
    {
        "clusters": [{"name": "alpha", "processes": 2}, {"name": "beta", "processes": 1}],
        "links": [{"between": ["alpha", "beta"], "bandwidth": "1 Gbit/s", "rtt": "10 ms"}],
    }
)


def test_without_gpus_a_cluster_gets_a_number_of_processes() -> None:
    assert place_ranks(FLEET, 0) == {"alpha": ["--num_gpus", "2"], "beta": ["--num_gpus", "1"]}


def test_with_gpus_no_two_clusters_share_one() -> None:
    assert place_ranks(FLEET, 4) == {
        "alpha": ["--include", "localhost:0,1"],
        "beta": ["--include", "localhost:2"],
    }


def test_too_few_gpus_are_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="3 ranks need a GPU each, this machine has 2"):
        place_ranks(FLEET, 2)

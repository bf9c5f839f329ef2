"""How a fleet starts, and the one sentence when it cannot."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from moe_fragment.fabric import Coordinator, FabricConfig, FleetError
from moe_fragment.fabric.membership import connect_store, join_fleet
from moe_fragment.schema import ConfigError
from moe_fragment.train.world import free_port


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def join_all(store: dist.TCPStore, facts_of: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Every cluster joins at once; their errors by name."""
    errors: dict[str, str] = {}

    def join(name: str) -> None:
        client = dist.TCPStore("localhost", store.port, is_master=False, wait_for_workers=False)
        try:
            join_fleet(client, name, tuple(facts_of), facts_of[name], 10.0)
        except FleetError as error:
            errors[name] = str(error)

    threads = [threading.Thread(target=join, args=(name,)) for name in facts_of]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    return errors


def test_clusters_that_agree_start(store: dist.TCPStore) -> None:
    assert join_all(store, {"ada": {"recipe": "x"}, "bob": {"recipe": "x"}}) == {}


def test_what_differs_is_named_with_both_values(store: dist.TCPStore) -> None:
    facts = {"ada": {"recipe": "x", "torch": "2.13"}, "bob": {"recipe": "x", "torch": "2.12"}}
    errors = join_all(store, facts)
    assert errors == {
        "ada": "clusters ada and bob differ in torch: '2.13' against '2.12'",
        "bob": "clusters bob and ada differ in torch: '2.12' against '2.13'",
    }


def test_a_missing_cluster_is_named_within_the_timeout(store: dist.TCPStore) -> None:
    began = time.monotonic()
    with pytest.raises(FleetError, match="cluster bob and cyd did not join within 0.5 s.*1 of 3 clusters"):
        join_fleet(store, "ada", ("ada", "bob", "cyd"), {}, 0.5)
    assert time.monotonic() - began < 5.0


def test_a_name_used_twice_is_refused(store: dist.TCPStore) -> None:
    join_fleet(store, "ada", ("ada",), {}, 1.0)
    with pytest.raises(FleetError, match="cluster ada has joined this fleet already"):
        join_fleet(store, "ada", ("ada",), {}, 1.0)


def test_a_taken_port_is_named(store: dist.TCPStore) -> None:
    """pytorch#126510: EADDRINUSE is a sentence with the port in it."""
    with pytest.raises(FleetError, match=f"cannot listen on port {store.port}"):
        Coordinator(1, port=store.port)


def test_no_coordinator_is_named_within_the_timeout() -> None:
    port = free_port()
    began = time.monotonic()
    with pytest.raises(FleetError, match=f"no coordinator answers at localhost:{port} within 1 s"):
        connect_store(f"localhost:{port}", 1.0)
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize(
    ("section", "field"),
    [
        ({"exchange_timeout": "3 s"}, "heartbeat_timeout"),
        ({"quorum_timeout": "60 s"}, "exchange_timeout"),
        ({"join_timeout": "2 minutes"}, "quorum_timeout"),
    ],
)
def test_timeouts_form_a_chain(section: dict[str, str], field: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=f"{field}.*heartbeat < exchange < quorum < join"):
        FabricConfig(**section)  # type: ignore[arg-type]


def test_shipped_timeouts_are_a_chain() -> None:
    config = FabricConfig()
    assert (
        config.heartbeat_timeout_s
        < config.exchange_timeout_s
        < config.quorum_timeout_s
        < config.join_timeout_s
    )

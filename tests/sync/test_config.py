"""The sync section: defaults by strategy, presets, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from moe_fragment.schema import explain
from moe_fragment.sync import SyncConfig
from moe_fragment.sync.config import PRESETS


def test_defaults_by_strategy() -> None:
    assert SyncConfig().is_gradient
    assert SyncConfig(strategy="butterfly").is_gradient
    local = SyncConfig(strategy="local_sgd")
    assert (local.every, local.outer.learning_rate, local.outer.momentum) == (32, 1.0, 0.0)
    diloco = SyncConfig(strategy="diloco")
    assert (diloco.every, diloco.outer.learning_rate, diloco.outer.momentum) == (100, 0.7, 0.9)
    changed = SyncConfig(strategy="diloco", outer={"momentum": 0.5})
    assert (changed.outer.learning_rate, changed.outer.momentum) == (0.7, 0.5)
    streaming = SyncConfig(strategy="streaming_diloco")
    assert (streaming.overlap, streaming.mix, streaming.outer.learning_rate) == (1, 0.5, 0.4)
    teleport = SyncConfig(strategy="teleport")
    assert teleport.guard is not None
    assert SyncConfig(strategy="butterfly", rounds="one", every=4).only_mixes
    decoupled = SyncConfig(strategy="decoupled")
    assert decoupled.is_asynchronous
    assert (decoupled.every, decoupled.overlap, decoupled.quorum, decoupled.merge) == (24, 2, 1, "rda")
    server = SyncConfig(strategy="parameter_server", staleness=2)
    assert (server.outer.learning_rate, server.outer.momentum, server.staleness) == (1.0, 0.0, 2)


def test_presets() -> None:
    """SparseLoCo is 146.3 times smaller than fp32; an explicit field overrides a preset's."""
    for name, fields in PRESETS.items():
        assert SyncConfig(preset=name).strategy == fields["strategy"]
    sparse = SyncConfig(preset="sparseloco", every=15)
    assert (sparse.every, sparse.error_feedback) == (15, 0.95)
    size = 4096 * 4096
    payload = sparse.build_codec().payload_bytes(size)
    assert payload is not None
    assert 4 * size / payload == pytest.approx(146.3, rel=0.02)
    fp4 = SyncConfig(preset="streaming_fp4")
    bits = fp4.build_codec().payload_bytes(size)
    assert bits is not None
    # A bf16 gradient in each of 100 steps against one pseudo-gradient in E3M0.
    assert 100 * 2 * size / bits == pytest.approx(400, rel=0.02)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "gossip"}, "sync.strategy: expected"),
    ({"strategy": "allreduce", "every": 5}, "sync.every: has no effect with strategy allreduce"),
    ({"strategy": "local_sgd", "fragments": 2}, "sync.fragments: has no effect with strategy local_sgd"),
    ({"strategy": "teleport", "codec": "int8"}, "sync.codec: has no effect with strategy teleport"),
    ({"codec": "sign"}, "sync.error_feedback: required with two bits or less"),
    ({"codec": "int2"}, "sync.error_feedback: required with two bits or less"),
    (
        {"codec": [{"topk": {}}, {"sigma": {"bits": 2}}]},
        "sync.error_feedback: required with two bits or less",
    ),
    ({"error_feedback": 0.9}, "sync.error_feedback: has no effect without a codec"),
    ({"codec": "int8", "error_feedback": 1.5}, "sync.error_feedback"),
    ({"codec": "int9"}, "sync.codec"),
    ({"codec": {"int8": {"blocks": 3}}}, "sync.codec"),
    ({"preset": "sparselocco"}, "sync.preset: expected one of sparseloco, streaming_fp4"),
    ({"preset": "sparseloco", "strategy": "local_sgd"}, "sync.strategy: preset sparseloco is one of diloco"),
    ({"strategy": "diloco", "every": 0}, "sync.every"),
    ({"strategy": "diloco", "outer": {"lr": 1}}, "sync.outer.lr: unknown field"),
    ({"strategy": "diloco", "outer": {"momentum": 1.0}}, "sync.outer.momentum"),
    (
        {"strategy": "streaming_diloco", "every": 8, "fragments": 4, "overlap": 2},
        "sync.overlap: expected less than every / fragments = 2 steps, got 2",
    ),
    ({"strategy": "teleport", "guard": {"warn": 2.0}}, "sync.guard.warn: expected at most refuse"),
    (
        {"strategy": "butterfly", "rounds": "one", "check_every": 3},
        "sync.check_every: has no effect with rounds: one",
    ),
    ({"steps": 3}, "sync.steps: unknown field"),
    ({"preset": "sparseloco", "guard": {}}, "sync.guard: cannot tell how far copies are apart"),
    ({"codec": "int8", "divide_by": "contributors"}, "sync.divide_by: has no effect without a sparsifier"),
    ({"strategy": "butterfly", "guard": {}}, "sync.guard: has no effect with every: 1"),
    ({"strategy": "decoupled", "mix": 0.5}, "sync.mix: has no effect with strategy decoupled"),
    (
        {"strategy": "parameter_server", "quorum": 2},
        "sync.quorum: has no effect with strategy parameter_server",
    ),
    ({"strategy": "decoupled", "grace": 2}, "sync.grace"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SyncConfig(**fields)
    said = explain(caught.value, "", "sync")
    assert said.startswith(sentence), said

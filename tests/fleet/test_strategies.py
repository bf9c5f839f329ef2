"""Every trunk sync strategy, whatever way a cluster's ranks hold the model: copies end equal, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fleet.harness import Fleets
from tests.train.runs import EVERYWHERE, losses_of, recipe_for, state_of, train

STEPS = 12
OUTER = {"learning_rate": 0.7, "momentum": 0.5}
STRATEGIES: dict[str, dict[str, Any]] = {
    "allreduce": {"codec": "int8", "error_feedback": 1.0},
    "butterfly": {"strategy": "butterfly"},
    "butterfly, parameters": {"strategy": "butterfly", "every": 3},
    "mixing": {"strategy": "butterfly", "rounds": "one", "every": 3},
    "local_sgd": {"strategy": "local_sgd", "every": 3, "codec": "int4", "error_feedback": 0.9},
    "teleport": {"strategy": "teleport", "every": 4},
    "diloco": {"strategy": "diloco", "every": 3, "outer": OUTER},
    "streaming_diloco": {
        "strategy": "streaming_diloco",
        "every": 4,
        "fragments": 2,
        "overlap": 1,
        "codec": "fp4",
    },
    "decoupled": {"strategy": "decoupled", "every": 3, "fragments": 2, "outer": OUTER},
    "parameter_server": {"strategy": "parameter_server", "every": 3, "staleness": 2},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"zero": "pipeline2-zero1-fp32", "config": {"tie_word_embeddings": True}},
    "experts spread": {"zero": "zero3-fp32"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategy(fleets: Fleets, tmp_path: Path, strategy: str, layout: str) -> None:
    apart = strategy in ("decoupled", "parameter_server")
    sections: dict[str, Any] = {"sync": STRATEGIES[strategy], **(EVERYWHERE if apart else {})}
    if layout == "experts spread":
        sections["experts"] = {**sections.get("experts", {}), "local_parallel": True}
    changes = LAYOUTS[layout]
    recipe = recipe_for(
        tmp_path, model="qwen3", sizes=(2, 2), sections=sections, accumulation=2, steps=STEPS, **changes
    )
    fleets(2, 2, stages=2 if layout == "pipeline" else 1).run(train, recipe)
    losses = losses_of(tmp_path, recipe)
    for cluster in ("ada", "bob"):
        assert losses[cluster, STEPS] < losses[cluster, 1] - 1.0
    state = state_of(tmp_path, recipe, STEPS)
    ours = {
        name.removeprefix("ada "): tensor for name, tensor in state.items() if name.startswith("ada weight")
    }
    shared = {name: tensor for name, tensor in ours.items() if f"bob {name}" in state}
    assert "weight model.norm.weight" in shared
    assert any("#" in name for name in shared) == apart
    if strategy != "mixing":  # whose copies stay a little apart
        differ = [name for name, tensor in shared.items() if not torch.equal(state[f"bob {name}"], tensor)]
        assert differ == []

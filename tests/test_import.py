"""`import moe_fragment` is quick, starts nothing, and makes the package known to transformers whoever comes first."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

import moe_fragment

HEAVY = ("torch", "transformers", "deepspeed", "torchft", "datasets", "pandas")

QUIET = """
import sys, threading, time, os
before = time.perf_counter()
import moe_fragment
took = time.perf_counter() - before
heavy = [name for name in {heavy!r} if name in sys.modules]
children = [entry for entry in os.listdir("/proc") if entry.isdigit() and children_of(entry) == os.getpid()]
print(heavy, threading.active_count(), len(children), took < 1.0)
"""
PARENT = """
def children_of(pid):
    try:
        return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
    except OSError:
        return None
"""
KNOWN = """
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
config = AutoConfig.for_model("moe_fragment", vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, intermediate_size=8, moe_intermediate_size=8, num_experts=2, num_experts_per_tok=1)
print(type(config).__name__, type(AutoModelForCausalLM.from_config(config)).__name__,
    type(AutoModel.from_config(config)).__name__, "cross_cluster" in ALL_EXPERTS_FUNCTIONS.keys())
"""
NAMES = "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM\n"


def start(code: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def outputs(codes: Sequence[str]) -> list[str]:
    """What these programs print; they run side by side."""
    found = []
    for process in [start(code) for code in codes]:
        out, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        found.append(out.strip())
    return found


def test_import_is_light() -> None:
    assert outputs([PARENT + QUIET.format(heavy=HEAVY)]) == ["[] 1 0 True"]


@pytest.mark.timeout(120)
def test_auto_classes_know_the_model_whichever_is_imported_first() -> None:
    expected = "FragmentMoeConfig FragmentMoeForCausalLM FragmentMoeModel True"
    before = "import moe_fragment\n" + NAMES + KNOWN
    after = NAMES + "import moe_fragment\n" + KNOWN
    assert outputs([before, after]) == [expected, expected]


def test_public_names_resolve() -> None:
    for name in moe_fragment.__all__:
        value = getattr(moe_fragment, name)
        home = importlib.import_module(moe_fragment._HOMES[name])
        assert value is getattr(home, name)
        assert name in dir(moe_fragment)
    assert set(moe_fragment.__all__) == set(moe_fragment._HOMES)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        moe_fragment.nothing  # noqa: B018

"""The demo, whole: what `make demo` runs, and what a person does with its result."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from moe_fragment.cli import main; main()"]
PROMPTS = ("The ", "If the ", "An object ", "This method ")


def run(*arguments: str) -> Any:
    """A `moe-fragment` command's JSON."""
    done = subprocess.run(
        [*COMMAND, *arguments, "--json"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo_learns_its_text_and_its_export_writes_words(tmp_path: Path) -> None:
    """Evaluation loss well below the unigram entropy; most words that plain transformers generates are real ones."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from moe_fragment.train.corpus import BUILTIN
    from moe_fragment.train.data import ClusterData
    from moe_fragment.train.recipe import Recipe

    recipe = ROOT / "recipes" / "demo.yaml"
    outcome = run("launch", str(recipe), f"out={tmp_path}", "--quiet")
    loaded = Recipe.load(recipe)
    entropy = ClusterData(loaded.data, loaded.fleet().names, 0).unigram_entropy()
    assert outcome["emulated"]
    assert outcome["steps"] == loaded.train.steps
    assert outcome["eval_loss"] < 0.62 * entropy, (outcome["eval_loss"], entropy)

    report = run("report", outcome["run_dir"])
    assert report["wan_bytes"]["dispatch"] > report["wan_bytes"]["trunk"] > 0
    assert 0.3 < report["remote_fraction"] < 0.7

    out = tmp_path / "exported"
    exported = run("export", outcome["run_dir"], "--out", str(out))
    assert not exported["needs_moe_fragment"]
    model = AutoModelForCausalLM.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    known = {
        word
        for domain in BUILTIN.values()
        for text in domain()["text"]
        for word in re.findall(r"[a-z]{3,}", text.lower())
    }
    words: list[str] = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        text = tokenizer.decode(model.generate(**inputs, max_new_tokens=120, do_sample=False)[0])
        print(repr(text))
        words += re.findall(r"[a-z]{3,}", text.lower())[1:-1]
    share = sum(word in known for word in words) / len(words)
    assert len(words) > 20
    assert share > 0.6, (share, words)


LAUNCHES = re.findall(r"^moe-fragment launch ([^#\n]*)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", LAUNCHES)
def test_launches_of_the_readme(tmp_path: Path, command: str) -> None:
    """As written, but for a few steps only; the one with less traffic has none for tokens, and a trunk codec at work;
    the pipeline has stages.
    """
    outcome = run("launch", *command.split(), "train.steps=6", f"out={tmp_path}", "--quiet")
    assert outcome["steps"] == 6
    sent = outcome["wan_bytes"]
    if "sparseloco" in command:
        assert sent["dispatch"] == sent["combine"] == 0
        assert 0 < sent["trunk"] < 1e6
        assert run("report", outcome["run_dir"])["codec_error"] > 0
    if "pipeline" in command:
        clusters = run("report", outcome["run_dir"])["per_cluster"].values()
        assert [len(values["stages"]) for values in clusters] == [2, 2]


def test_the_readme_has_launches() -> None:
    assert len(LAUNCHES) == 4

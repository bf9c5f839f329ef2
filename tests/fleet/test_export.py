"""From the checkpoints of a fleet to a directory that plain `transformers` opens, without moe_fragment anywhere."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from moe_fragment.train.checkpoint import MANIFEST, CheckpointError, checkpoint_path
from moe_fragment.train.export import export, open_checkpoints, whole_state
from tests.fleet.harness import Fleets
from tests.train.runs import recipe_for, train

PROMPT = "the expert tokens wander"
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3": ("qwen3", {}, "Qwen3MoeForCausalLM"),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}, "Qwen3MoeForCausalLM"),
    "mixtral": ("mixtral", {}, "MixtralForCausalLM"),
    "fragment": ("fragment", {}, "Dots1ForCausalLM"),
    "fragment-tied": ("fragment", {"tie_word_embeddings": True, "qk_norm": False}, "Glm4MoeForCausalLM"),
    "fragment-piped": ("fragment", {"tie_word_embeddings": True}, "Dots1ForCausalLM"),
    "qwen3-piped": ("qwen3", {}, "Qwen3MoeForCausalLM"),
    "fragment-own": ("fragment", {"scoring": "softmax", "router_bias": True}, "FragmentMoeForCausalLM"),
}
"""Model of `tests.train.runs`, changes to its configuration, and the class that opens it."""

ALONE = """
import json, sys
sys.modules["moe_fragment"] = None  # whoever imports it fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from safetensors.torch import save_file
torch.set_num_threads(1)
found, texts = {}, {}
for line in sys.stdin:
    name, path, prompt = json.loads(line)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        found[name] = model(input_ids=ids).logits.float()
        text = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    texts[name] = [type(model).__name__, str(model.dtype), tokenizer.decode(text[0])]
save_file(found, sys.argv[1])
print(json.dumps(texts))
"""


@pytest.fixture(scope="module")
def runs(fleets: Fleets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of three steps, one of each kind, below one directory."""
    home = tmp_path_factory.mktemp("export")
    for name, (model, config, _) in KINDS.items():
        changes: dict[str, Any] = {"steps": 3, "checkpoint_every": 2, "learning_rate": 0.05}
        if name.endswith("piped"):
            changes |= {"sizes": (2, 2), "zero": "pipeline2-zero1-fp32"}
        fleet = fleets(2, 2, stages=2) if name.endswith("piped") else fleets(2, 1)
        fleet.run(train, recipe_for(home, name=name, model=model, config=config, **changes))
    return home


def in_process(run: Path, dtype: torch.dtype) -> Any:
    """The whole model of a run's newest checkpoint, of the class it was trained as."""
    checkpoints = open_checkpoints(run)
    config = AutoConfig.for_model(**next(iter(checkpoints.values())).manifest.model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(whole_state(checkpoints), strict=False)
    model.tie_weights()
    return model.to(dtype).eval()


@torch.no_grad()
def answer(model: Any, tokenizer: Any) -> tuple[torch.Tensor, str]:
    """Logits of the prompt and the text that follows it."""
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    text = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return model(input_ids=ids).logits.float(), tokenizer.decode(text[0])


@pytest.mark.timeout(300)
def test_plain_transformers_gives_the_same_logits_and_text(runs: Path, tmp_path: Path) -> None:
    """transformers#30202, #41038: tied and untied embeddings make the round trip."""
    jobs = []
    for name, (_, _, architecture) in KINDS.items():
        exported = export(runs / name, tmp_path / name)
        assert (exported.step, exported.architecture) == (3, architecture)
        assert exported.needs_moe_fragment == (name == "fragment-own")
        if not exported.needs_moe_fragment:
            jobs.append((name, str(tmp_path / name), PROMPT))
    assert "router_bias with scoring softmax" in exported.why
    alone = subprocess.run(
        [sys.executable, "-I", "-c", ALONE, str(tmp_path / "logits.safetensors")],
        input="\n".join(map(json.dumps, jobs)),
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0, alone.stderr
    found, texts = load_file(tmp_path / "logits.safetensors"), json.loads(alone.stdout)
    assert set(found) == {name for name, _, _ in jobs}
    torch.set_num_threads(1)
    for name, path, _ in jobs:
        tokenizer = AutoTokenizer.from_pretrained(path)
        logits, text = answer(in_process(runs / name, torch.float32), tokenizer)
        assert texts[name] == [KINDS[name][2], "torch.float32", text]
        assert torch.equal(found[name], logits), f"{name}: {float((found[name] - logits).abs().max()):.1e}"
        assert logits.std() > 0.1, "three steps have taught it something"


def test_own_class_makes_the_round_trip(runs: Path, tmp_path: Path) -> None:
    export(runs / "fragment-own", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    logits, text = answer(in_process(runs / "fragment-own", torch.float32), tokenizer)
    found, words = answer(model, tokenizer)
    assert torch.equal(found, logits)
    assert words == text


@pytest.mark.parametrize("name", ["qwen3-tied", "fragment"])
def test_bf16(runs: Path, tmp_path: Path, name: str) -> None:
    """Weights are rounded once; the router's, where the stock class keeps them in fp32, not at all."""
    export(runs / name, tmp_path / "half", dtype=torch.bfloat16)
    export(runs / name, tmp_path / "full")
    half, full = (
        AutoModelForCausalLM.from_pretrained(tmp_path / where).state_dict() for where in ("half", "full")
    )
    assert half.keys() == full.keys()
    kept = {key for key, tensor in half.items() if tensor.dtype == torch.float32}
    routers = ("mlp.gate.weight", "e_score_correction_bias") if name == "fragment" else ("nothing",)
    assert kept == {key for key in full if key.endswith(routers)}
    for key, tensor in full.items():
        assert torch.equal(half[key], tensor.to(half[key].dtype)), key


def test_earlier_step(runs: Path, tmp_path: Path) -> None:
    exported = export(runs / "mixtral", tmp_path / "out", step=2)
    assert exported.step == 2
    with pytest.raises(CheckpointError, match="step 1 was not saved by all clusters; they share \\[2, 3\\]"):
        export(runs / "mixtral", tmp_path / "other", step=1)


def test_what_cannot_be_exported(runs: Path, tmp_path: Path) -> None:
    def refuse(sentence: str, out: str = "out", run: Path = tmp_path / "run") -> None:
        with pytest.raises(CheckpointError, match=sentence):
            export(run, tmp_path / out)
        assert not (tmp_path / "out").exists()

    shutil.copytree(runs / "qwen3", tmp_path / "run")
    refuse("run: is not empty; choose another directory", out="run")
    refuse("nowhere: no checkpoints of any cluster there", run=tmp_path / "nowhere")
    shutil.move(tmp_path / "run" / "bob", tmp_path / "bob")
    refuse(
        "cluster ada shares its experts with bob, whose directory is not here; copy the run directories of all"
    )
    shutil.move(tmp_path / "bob", tmp_path / "run" / "bob")
    shutil.rmtree(checkpoint_path(tmp_path / "run" / "bob", 3))
    assert export(tmp_path / "run", tmp_path / "older").step == 2
    alter(checkpoint_path(tmp_path / "run" / "bob", 2), "weight|model.norm.weight|0")
    refuse("clusters ada and bob hold different copies of model.norm.weight")


def alter(path: Path, key: str) -> None:
    """Change a tensor of a checkpoint and make its manifest agree with the change."""
    from moe_fragment.train import checkpoint

    file = path / "rank-00000.safetensors"
    tensors = load_file(file)
    tensors[key] = tensors[key] + 1
    save_file(tensors, file)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][0] |= checkpoint._seal(file)
    (path / MANIFEST).write_text(json.dumps(manifest))

"""What a recipe may say: everything shipped loads, and what cannot work is refused before a process starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe_fragment import cli
from moe_fragment.schema import ConfigError
from moe_fragment.topology import Topology
from moe_fragment.train import launch
from moe_fragment.train.deepspeed_config import check_deepspeed_config, load_deepspeed_config
from moe_fragment.train.model import check_model
from moe_fragment.train.recipe import Recipe, split_batch
from tests.train.runs import ROOT, recipe_for

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
TOPOLOGIES = sorted((ROOT / "recipes" / "topologies").glob("*.yaml"))
DEEPSPEED = sorted((ROOT / "ds_configs").glob("*.json"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_loads(path: Path) -> None:
    recipe = Recipe.load(path)
    check_model(recipe, recipe.fleet())
    again = Recipe.from_dict(yaml.safe_load(recipe.dump()))
    assert again == recipe
    assert Topology.from_dict(yaml.safe_load(recipe.dump_topology())) == recipe.fleet()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
@pytest.mark.parametrize("config", DEEPSPEED, ids=lambda path: path.stem)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda path: path.stem)
def test_shipped_parts_fit_together(path: Path, config: Path, topology: Path) -> None:
    mixture = "data.mixture={}"  # the recipe's names its own clusters
    stages = load_deepspeed_config(config).get("pipeline", {}).get("stages", 1)
    overrides = [f"topology={topology}", f"deepspeed={config}", mixture, "fabric.emulate=false"]
    if any(size % stages for size in Topology.load(topology).sizes):
        with pytest.raises(
            ConfigError, match=r"pipeline\.stages: 2 stages cannot be of equal width on cluster"
        ):
            Recipe.load(path, overrides)
        return
    recipe = Recipe.load(path, overrides)
    assert recipe.deepspeed_config(recipe.fleet().names[0]) == load_deepspeed_config(config)
    assert sum(recipe.batches(recipe.fleet())) == recipe.train.batch


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """`refuse(changes, *overrides)`: what `moe-fragment launch` says, after code 2 and without starting anything."""

    def refuse(changes: dict[str, Any], *overrides: str) -> str:
        recipe = recipe_for(tmp_path, sizes=(2, 1))
        for name, value in changes.items():
            if name not in WHOLE and isinstance(value, dict) and isinstance(recipe.get(name), dict):
                value = {**recipe[name], **value}
            recipe[name] = value
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in recipe.items() if value is not None}))
        for start in ("_prepare_deepspeed", "_start", "Coordinator"):
            monkeypatch.setattr(launch, start, None)
        monkeypatch.setattr(sys, "argv", ["moe-fragment", "launch", str(path), *overrides])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        assert (ended.value.code, out) == (2, ""), err
        assert not (tmp_path / "run").exists()
        assert err.endswith("\n")
        assert err.count("\n") == 1, "one sentence, one line"
        return err[:-1].replace(str(tmp_path), "HERE")

    return refuse


def topology(**changes: Any) -> dict[str, Any]:
    """Clusters ada (2 ranks) and bob (1), with changes."""
    return {
        "clusters": [{"name": "ada", "processes": 2}, {"name": "bob", "processes": 1}],
        "links": [{"between": ["ada", "bob"], "bandwidth": "1 Gbit/s", "rtt": "20 ms"}],
        **changes,
    }


LINK = {"between": ["ada", "bob"], "bandwidth": "1 Gbit/s", "rtt": "20 ms"}


ZERO1 = {"zero_optimization": {"stage": 1}}


def zero(**fields: Any) -> dict[str, Any]:
    """A `deepspeed` section with these fields of DeepSpeed's."""
    return {"deepspeed": {"config": {"zero_optimization": {"stage": 1}, **fields}}}


def piped(
    bob: dict[str, Any] | None = None, processes: int = 2, rails: int | None = None, **fields: Any
) -> Any:
    """Clusters ada (2 ranks) and bob, a pipeline each with these fields; bob's may have its own."""
    config = {**ZERO1, "pipeline": {"stages": 2, **fields}}
    clusters = [{"name": "ada", "processes": 2}, {"name": "bob", "processes": processes}]
    fleet = topology(clusters=clusters, **({"rails": rails} if rails else {}))
    own = {"bob": {**config, **bob}} if bob is not None else {}
    return {"topology": fleet, "deepspeed": {"config": config, "clusters": own}}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown section": ({"tarin": {}}, "tarin: unknown field, did you mean 'train'?"),
    "unknown field": ({"train": {"step": 3}}, "train.step: unknown field, did you mean 'steps'?"),
    "missing section": ({"topology": None}, "topology: required, but not given"),
    "name of a path": ({"name": "../x"}, "name: expected text like"),
    "no steps": ({"train": {"steps": 0}}, "train.steps: expected at least 1, got 0"),
    "half a step": ({"train": {"steps": 1.5}}, "train.steps: expected a whole number, got 1.5"),
    "negative rate": (
        {"train": {"learning_rate": -1}},
        "train.learning_rate: expected more than 0.0, got -1",
    ),
    "infinite rate": ({"train": {"learning_rate": float("inf")}}, "train.learning_rate: "),
    "rate below its end": (
        {"train": {"learning_rate": 0.1, "min_learning_rate": 0.2}},
        "train.min_learning_rate: expected at most learning_rate = 0.1",
    ),
    "beta of 1": ({"train": {"betas": [0.9, 1.0]}}, "train.betas: expected two numbers from 0 up to"),
    "negative weight decay": (
        {"train": {"weight_decay": -0.1}},
        "train.weight_decay: expected at least 0.0, got -0.1",
    ),
    "negative share": (
        {"train": {"shares": {"ada": -1, "bob": 1}}},
        "train.shares.ada: expected at least 0.0, got -1",
    ),
    "share of nobody": (
        {"train": {"shares": {"ada": 1, "bob": 1, "cyd": 1}}},
        "train.shares.cyd: unknown cluster, expected one of ada, bob",
    ),
    "share missing": ({"train": {"shares": {"ada": 1}}}, "train.shares.bob: required, but not given"),
    "no shares": ({"train": {"shares": {"ada": 0, "bob": 0}}}, "train.shares: expected one of them above 0"),
    "mixture of nobody": (
        {"data": {"mixture": {"cyd": {"text": 1}}}},
        "data.mixture.cyd: unknown cluster, expected one of ada, bob",
    ),
    "unknown domain": (
        {"data": {"mixture": {"ada": {"prose": 1}}}},
        "data.mixture.ada.prose: unknown domain, expected one of text",
    ),
    "unknown unit": (
        {"topology": topology(links=[{**LINK, "bandwidth": "1 Gbit/blink"}])},
        "topology.links[0].bandwidth: ",
    ),
    "no unit": ({"topology": topology(links=[{**LINK, "rtt": 20}])}, "topology.links[0].rtt: expected a"),
    "missing link": ({"topology": topology(links=[])}, "topology.links: "),
    "name twice": (
        {"topology": topology(clusters=[{"name": "ada", "processes": 1}] * 2)},
        "topology.clusters",
    ),
    "time-outs out of order": (
        {"fabric": {"exchange_timeout": "3 s"}},
        "fabric.heartbeat_timeout: expected time-outs that grow along heartbeat < exchange < quorum < join, got "
        "heartbeat_timeout 5 s and exchange_timeout 3 s",
    ),
    "unknown exchange": (
        {"experts": {"exchange": "smoke"}},
        "experts.exchange: expected 'tokens' or 'local', got 'smoke'",
    ),
    "unknown sync": ({"sync": {"strategy": "hope"}}, "sync.strategy: expected 'allreduce', "),
    "clipping in DeepSpeed": (
        zero(gradient_clipping=1.0),
        "deepspeed: gradient_clipping: is decided fleet-wide; set train.clip_norm in the recipe",
    ),
    "optimizer in DeepSpeed": (zero(optimizer={"type": "Adam"}), "deepspeed: optimizer: is decided fleet-wide"),
    "batch in DeepSpeed": (zero(train_batch_size="auto"), "deepspeed: train_batch_size: is decided fleet-wide"),
    "fp16": (zero(fp16={"enabled": True}), "deepspeed: fp16.enabled: fp16 is not supported, use bf16 or fp32"),
    "offload": (
        zero(zero_optimization={"stage": 3, "offload_param": {"device": "cpu"}}),
        "deepspeed: zero_optimization.offload_param: offloading is not supported",
    ),
    "no ZeRO": (
        zero(zero_optimization={}),
        "deepspeed: zero_optimization.stage: expected 1, 2 or 3, got 0",
    ),
    "ZeRO 2": (
        zero(zero_optimization={"stage": 0}),
        "deepspeed: zero_optimization.stage: expected 1, 2 or 3, got 0",
    ),
    "ZeRO is a number": (
        zero(zero_optimization=1),
        "deepspeed: zero_optimization: expected a mapping of fields, got 1",
    ),
    "DeepSpeed for nobody": (
        {"deepspeed": {**zero()["deepspeed"], "clusters": {"cyd": {"zero_optimization": {"stage": 1}}}}},
        "deepspeed.clusters.cyd: unknown cluster, expected one of ada, bob",
    ),
    "unknown model": (
        {"model": {"architecture": "gpt-9"}},
        "model.architecture: 'gpt-9' is not a model type of transformers",
    ),
    "model without experts": (
        {"model": {"architecture": "llama", "config": {"hidden_size": 8, "num_attention_heads": 1}}},
        "model.architecture: LlamaForCausalLM has no experts module",
    ),
    "unknown field of the model": (
        {"model": {"config": {"hiden_size": 8}}},
        "model.config.hiden_size: unknown field of moe_fragment",
    ),
    "impossible model": ({"model": {"config": {"num_experts": 2, "num_experts_per_tok": 3}}}, "model.config: "),
    "configuration of loaded weights": (
        {"model": {"pretrained": "./nowhere", "config": {"hidden_size": 8}}},
        "model.config: has no effect with `pretrained`",
    ),
    "a vocabulary too small": (
        {"model": {"config": {"vocab_size": 100}}},
        "data.tokenizer: has 259 tokens, but the model's vocabulary only 100",
    ),
    "two precisions": (
        {"deepspeed": {"config": ZERO1, "clusters": {"bob": {**ZERO1, "bf16": {"enabled": True}}}}},
        "deepspeed.clusters.bob: bf16 on one cluster and fp32 on another",
    ),
    "master weights in bf16": (
        zero(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
        "deepspeed: bf16.bf16_master_weights_and_grads: master weights are fp32 here",
    ),
    "foreign weights with the byte tokenizer": (
        {"model": {"pretrained": "./nowhere", "config": {}}},
        "data.tokenizer: required with model.pretrained",
    ),
    "DeepSpeed without a configuration": ({"deepspeed": {}}, "deepspeed.config: required, but not given"),
    "weights that are not there": (
        {"model": {"pretrained": "./nowhere", "config": {}}, "data": {"tokenizer": "./nowhere"}},
        "model.pretrained: './nowhere' cannot be loaded",
    ),
    "fewer experts than clusters": (
        {"placement": {"policy": "even"}, "model": {"architecture": "mixtral", "config": {
            "num_local_experts": 1, "num_experts_per_tok": 1, "hidden_size": 8, "num_attention_heads": 1,
            "num_key_value_heads": 1,
        }}},
        "placement.num_experts: 1 experts cannot be spread over 2 clusters",
    ),
    "field of another strategy": (
        {"sync": {"strategy": "local_sgd", "overlap": 2}},
        "sync.overlap: has no effect with strategy local_sgd",
    ),
    "tokens between steps": (
        {"sync": {"strategy": "decoupled"}},
        "sync.strategy: decoupled lets clusters be at different steps",
    ),
    "nothing to do apart": (
        {"sync": {"strategy": "diloco"}, "experts": {"exchange": "local"}, "train": {"shares": {"ada": 1, "bob": 0}}},
        "train.shares: cluster bob has no sequence of a batch",
    ),
    "too few experts at home": (
        {
            "experts": {"exchange": "local"},
            "model": {"architecture": "moe_fragment", "config": {"num_experts": 6}},
            "placement": {"policy": "manual", "table": {"ada": "0-4", "bob": [5]}},
        },
        "placement: cluster bob holds 1 experts of layer 0, but each token chooses",
    ),
    "router bias apart": (
        {"sync": {"strategy": "diloco"}, "experts": {"exchange": "local"}, "model": {"config": {"router_bias": True}}},
        "model.config.router_bias: follows the whole fleet's load in every step",
    ),
    "other stages": (
        piped({"pipeline": {"stages": 1}}),
        "deepspeed: pipeline.stages: 1 on cluster bob, 2 on cluster ada; a layer must be on the same stage of all",
    ),
    "other cut": (
        piped({"pipeline": {"stages": 2, "partition": [3, 2]}}),
        "deepspeed: pipeline.partition: [3, 2] on cluster bob, parameters on cluster ada; a layer must be on the same",
    ),
    "ranks that stages cannot share": (
        piped(processes=3),
        "deepspeed: pipeline.stages: 2 stages cannot be of equal width on cluster bob, which has 3 ranks",
    ),
    "rails that stages cannot share": (
        piped(rails=1),
        "topology.rails: expected a multiple of the 2 stages (pipeline.stages), so that each stage has as many, got 1",
    ),
    "pipeline and ZeRO-3": (
        piped({"zero_optimization": {"stage": 3}}),
        "deepspeed: zero_optimization.stage: expected 1, which is all that DeepSpeed's pipeline works with, got 3",
    ),
    "half a stage": (piped(stages=1.5), "deepspeed: pipeline.stages: expected a number of stages from 1, got 1.5"),
    "no such cut": (piped(partition="random"), "deepspeed: pipeline.partition: expected parameters, uniform, "),
    "layers of three stages": (
        piped(partition=[1, 2, 2]),
        "deepspeed: pipeline.partition: expected the number of layers of each of the 2 stages, each at least 1, got",
    ),
    "layers of another model": (
        piped(partition=[1, 2]),
        "deepspeed: pipeline.partition: expected 5 layers in all (embedding, 2 decoder layers, norm, head), got 3",
    ),
    "no such layers": (
        piped(partition="type:Convolution"),
        "deepspeed: pipeline.partition: type:Convolution: matches none of Embedding, FragmentMoeDecoderLayer, ",
    ),
    "more stages than layers": (
        {
            **piped(stages=6),
            "topology": topology(clusters=[{"name": name, "processes": 6} for name in ("ada", "bob")]),
        },
        "deepspeed: pipeline.stages: stage 5 would have none of the model's 5 layers",
    ),
    "recomputation twice": (
        piped(activation_checkpoint_interval=1),
        "deepspeed: pipeline.activation_checkpoint_interval: set model.activation_checkpointing in the recipe",
    ),
    "shares of a stage": (
        {**piped(), "experts": {"local_parallel": {"ada": [1, 1]}}},
        "experts.local_parallel.ada: expected a share for each of the stage's 1 ranks, got 2",
    ),
    "expert nowhere": (
        {"placement": {"policy": "manual", "table": {"ada": "0-3", "bob": [5]}}},
        "placement.table",
    ),
}  # fmt: skip
WHOLE = {"topology", "placement", "deepspeed", "model"}
"""Sections that a row replaces instead of changing."""


@pytest.mark.parametrize("what", BAD)
def test_bad_recipe_gets_one_sentence(refuse: Any, what: str) -> None:
    """Exit code 2, the file, the field and what was expected; before any process starts."""
    changes, sentence = BAD[what]
    assert refuse(changes).startswith(f"moe-fragment: HERE/recipe.yaml: {sentence}")


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.steps", "override 'train.steps': expected section.field=value"),
        ("=5", "override '=5': expected section.field=value"),
        ("train.steps=[", "override train.steps: not valid YAML: '['"),
        ("name.first=x", "override name.first: name is not a section"),
        ("train.stepps=5", "HERE/recipe.yaml: train.stepps: unknown field, did you mean 'steps'?"),
        ("train.steps=-5", "HERE/recipe.yaml: train.steps: expected at least 1, got -5"),
        ("topology=nowhere.yaml", "nowhere.yaml: no such file"),
        ("deepspeed=nowhere.json", "nowhere.json: no such file"),
    ],
)
def test_bad_override_gets_one_sentence(refuse: Any, override: str, sentence: str) -> None:
    assert refuse({}, override) == f"moe-fragment: {sentence}"


def test_hosts_are_started_one_by_one(refuse: Any) -> None:
    clusters = [{"name": name, "hosts": [{"host": f"{name}-1", "slots": 1}]} for name in ("ada", "bob")]
    said = refuse({"topology": topology(clusters=clusters)})
    assert said.startswith(
        "moe-fragment: HERE/recipe.yaml: topology.clusters: launch starts clusters of local processes"
    )
    emulated = refuse({"topology": topology(clusters=clusters), "fabric": {"emulate": True}})
    assert "fabric.emulate: links can be emulated on one machine only, but the topology has hosts" in emulated


@pytest.mark.timeout(120)
def test_bad_recipe_is_refused_within_seconds(tmp_path: Path) -> None:
    """As a person types it, on the command line and under the deepspeed launcher's environment."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_for(tmp_path, config={"hiden_size": 8})))
    launcher = {
        "RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }
    pretrain = [sys.executable, str(ROOT / "recipes" / "pretrain.py"), "--recipe"]
    cases = {
        f"{path}: model.config.hiden_size: unknown field of moe_fragment": ["moe-fragment", "launch", str(path)],
        f"{tmp_path}/nowhere.yaml: no such file": [*pretrain, f"{tmp_path}/nowhere.yaml"],
        "one launcher was started with 4 ranks, the topology has 3 (2 + 1); for one cluster of it give --cluster "
        "NAME": [*pretrain, str(path)],
    }  # fmt: skip
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    running = {
        sentence: subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True, env={**os.environ, **launcher, "PATH": beside}
        )
        for sentence, words in cases.items()
    }
    for sentence, process in running.items():
        _, err = process.communicate(timeout=100)
        assert (process.returncode, err.splitlines()[-1:]) == (2, [f"moe-fragment: {sentence}"])


def test_deepspeed_files(tmp_path: Path) -> None:
    for path in DEEPSPEED:
        check_deepspeed_config(load_deepspeed_config(path), path.name)
    bad = tmp_path / "bad.json"
    for text, sentence in (("{", "not valid JSON: .* at line 1"), ("[]", "expected a JSON object")):
        bad.write_text(text)
        with pytest.raises(ValueError, match=f"^{bad}: {sentence}"):
            load_deepspeed_config(bad)
    check_deepspeed_config({"zero_optimization": {"stage": 1, "offload_optimizer": None}, "fp16": None}, "x")


def test_facts_leave_out_what_may_differ(tmp_path: Path) -> None:
    """Clusters have file systems of their own: paths are nobody else's business."""
    facts = {}
    for home in ("one", "other"):
        recipe = recipe_for(tmp_path / home)
        recipe["data"]["domains"]["text"]["files"] = "text.txt"
        recipe["deepspeed"]["config"] = json.loads(Path(recipe["deepspeed"]["config"]).read_text())
        facts[home] = Recipe.from_dict(recipe).facts()
    assert facts["one"] == facts["other"]
    assert facts["one"]["recipe train.steps"] == 6
    assert facts["one"]["recipe topology"] == [["ada", "bob"], [2, 1], 1]


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (5, [3, 2], (3, 2)),
        (5, [1, 1], (3, 2)),
        (1, [0.1, 0.9], (0, 1)),
        (7, [1, 1, 1], (3, 2, 2)),
        (4, [0, 2, 2], (0, 2, 2)),
    ],
)
def test_batch_is_shared_out_whole(total: int, weights: list[float], expected: tuple[int, ...]) -> None:
    assert split_batch(total, weights) == expected

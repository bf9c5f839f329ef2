"""stock_equivalent: a stock class gives the same bits and text, also where moe_fragment is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from moe_fragment.models.configuration import FragmentMoeConfig
from moe_fragment.models.modeling import FragmentMoeForCausalLM
from moe_fragment.models.router import routers
from moe_fragment.models.stock import stock_equivalent
from tests.models.conftest import TINY, MakeModel

# A dense MLP or shared experts of width 0 are initialised like any other.
pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op:UserWarning")

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3MoeForCausalLM", {"first_k_dense": 1, "attention_bias": True}),
    "qwen3-raw-weights": ("Qwen3MoeForCausalLM", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", {"qk_norm": False, "head_dim": 16}),
    "qwen2": ("Qwen2MoeForCausalLM", {"qk_norm": False, "norm_topk_prob": False, "first_k_dense": 1}),
    "qwen2-shared": ("Qwen2MoeForCausalLM", {"qk_norm": False, "num_shared_experts": 2}),
    "dots1": (
        "Dots1ForCausalLM",
        {"num_shared_experts": 2, "router_bias": True, "routed_scaling_factor": 2.5, "first_k_dense": 1},
    ),
    "dots1-routed-only": ("Dots1ForCausalLM", {"norm_topk_prob": False, "attention_bias": True}),
    "glm4": (
        "Glm4MoeForCausalLM",
        {"qk_norm": False, "num_shared_experts": 1, "router_bias": True, "tie_word_embeddings": True},
    ),
    "glm4-routed-only": ("Glm4MoeForCausalLM", {"qk_norm": False, "rope_theta": 5e5, "head_dim": 12}),
}

# Runs without this package: loads each folder, prints class and greedy continuation, keeps the logits.
PLAIN = """
import json, sys
sys.modules["moe_fragment"] = None
import torch
from transformers import AutoModelForCausalLM
results = []
for folder in sys.argv[1:]:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model.eval()
    tokens = torch.load(folder + "/tokens.pt")
    with torch.no_grad():
        torch.save(model(tokens).logits, folder + "/logits.pt")
    text = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
    bad = [key for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for key in report[kind]]
    results.append({"class": type(model).__name__, "text": text.tolist(), "bad": bad})
print(json.dumps(results))
"""


def options_of(family: str) -> dict[str, Any]:
    options = dict(FAMILIES[family][1])
    if family.startswith(("dots1", "glm4")):
        options["scoring"] = "sigmoid"
    return options


def as_stock(model: FragmentMoeForCausalLM) -> PreTrainedModel:
    stock_config, convert = stock_equivalent(model.config)
    stock = AutoModelForCausalLM.from_config(stock_config).eval()
    stock.load_state_dict(convert(model.state_dict()), strict=True)
    return stock


def with_random_bias(model: FragmentMoeForCausalLM) -> FragmentMoeForCausalLM:
    for router in routers(model):
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias.normal_(std=0.3)
    return model.eval()


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_class_gives_the_same_bits(
    make_model: MakeModel, tokens: Tensor, family: str, experts: str
) -> None:
    model = with_random_bias(make_model(**options_of(family)))
    stock = as_stock(model)
    assert type(stock).__name__ == FAMILIES[family][0]
    for each in (model, stock):
        each.set_experts_implementation(experts)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, stock(tokens).logits)


def test_saved_stock_models_need_no_moe_fragment(
    make_model: MakeModel, tokens: Tensor, tmp_path: Path
) -> None:
    """Every family through its file: same bits and same text in a process that cannot import this package."""
    models = {name: with_random_bias(make_model(**options_of(name))) for name in FAMILIES}
    for name, model in models.items():
        as_stock(model).save_pretrained(tmp_path / name)
        torch.save(tokens, tmp_path / name / "tokens.pt")
    command = [sys.executable, "-c", PLAIN, *(str(tmp_path / name) for name in FAMILIES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    for (name, model), result in zip(models.items(), results, strict=True):
        assert result["class"] == FAMILIES[name][0]
        assert result["bad"] == [], name
        with torch.no_grad():
            assert torch.equal(torch.load(tmp_path / name / "logits.pt"), model(tokens).logits), name
        text = model.generate(tokens, max_new_tokens=12, do_sample=False, pad_token_id=0)
        assert result["text"] == text.tolist(), name


REFUSED = [
    ({"router_bias": True}, "router_bias with scoring softmax"),
    ({"routed_scaling_factor": 2.0}, "routed_scaling_factor"),
    ({"num_shared_experts": 1}, "num_shared_experts with scoring softmax and qk_norm"),
    ({"qk_norm": False, "attention_bias": True}, "attention_bias with scoring softmax and no qk_norm"),
    ({"scoring": "sigmoid", "qk_norm": False, "attention_bias": True}, "attention_bias with scoring sigmoid"),
    ({"scoring": "sigmoid", "num_experts": 1, "num_experts_per_tok": 1}, "num_experts below 2"),
    ({"router_bias": True, "num_shared_experts": 1}, "router_bias .*; or num_shared_experts"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_no_stock_class_computes_is_refused_by_name(
    config: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"no stock transformers class computes .*{message}"):
        stock_equivalent(config(**options))


def test_everything_is_either_refused_or_equal(tokens: Tensor) -> None:
    """The whole grid of options: no combination slips through that a stock class computes differently."""
    grid = product(
        ("softmax", "sigmoid"), (False, True), (0, 1), (0, 1), (False, True), (False, True), (1.0, 2.5)
    )
    equal = 0
    for scoring, qk_norm, shared, dense, norm, bias, scale in grid:
        torch.manual_seed(0)
        options = {
            "scoring": scoring,
            "qk_norm": qk_norm,
            "num_shared_experts": shared,
            "first_k_dense": dense,
        }
        more = {"norm_topk_prob": norm, "router_bias": bias, "routed_scaling_factor": scale}
        config = FragmentMoeConfig(**TINY, **options, **more)
        try:
            stock_equivalent(config)
        except ValueError:
            continue
        model = with_random_bias(FragmentMoeForCausalLM(config))
        with torch.no_grad():
            assert torch.equal(as_stock(model)(tokens).logits, model(tokens).logits), (options, more)
        equal += 1
    assert equal == 76

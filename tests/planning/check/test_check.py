"""Case files: every kind evaluated, bad input named, and the command around it."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moe_fragment import cli
from moe_fragment.planning import check_file
from moe_fragment.planning.check.run import KINDS
from moe_fragment.planning.check.show import as_json, print_check
from moe_fragment.schema import ConfigError

LINK = {"bytes": 134217728, "gbps": 1, "delay_ms": 10}
TOPK = "topk 64 of 4096, 2-bit values, 12-bit indices"
STEP = {
    "model": "Qwen3-235B-A22B",
    "gpu": "H100-SXM-80",
    "gpus": 256,
    "seq": 4096,
    "batch": 2048,
    "step_s": 19.7,
}
TABLE_4 = {"layers": 24, "params": 1e9, "step_s": 0.1, "sync_every": 1, "strategy": "dp", "bits": 16}
NVL = {"bytes": 2**32, "nodes": 4, "gpus_per_node": 8, "intra_GBps": 900, "inter_GBps": 50}
V3 = {"tokens": 14.8e12, "gpu_hours_per_trillion_tokens": 180e3}

# Kind, inputs, published values, tolerance.
GOOD: list[tuple[str, dict[str, Any], dict[str, float], Any]] = [
    ("all_reduce", {**LINK, "backend": "nccl", "nodes": 8}, {"time_s": 1.940}, "1%"),
    ("all_reduce", {**LINK, "backend": "gloo", "nodes": 8}, {"time_s": 3.582}, "5%"),
    ("send", {**LINK, "backend": "gloo"}, {"time_s": 1.160}, "10%"),
    ("tcp", {"rtt_ms": 103.1, "streams": 5, "nic_gbps": 6.9}, {"gbps": 1.06}, "10%"),
    ("hierarchical_all_reduce", NVL, {"time_s": 0.022, "wan_bytes_per_gpu": 805306368}, "[0.016,0.026]"),
    ("dp_sync", {**LINK, "nodes": 4, "method": "allreduce"}, {"time_s": 4.06}, "ranking"),
    ("utilisation", {**TABLE_4, "target_utilisation": 0.5}, {"gbps": 86.8}, "1 cell of logspace(-1,3,50)"),
    ("utilisation", {**TABLE_4, "gbps": 86.8}, {"compute_utilisation": 0.5}, 0.1),
    ("outer_utilisation", {"compute_s": 2280, "comm_s": 103}, {"compute_utilisation": 0.957}, "0.005"),
    ("throughput", STEP, {"tflops_per_gpu": 245, "tokens_per_s_per_gpu": 1663.3}, "1%"),
    ("throughput", STEP, {"mfu": 0.248, "tokens_per_s": 425_800}, "1%"),
    ("training_cost", {**V3, "gpu": "H800-SXM"}, {"gpu_hours": 2.664e6, "usd": 5.328e6}, "0.1%"),
    ("training_cost", {"gpu_hours": 48, "gpus": 2, "usd_per_gpu_hour": 0}, {"usd": 0, "days": 1}, "1%"),
    (
        "training_cost",
        {"tokens": 1e12, "model": "Mixtral-8x7B", "seq": 4096, "gpu": "H100-SXM-80", "mfu": 0.4},
        {"gpu_hours": 5.48e4},
        "5%",
    ),
    (
        "training_cost",
        {"tokens": 3.6e15, "active_params": 1e9, "tflops_per_gpu": 6},
        {"gpu_hours": 1e9},
        "1%",
    ),
    ("parameters", {"config": "Kimi-K2"}, {"total": 1.026e12, "active": 32.6e9}, "1.5%"),
    ("wire", {"params": 72.7e9, "codec": TOPK}, {"ratio": 146.3, "bytes": 1.988e9}, "0.1%"),
    ("goodput", {"chips": 1.2e6, "mtbi_years": 1, "clusters": 8}, {"goodput": 0.88}, "0.03"),
    ("bubble", {"stages": 4, "microbatches": 8, "schedule": "1f1b"}, {"fraction": 3 / 11}, "0.1%"),
    (
        "bubble",
        {"stages": 4, "microbatches": 8, "schedule": "interleaved", "chunks": 2},
        {"fraction": 3 / 19},
        "0.1%",
    ),
]


def case(
    kind: str, inputs: dict[str, Any], expected: dict[str, float], tolerance: Any, name: str = "one"
) -> Any:
    return {"id": name, "kind": kind, "inputs": inputs, "expected": expected, "tolerance": tolerance}


def write(tmp_path: Path, *cases: Any) -> Path:
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"note": "ours", "cases": list(cases)}))
    return path


def test_every_kind_is_tried_here() -> None:
    assert {kind for kind, *_ in GOOD} == set(KINDS)


def test_good_cases_pass_and_one_that_misses_says_by_how_much(tmp_path: Path) -> None:
    cases = [case(*good, name=f"case-{index}") for index, good in enumerate(GOOD)]
    cases.append(
        case("bubble", {"stages": 2, "microbatches": 1, "schedule": "gpipe"}, {"fraction": 0.4}, "1%", "off")
    )
    outcomes = check_file(write(tmp_path, *cases))
    assert [outcome.case.id for outcome in outcomes if not outcome.passed] == ["off"]
    assert outcomes[-1].error == pytest.approx(0.25)
    found = as_json(outcomes)["cases"]
    assert [set(entry) for entry in found] == [
        {"id", "kind", "predicted", "expected", "error", "passed"} for _ in cases
    ]
    assert found[-1]["predicted"] == {"fraction": 0.5}
    assert found[-1]["expected"] == {"fraction": 0.4}
    json.dumps(found, allow_nan=False)
    assert as_json(outcomes)["kinds"]["bubble"] == {"passed": 2, "total": 3}


def test_results_follow_from_inputs_not_from_names(tmp_path: Path) -> None:
    slow = case("tcp", {"rtt_ms": 100, "streams": 1, "nic_gbps": 100}, {"gbps": 1}, "1%", "same")
    fast = case("tcp", {"rtt_ms": 50, "streams": 1, "nic_gbps": 100}, {"gbps": 1}, "1%", "same")
    (first,), (second,) = check_file(write(tmp_path, slow)), check_file(write(tmp_path, fast))
    assert second.predicted["gbps"] == pytest.approx(2 * first.predicted["gbps"])


def test_rankings_hold_among_cases_of_one_prefix(tmp_path: Path) -> None:
    def sync(name: str, method: str, seconds: float) -> Any:
        return case("dp_sync", {**LINK, "nodes": 4, "method": method}, {"time_s": seconds}, "ranking", name)

    outcomes = check_file(
        write(
            tmp_path,
            sync("a-ring", "allreduce", 1),
            sync("a-central", "central_ps", 2),
            sync("b-ring", "allreduce", 3),
            sync("b-sharded", "sharded_ps", 9),
            sync("b-central", "central_ps", 8),
        )
    )
    assert [outcome.passed for outcome in outcomes] == [True, True, True, False, False]


def test_the_table_counts_by_kind(tmp_path: Path) -> None:
    missed = case(
        "bubble", {"stages": 2, "microbatches": 1, "schedule": "gpipe"}, {"fraction": 0.4}, "[0,.1]", "off"
    )
    outcomes = check_file(write(tmp_path, case(*GOOD[3]), missed))
    console = Console(file=io.StringIO(), width=140)
    print_check(outcomes, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    for piece in (
        "gbps 1.048",
        "gbps 1.06",
        "-1.2%",
        "10%",
        "pass",
        "fail",
        "[0,.1]",
        "1 of 1",
        "0 of 1",
        "1 of 2",
    ):
        assert piece in text, piece


BAD: list[tuple[dict[str, Any], str]] = [
    ({"kind": "speed"}, "kind: expected one of all_reduce, .* got 'speed'"),
    ({"kind": 3}, "kind: expected text"),
    ({"inputs": {"gbps": 0}}, "inputs.gbps: expected more than 0"),
    ({"inputs": {"gbps": float("nan")}}, "inputs.gbps: .*finite.*nan"),
    ({"inputs": {"gbps": float("inf")}}, "inputs.gbps: .*finite"),
    ({"inputs": {"gbps": "1"}}, "inputs.gbps: expected a number, got '1'"),
    ({"inputs": {"gbps": True}}, "inputs.gbps: expected a number, got true"),
    ({"inputs": {"nodes": 2.5}}, "inputs.nodes: expected a whole number"),
    ({"inputs": {"nodes": 0}}, "inputs.nodes: expected at least 1"),
    ({"inputs": {"delay_ms": -1}}, "inputs.delay_ms: expected at least 0"),
    ({"inputs": {"delay": 1}}, "inputs.delay: unknown field, did you mean 'delay_ms'"),
    ({"inputs": {"backend": "mpi"}}, "inputs.backend: expected 'nccl' or 'gloo'"),
    ({"inputs": {"bytes": 1e308, "gbps": 1e-300}}, "inputs: the numbers are too large or too small"),
    ({"expected": {}}, "expected: "),
    ({"expected": {"seconds": 1}}, "expected.seconds: unknown for kind 'all_reduce', expected one of time_s"),
    ({"expected": {"time_s": float("nan")}}, "expected.time_s: "),
    ({"tolerance": "about"}, "tolerance: expected a percentage"),
    ({"extra": 1}, "extra: unknown field"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD)
def test_bad_cases_are_named(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    bad = case(*GOOD[0], name="one")
    for key, value in change.items():
        bad[key] = bad[key] | value if isinstance(value, dict) and value and key == "inputs" else value
    path = write(tmp_path, bad)
    with pytest.raises(ConfigError, match=rf"^{path}: case 'one': {sentence}"):
        check_file(path)


PLAN = {**TABLE_4, "target_utilisation": 0.5}


@pytest.mark.parametrize(
    ("kind", "inputs", "expected", "sentence"),
    [
        (
            "training_cost",
            {"gpu_hours": 1, "usd_per_gpu_hour": -2},
            "usd",
            "usd_per_gpu_hour: expected at least 0",
        ),
        ("training_cost", {"gpu_hours": 1}, "usd", "usd_per_gpu_hour: required"),
        ("training_cost", {"gpu_hours": 1, "gpu": "H100-NVL"}, "usd", "usd_per_gpu_hour: required, because"),
        ("training_cost", {"gpu_hours": 1, "usd_per_gpu_hour": 2}, "days", "gpus: required"),
        ("training_cost", {"gpu_hours": 1, "tokens": 2}, "gpu_hours", "tokens: expected nothing"),
        ("training_cost", {**V3, "mfu": 0.4}, "gpu_hours", "mfu: expected nothing"),
        ("training_cost", {}, "gpu_hours", "tokens: required"),
        ("training_cost", {"tokens": 1}, "gpu_hours", "active_params: expected it or model"),
        (
            "training_cost",
            {"tokens": 1, "active_params": 1},
            "gpu_hours",
            "tflops_per_gpu: expected it or mfu",
        ),
        ("training_cost", {"tokens": 1, "active_params": 1, "mfu": 0.4}, "gpu_hours", "gpu: required"),
        (
            "training_cost",
            {"tokens": 1, "active_params": 1, "tflops_per_gpu": 1, "seq": 1},
            "usd",
            "seq: expected nothing",
        ),
        (
            "training_cost",
            {"tokens": 1, "active_params": 1, "mfu": 0.4, "gpu": "V100-SXM2-16"},
            "gpu_hours",
            "gpu: 'V100-SXM2-16' has no bf16",
        ),
        ("throughput", {**STEP, "gpu": "H1000"}, "mfu", "gpu: expected an accelerator of the catalogue"),
        ("throughput", {**STEP, "model": "GPT-9"}, "mfu", "model: expected a model of the catalogue"),
        ("parameters", {"config": {"hidden_size": 4}}, "total", "config.num_layers: required"),
        ("parameters", {"config": {"model_type": "mixtral"}}, "total", "config: hidden_size: required"),
        ("utilisation", {**PLAN, "strategy": "streaming"}, "gbps", "fragment_layers: required"),
        ("utilisation", {**PLAN, "fragment_layers": 3}, "gbps", "fragment_layers: expected nothing"),
        ("utilisation", {**PLAN, "gbps": 3}, "gbps", "target_utilisation: expected it or gbps"),
        (
            "utilisation",
            {**PLAN, "target_utilisation": 1},
            "gbps",
            "target_utilisation: expected less than 1",
        ),
        ("utilisation", {**PLAN, "bits": 1e308}, "gbps", "inputs: the numbers are too large"),
        ("wire", {"params": 1, "codec": "zip"}, "bytes", "codec: expected one of fp32"),
        (
            "bubble",
            {"stages": 1, "microbatches": 1, "schedule": "1f1b", "chunks": 2},
            "fraction",
            "chunks: expected",
        ),
    ],
)
def test_inputs_that_contradict_each_other(
    tmp_path: Path, kind: str, inputs: dict[str, Any], expected: str, sentence: str
) -> None:
    path = write(tmp_path, case(kind, inputs, {expected: 1}, "1%"))
    with pytest.raises(ConfigError) as refused:
        check_file(path)
    assert str(refused.value).startswith(f"{path}: case 'one': inputs")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "line 1, column 1: not valid JSON"),
        ("[]", "cases: expected a mapping with a list of cases"),
        ('{"cases": 3}', "cases: expected a mapping with a list of cases"),
        ('{"cases": []}', "cases: expected at least one case"),
        ('{"cases": [3]}', r"cases\[0\]: expected a mapping"),
        ('{"cases": [{"id": "a", "id": "b"}]}', "'id' is given twice"),
        ('{"cases": [' + "1" * 5000 + "]}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON: nested too deeply"),
    ],
)
def test_files_that_are_no_case_files(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "cases.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^{path}: {sentence}"):
        check_file(path)


def test_other_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        check_file(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        check_file(tmp_path)
    (tmp_path / "x").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        check_file(tmp_path / "x")
    twice = case(*GOOD[0])
    with pytest.raises(ConfigError, match="case 'one': id: expected a name of its own"):
        check_file(write(tmp_path, twice, twice))


def command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["moe-fragment", "plan", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return ended.value.code


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missed = case(
        "bubble", {"stages": 2, "microbatches": 1, "schedule": "gpipe"}, {"fraction": 0.4}, "1%", "off"
    )
    path = write(tmp_path, case(*GOOD[0]), missed)
    assert command(["--check", str(path), "--json"], monkeypatch) in (
        0,
        None,
    )  # a miss is reported, not a failure
    assert [entry["passed"] for entry in json.loads(capsys.readouterr().out)["cases"]] == [True, False]
    assert command(["--check", str(path)], monkeypatch) in (0, None)
    assert "By kind" in capsys.readouterr().out
    path = write(tmp_path, case(*GOOD[0]) | {"kind": "speed"})
    assert command(["--check", str(path), "--json"], monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"moe-fragment: {path}: case 'one': kind: expected one of")
    assert err.count("\n") == 1

"""The catalogues: every shipped row is complete and sane, people's own rows win, bad rows are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_fragment.planning.catalogue import accelerators, models
from moe_fragment.schema import ConfigError

ROW = """
    vendor: Acme
    memory: 32 GB
    source: our own benchmark
    as_of: "2026-11-30"
"""


def write(tmp_path: Path, fields: str, name: str = "Ours") -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(f"accelerators:\n  {name}:{ROW}{fields}")
    return path


def test_what_ships() -> None:
    rows = accelerators()
    assert len(rows) >= 20
    for name, row in rows.items():
        for dense, measured in (
            (row.bf16_dense_tflops, row.bf16_measured_tflops),
            (row.fp16_dense_tflops, row.fp16_measured_tflops),
        ):
            assert dense is None or measured is None or measured < dense, name
        assert 16e9 <= row.memory < 300e9, name
        assert row.source, name
    assert rows["H100-SXM-80"].dense_flops("bf16") == 989e12  # not 1979, which counts sparsity
    assert rows["H100-SXM-80"].node_all_to_all == 450e9
    assert rows["H100-SXM-80"].dense_flops("fp16") == 989e12


def test_a_v100_has_no_bf16() -> None:
    row = accelerators()["V100-SXM2-16"]
    assert row.lacks == ("bf16",)
    assert row.dense_flops("fp16") == 125e12
    with pytest.raises(ValueError, match="no bf16 arithmetic"):
        row.dense_flops("bf16")


def test_own_rows_are_added_and_win(tmp_path: Path) -> None:
    own = write(tmp_path, "    bf16_dense_tflops: 7\n")
    assert accelerators(own)["Ours"].dense_flops("bf16") == 7e12
    assert len(accelerators(own)) == len(accelerators()) + 1
    own = write(tmp_path, "    bf16_dense_tflops: 7\n", "H100-SXM-80")
    assert accelerators(own)["H100-SXM-80"].dense_flops("bf16") == 7e12


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ("", "bf16_dense_tflops: required"),
        ("    fp16_dense_tflops: 7\n", "lacks: expected bf16"),
        ("    bf16_dense_tflops: 7\n    lacks: [bf16]\n", "bf16_dense_tflops: expected nothing"),
        ("    bf16_dense_tflops: 0\n", "bf16_dense_tflops: expected more than 0"),
        ("    bf16_dense_tflops: .nan\n", "bf16_dense_tflops: .*nan"),
        (
            "    bf16_dense_tflops: 7\n    memory_bandwidth: 3.35\n",
            "memory_bandwidth: expected a rate with its unit",
        ),
        ("    bf16_dense_tflops: 7\n    usd_per_hour: [-1, 2]\n", r"usd_per_hour\[0\]: expected at least 0"),
        ("    bf16_dense_tflops: 7\n    usd_per_hour: [3, 2]\n", "usd_per_hour: expected the lowest"),
        ("    bf16_dense_tflops: 7\n    price: 2\n", "price: unknown field"),
    ],
)
def test_bad_rows(tmp_path: Path, fields: str, sentence: str) -> None:
    own = write(tmp_path, fields)
    with pytest.raises(ConfigError, match=rf"^{own}: accelerators.Ours.{sentence}"):
        accelerators(own)


def test_files_that_are_no_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("gpus: {}\n")
    with pytest.raises(ConfigError, match="expected one field, accelerators, got gpus"):
        accelerators(path)
    path.write_text("models: [1]\n")
    with pytest.raises(ConfigError, match="models: expected a mapping from names to rows"):
        models(path)
    with pytest.raises(ConfigError, match="no such file"):
        models(tmp_path / "none.yaml")

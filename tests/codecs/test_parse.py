"""Codecs as recipes write them, and one clear sentence for those that cannot be."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from pydantic import BeforeValidator, ConfigDict, ValidationError

from moe_fragment.codecs import Codec, parse_codec, stages
from moe_fragment.codecs.stage import STAGES, stage
from moe_fragment.schema import FieldError, Section, explain


@pytest.mark.parametrize(
    ("spec", "value_bits", "sparse", "bits"),
    [
        (None, 32, False, 32),
        ("none", 32, False, 32),
        ("fp32", 32, False, 32),
        ({"none": None}, 32, False, 32),
        ("bf16", 16, False, 16),
        ("int8", 8, False, 8.25),
        ({"int8": {"block": 256}}, 8, False, 8.125),
        ({"int4": {"block": None}}, 4, False, 4),
        ({"sigma": {"bits": 4, "range": 5}}, 4, False, 4.125),
        (["sign"], 1, False, 1 + 32 / 4096),
        ("topk", 32, True, 44 / 64),
        (["topk", "none"], 32, True, 44 / 64),
        ([{"topk": {"k": 32, "block": 64}}, {"int8": None}], 8, True, (8.25 + 6) / 2),
        (({"threshold": {"absolute": 1}}, "int4"), 4, True, 4.25 + 12 + 13 / 4096),
    ],
    ids=str,
)
def test_specs(spec: Any, value_bits: int, sparse: bool, bits: float) -> None:
    codec = parse_codec(spec)
    assert codec.value_bits == value_bits
    assert codec.sparse == sparse
    assert codec.bits == pytest.approx(bits)
    assert codec.lossless == (bits == 32)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int5", "int5: unknown codec stage, did you mean 'int8'?"),
        ("zip", "zip: unknown codec stage, expected one of bf16, fp16, fp32,"),
        (8, "expected a codec stage such as int8, a mapping of one to its options, or a list, got 8"),
        ([["int8"]], "expected a codec stage such as int8"),
        ({8: {}}, "expected a codec stage such as int8"),
        ([], "expected at least one codec stage, got an empty list"),
        ({}, "expected one codec stage per mapping, got 0"),
        ({"topk": {}, "int8": {}}, "expected one codec stage per mapping, got 2: topk, int8"),
        ({"int8": 256}, "int8: expected a mapping of options, got 256"),
        ({"int8": {"block_size": 1}}, "int8.block_size: unknown field, did you mean 'block'?"),
        ({"int8": {"block": 0}}, "int8.block: expected at least 1, got 0"),
        ({"int8": {"block": "128"}}, "int8.block: expected a whole number, got '128'"),
        ({"int8": {"rounding": "up"}}, "int8.rounding: expected 'nearest' or 'stochastic', got 'up'"),
        ({"bf16": {"block": 1}}, "bf16.block: unknown field"),
        ({"sigma": {"bits": 9}}, "sigma.bits: expected at most 8, got 9"),
        ({"sigma": {"range": 0}}, "sigma.range: expected more than 0.0, got 0"),
        ({"topk": {"k": 0}}, "topk.k: expected at least 1, got 0"),
        ({"topk": {"k": 65, "block": 64}}, "topk.k: expected at most the block of 64, got 65"),
        ({"topk": {"block": 1}}, "topk.block: expected at least 2, got 1"),
        ({"topk": {"block": 65537}}, "topk.block: expected at most 65536, got 65537"),
        ("threshold", "threshold.rms: expected either rms or absolute, got neither"),
        (
            {"threshold": {"rms": 2, "absolute": 1}},
            "threshold.rms: expected either rms or absolute, got both",
        ),
        (
            ["topk", {"threshold": {"rms": 2}}],
            "threshold: expected one sparsifier at most, and 'topk' is one",
        ),
        (["int8", "topk"], "topk: nothing comes after a value format, and 'int8' is one"),
        (["topk", "int8", "int4"], "int4: nothing comes after a value format, and 'int8' is one"),
    ],
    ids=str,
)
def test_mistakes_are_named(spec: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (compared in full below)
        parse_codec(spec)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, ValidationError)


def test_a_recipe_names_the_field() -> None:
    """As a section with a codec would report it."""

    class Sync(Section):
        model_config = ConfigDict(arbitrary_types_allowed=True)
        codec: Annotated[Codec, BeforeValidator(parse_codec)]

    assert Sync.model_validate({"codec": ["topk", "int4"]}).codec.sparse
    with pytest.raises(ValidationError) as caught:
        Sync.model_validate({"codec": {"topk": {"k": 0}}})
    assert explain(caught.value, "run.yaml") == "run.yaml: codec.topk.k: expected at least 1, got 0"


def test_adding_a_codec_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the stages' package is found without being named anywhere."""
    (tmp_path / "halved.py").write_text(
        textwrap.dedent(
            """
            from moe_fragment.codecs.stage import stage
            from moe_fragment.codecs.stages.floats import Bf16

            @stage("halved")
            class Halved(Bf16):
                factor: float = 0.5

                def encode(self, values, out, scratch, seed):
                    super().encode(values * self.factor, out, scratch, seed)
            """
        )
    )
    with pytest.raises(FieldError, match="halved: unknown codec stage"):
        parse_codec("halved")
    monkeypatch.setattr(stages, "__path__", [*stages.__path__, str(tmp_path)])
    try:
        codec = parse_codec(["topk", {"halved": {"factor": 0.25}}])
        assert codec.decode(codec.encode(torch.tensor([8.0])), 1).item() == 2
    finally:
        STAGES.pop("halved", None)
        sys.modules.pop(f"{stages.__name__}.halved", None)


def test_a_name_has_one_stage() -> None:
    with pytest.raises(
        ValueError, match="codec stage 'int8' is moe_fragment.codecs.stages.integers.Int8 already"
    ):
        stage("int8")(STAGES["fp32"])

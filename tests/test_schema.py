from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from moe_fragment.schema import ConfigError, Count, Duration, FieldError, Section, Size, explain, load_yaml


class Inner(Section):
    steps: Count = 1
    warmup: Duration = 0.0
    buffer: Size | None = None
    rate: float = Field(default=0.1, gt=0, le=1)
    mode: Literal["tokens", "local"] = "tokens"
    exact: bool = False


class Outer(Section):
    name: str
    source: str | None = Field(default=None, alias="from")
    inner: Inner = Inner()
    several: tuple[Inner, ...] = Field(default=(), max_length=2)

    @model_validator(mode="after")
    def _check(self) -> Outer:
        if self.name == "bad":
            raise FieldError("inner.steps", "blamed by the section")
        if self.name == "worse":
            raise ValueError("not about one field")
        return self


def _sentence(data: object, within: str = "") -> str:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(data)
    return explain(caught.value, "recipe.yaml", within)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({}, "name: required, but not given"),
        ({"name": 5}, "name: expected text, got 5"),
        ({"nme": "x"}, "nme: unknown field, did you mean 'name'?"),
        ({"name": "x", "zzz": 1}, "zzz: unknown field, expected one of from, inner, name, several"),
        ({"name": "x", "source": "y"}, "source: unknown field"),
        ({"name": "x", "inner": 5}, "inner: expected a mapping of fields, got 5"),
        ({"name": "x", "inner": None}, "inner: expected a mapping of fields, got nothing"),
        ({"name": "x", "inner": {"steps": 0}}, "inner.steps: expected at least 1, got 0"),
        ({"name": "x", "inner": {"steps": "two"}}, "inner.steps: expected a whole number, got 'two'"),
        ({"name": "x", "inner": {"steps": 2.0}}, "inner.steps: expected a whole number, got 2.0"),
        ({"name": "x", "inner": {"steps": True}}, "inner.steps: expected a whole number, got true"),
        ({"name": "x", "inner": {"rate": "fast"}}, "inner.rate: expected a number, got 'fast'"),
        ({"name": "x", "inner": {"rate": 0}}, "inner.rate: expected more than 0.0, got 0"),
        ({"name": "x", "inner": {"rate": 2}}, "inner.rate: expected at most 1.0, got 2"),
        ({"name": "x", "inner": {"mode": "tok"}}, "inner.mode: expected 'tokens' or 'local', got 'tok'"),
        ({"name": "x", "inner": {"exact": "maybe"}}, "inner.exact: expected true or false, got 'maybe'"),
        (
            {"name": "x", "inner": {"warmup": 5}},
            "inner.warmup: expected a duration with its unit such as '30 ms', got 5",
        ),
        (
            {"name": "x", "inner": {"buffer": "5 ms"}},
            "inner.buffer: expected a size with its unit such as '512 MiB', got '5 ms', which is a duration",
        ),
        ({"name": "x", "several": {"steps": 1}}, "several: expected a list, got a mapping"),
        ({"name": "x", "several": [{}, {"steps": -1}]}, "several[1].steps: expected at least 1, got -1"),
        ({"name": "x", "several": [{}, {}, {}]}, "several: expected at most 2 entries, got 3"),
        ({"name": "bad"}, "inner.steps: blamed by the section"),
        ({"name": "worse"}, "not about one field"),
        ([], "expected a mapping of fields, got a list"),
        ({"name": 1, "inner": {"steps": 0}}, "name: expected text, got 1 (and 1 more)"),
    ],
)
def test_one_sentence_names_file_and_field(data: object, sentence: str) -> None:
    assert _sentence(data) == f"recipe.yaml: {sentence}"


def test_the_sentence_for_a_part_of_a_file_has_the_whole_path() -> None:
    assert _sentence({"name": "x", "inner": {"steps": 0}}, "train").startswith(
        "recipe.yaml: train.inner.steps: "
    )


def test_a_section_is_frozen_and_keyword_only() -> None:
    section = Inner(steps=2)
    with pytest.raises(ValidationError, match="frozen"):
        section.steps = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Inner(2)  # type: ignore[call-arg, misc]


def _write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("3E+4", 3e4),
        ("-.5", -0.5),
        (".inf", float("inf")),
        ("010", 10),
        ("0x10", 16),
        ("0o10", 8),
        ("true", True),
        ("~", None),
        ("", None),
        ("no", "no"),
        ("On", "On"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("1_000", "1_000"),
        ("5 Gbit/s", "5 Gbit/s"),
        ("'5'", "5"),
    ],
)
def test_plain_words_read_as_in_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    read = load_yaml(_write(tmp_path, f"field: {text}\n"))["field"]
    assert read == value
    assert type(read) is type(value)


def test_anchors_and_merges_work(tmp_path: Path) -> None:
    text = "one: &one {a: 1, b: 2}\ntwo: {<<: *one, b: 3}\n"
    assert load_yaml(_write(tmp_path, text))["two"] == {"a": 1, "b": 3}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "the file is empty, expected a mapping of fields"),
        ("# nothing\n", "the file is empty, expected a mapping of fields"),
        ("- a\n", "expected a mapping of fields, got a list"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: 'a' is given twice"),
        ("a:\n  b: 1\n  b: 1\n", "line 3, column 3: 'b' is given twice"),
        ("a: [1\n", "line 2, column 1: not valid YAML: "),
        ("a:\n\tb: 1\n", "line 2, column 1: not valid YAML: "),
        ("a: b: c\n", "line 1, column 5: not valid YAML: "),
        ("a: !!python/name:os.system\n", "line 1, column 4: not valid YAML: "),
        ("a: 1\n---\nb: 2\n", "line 2, column 1: not valid YAML: "),
        ("a: \x00\n", "not valid YAML: "),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_yaml(path)
    assert str(caught.value).startswith(f"{path}: {reason}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.yaml: no such file"):
        load_yaml(tmp_path / "nowhere.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_yaml(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: ol\xe9\n")
    with pytest.raises(ConfigError, match="latin.yaml: expected UTF-8 text, but byte 8 is not"):
        load_yaml(tmp_path / "latin.yaml")

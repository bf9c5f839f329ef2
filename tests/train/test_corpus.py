"""Where text comes from, and what is said when it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset

from moe_fragment.train.corpus import (
    BUILTIN,
    CODE_BYTES,
    TEXT,
    code_documents,
    corpus_fingerprint,
    file_documents,
    hub_documents,
    prose_documents,
)


def test_builtin_domains_are_there_and_unlike() -> None:
    prose, code = prose_documents(), code_documents()
    assert set(BUILTIN) == {"prose", "code"}
    assert prose.column_names == code.column_names == [TEXT]
    assert sum(map(len, prose[TEXT])) > 200_000
    assert 1_000_000 < sum(len(text.encode()) for text in code[TEXT]) <= CODE_BYTES
    assert sum(text.count("def ") for text in code[TEXT]) > 1000
    assert corpus_fingerprint(code_documents()) == corpus_fingerprint(code)


def test_fingerprint_sees_contents_and_boundaries_only() -> None:
    texts = ["ab", "c", "", "déf"]
    whole = corpus_fingerprint(Dataset.from_dict({TEXT: texts}))
    padded = Dataset.from_dict({TEXT: ["x", *texts, "y"], "other": [1] * 6}).select(range(1, 5))
    assert corpus_fingerprint(padded) == whole
    assert corpus_fingerprint(Dataset.from_dict({TEXT: ["a", "bc", "", "déf"]})) != whole
    assert corpus_fingerprint(Dataset.from_dict({TEXT: ["ab", "c", "", "deg"]})) != whole


def test_local_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "sub" / "c.txt").write_text("third")
    lines = [{"body": "one\u2028line"}, {"body": "two"}]
    text = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "a.jsonl").write_text(text, encoding="utf-8")
    documents = file_documents(str(tmp_path / "**" / "*.*"), "body", "data.domains.mine")
    assert list(documents[TEXT]) == ["one\u2028line", "two", "second", "third"]


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (b'{"text": "a"}\n{"txt": "b"}\n', "line 2: no text under 'text'"),
        (b'{"text": "a"}\nnot json\n', "line 2: not JSON"),
        (b'{"text": 3}', "line 1: no text under 'text'"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, contents: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(contents)
    with pytest.raises(ValueError, match=rf"data\.domains\.mine\.files: .*bad\.jsonl.*{message}"):
        file_documents(str(tmp_path / "*.jsonl"), "text", "data.domains.mine")


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.domains\.mine\.files: no file matches"):
        file_documents(str(tmp_path / "*.txt"), "text", "data.domains.mine")


def test_load_dataset_on_a_local_directory(tmp_path: Path) -> None:
    """The hub's path without the hub: `load_dataset` takes a directory as well."""
    (tmp_path / "train.jsonl").write_text('{"content": "a", "n": 1}\n{"content": "b", "n": 2}\n')
    documents = hub_documents(str(tmp_path), None, "train[:1]", "content", "data.domains.wiki")
    assert documents.to_dict() == {TEXT: ["a"]}
    with pytest.raises(
        ValueError, match=r"wiki\.text_column: .* has no column 'text', only \['content', 'n'\]"
    ):
        hub_documents(str(tmp_path), None, "train", "text", "data.domains.wiki")
    with pytest.raises(ValueError, match=r"wiki\.text_column: 'n' of .* does not hold text"):
        hub_documents(str(tmp_path), None, "train", "n", "data.domains.wiki")
    with pytest.raises(ValueError, match=r"data\.domains\.wiki: dataset .* cannot be loaded"):
        hub_documents(str(tmp_path), None, "test", "content", "data.domains.wiki")

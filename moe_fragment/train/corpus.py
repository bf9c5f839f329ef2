"""Where training text comes from: one `datasets.Dataset` with a `text` column for each domain.

The built-in corpus is text that every machine with Python already has, in two domains unlike enough that
clusters can be given different mixtures. Nothing here downloads unless a recipe names a hub dataset.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, load_dataset

from moe_fragment.schema import ConfigError

TEXT = "text"
CODE_BYTES = 4_000_000
"""How much of the standard library's source the domain `code` takes: small enough to tokenise in seconds."""


def prose_documents() -> Dataset:
    """Python's language reference (`pydoc_data.topics`), a topic a document, in key order."""
    from pydoc_data.topics import topics

    return Dataset.from_dict({TEXT: [topics[key] for key in sorted(topics)]})


def code_documents() -> Dataset:
    """Source of the standard library's single-file modules, in name order, up to `CODE_BYTES`.

    Packages are left out: what distributions split off or add (tests, tkinter, ensurepip) sits there, and
    clusters on different systems should see the same text.
    """
    documents, used = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if path.stem not in sys.stdlib_module_names:
            continue
        source = path.read_bytes()
        if used + len(source) > CODE_BYTES:
            break
        try:
            documents.append(source.decode("utf-8"))
        except UnicodeDecodeError:
            continue
        used += len(source)
    if not documents:
        raise ConfigError("data.source: this Python has no readable standard library for the domain 'code'")
    return Dataset.from_dict({TEXT: documents})


BUILTIN: dict[str, Callable[[], Dataset]] = {"prose": prose_documents, "code": code_documents}
"""The domains of the built-in corpus."""


def hub_documents(path: str, name: str | None, split: str, text_column: str, where: str) -> Dataset:
    """A dataset that `datasets.load_dataset` knows, reduced to its text.

    Args:
        path: hub name or local directory.
        name: its configuration, if it has several.
        split: which split, slices included (`train[:1%]`).
        text_column: column that holds the text.
        where: the recipe's field, for error messages.

    Raises:
        ConfigError: it cannot be loaded, or has no such text column.
    """
    try:
        dataset = load_dataset(path, name, split=split)
    except Exception as error:  # hub, network, builder and split errors have no common base
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{where}: dataset {path!r} cannot be loaded ({reason})") from error
    if text_column not in dataset.column_names:
        raise ConfigError(
            f"{where}.text_column: {path!r} has no column {text_column!r}, only {dataset.column_names}"
        )
    kind = dataset.features[text_column].dtype if hasattr(dataset.features[text_column], "dtype") else None
    if kind not in ("string", "large_string"):
        raise ConfigError(f"{where}.text_column: {text_column!r} of {path!r} does not hold text")
    return dataset.select_columns([text_column]).rename_column(text_column, TEXT)


def file_documents(pattern: str, text_column: str, where: str) -> Dataset:
    """Local files: a `.jsonl` file has a document a line, any other file is one UTF-8 document.

    Args:
        pattern: glob, `**` included; files are taken in name order.
        text_column: key of the text in `.jsonl` lines.
        where: the recipe's field, for error messages.

    Raises:
        ConfigError: nothing matches, a file is not UTF-8, or a line is not JSON with that key.
    """
    paths = sorted(path for path in map(Path, glob.glob(pattern, recursive=True)) if path.is_file())
    if not paths:
        raise ConfigError(f"{where}.files: no file matches {pattern!r}")
    documents: list[str] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{where}.files: {path} is not UTF-8 text") from None
        except OSError as error:
            raise ConfigError(f"{where}.files: {path} cannot be read ({error.strerror})") from None
        if path.suffix != ".jsonl":
            documents.append(text)
            continue
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                documents.append(_text_of(line, text_column, f"{where}.files: {path} line {number}"))
    return Dataset.from_dict({TEXT: documents})


def corpus_fingerprint(documents: Dataset) -> str:
    """Hash of the documents of one domain, independent of how they are stored."""
    lengths, contents = hashlib.sha256(), hashlib.sha256()
    for batch in documents.with_format("arrow").iter(batch_size=1000):
        column = batch.column(TEXT)
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            raw = pc.cast(pc.fill_null(chunk, ""), pa.large_binary())
            lengths.update(pc.binary_length(raw).to_numpy().astype("<i8").tobytes())
            _, offsets, values = raw.buffers()
            if values is not None:
                ends = np.frombuffer(offsets, dtype=np.int64)[raw.offset : raw.offset + len(raw) + 1]
                contents.update(memoryview(values)[ends[0] : ends[-1]])
    return hashlib.sha256(lengths.digest() + contents.digest()).hexdigest()[:32]


def _text_of(line: str, text_column: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where}: not JSON") from None
    if not isinstance(row, dict) or not isinstance(row.get(text_column), str):
        raise ConfigError(f"{where}: no text under {text_column!r}")
    return str(row[text_column])

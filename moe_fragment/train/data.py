"""What each cluster trains and evaluates on.

Problem: clusters share no file system and may be killed at any step, yet the data of a run must be the same
whoever reads it, never overlap between clusters, and resume from one integer.
Method: documents are tokenised once, joined with an end-of-text token between them and cut into sequences.
The tail of every domain is held out; the rest is dealt out to the clusters. Sample j of a cluster is a pure
function of (seed, cluster, j): a fixed schedule says which domain, a seeded permutation per epoch says which
sequence. How many ranks a cluster has does not enter.
What it does not do: keep documents apart inside a sequence, or balance clusters with unequal shares.

S sequence length.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset, Features, List, Value
from filelock import FileLock
from pydantic import Field, model_validator
from transformers import PreTrainedTokenizerBase

from moe_fragment.schema import ConfigError, Count, FieldError, Section
from moe_fragment.train.corpus import BUILTIN, TEXT, corpus_fingerprint, file_documents, hub_documents
from moe_fragment.train.tokenizer import BYTES, load_tokenizer, tokenizer_fingerprint

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_FINEST_PERIOD = 10_000  # a schedule is held in memory: finer weights are rounded


class DomainConfig(Section):
    """One kind of text and where it comes from."""

    source: Literal["builtin", "hub", "files"] = "builtin"
    """`builtin`: the corpus every machine has (`prose` and `code`); `hub`: `datasets.load_dataset`; `files`:
    local files. Default builtin, which needs no network."""
    weight: Weight = 1.0
    """Share of this domain, relative to the others, in clusters without a mixture of their own. Default 1:
    equal parts."""
    path: str | None = None
    """Hub name or local directory of a `hub` dataset; required there."""
    name: str | None = None
    """Configuration of a `hub` dataset that has several. Default none."""
    split: str = "train"
    """Split of a `hub` dataset; slices such as `train[:1%]` too. Default train: most have it."""
    files: str | None = None
    """Glob of local `files`: `.jsonl` has a document a line, any other file is a document; required there."""
    text_column: str = "text"
    """Column or key that holds the text, of `hub` datasets and `.jsonl` files. Default text, the usual."""

    @model_validator(mode="after")
    def _only_what_is_used(self) -> DomainConfig:
        used = {"hub": {"path", "name", "split", "text_column"}, "files": {"files", "text_column"}}
        allowed = {"source", "weight"} | used.get(self.source, set())
        for field in sorted(self.model_fields_set - allowed):
            raise FieldError(field, f"has no effect with source '{self.source}'")
        for source, field in (("hub", "path"), ("files", "files")):
            if self.source == source and not getattr(self, field):
                raise FieldError(field, f"required with source '{source}', but not given")
        return self


class DataConfig(Section):
    """The `data` section of a recipe."""

    domains: dict[str, DomainConfig] = Field(
        default_factory=lambda: {name: DomainConfig() for name in BUILTIN}, min_length=1
    )
    """Name to source. Default: `prose` and `code` of the built-in corpus, so that a recipe runs anywhere."""
    mixture: dict[str, dict[str, Weight]] = Field(default_factory=dict)
    """Cluster to domain to weight, for clusters that differ from the domains' own weights; a domain left out
    is not trained on there. Default: none differs."""
    tokenizer: str = BYTES
    """`bytes`, or a directory or hub name for `AutoTokenizer`. Default bytes: nothing to download."""
    sequence_length: Count = 256
    """Tokens a sample predicts (one more is read). Default 256: a CPU can train on it."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Part of each domain, from its end, that is never trained on. Default 0.05."""
    eval_sequences: Count = 64
    """Sequences of each domain in an evaluation at most, spread evenly over what is held out. Default 64:
    an evaluation stays cheap however large the corpus is."""
    seed: int = 0
    """Decides the order of the samples. Default 0."""
    cache_dir: str | None = None
    """Where tokenised text is kept. Default `moe_fragment` in the user's cache directory."""

    @model_validator(mode="after")
    def _domains_fit(self) -> DataConfig:
        for name, domain in self.domains.items():
            if domain.source == "builtin" and name not in BUILTIN:
                known = " and ".join(f"'{known}'" for known in BUILTIN)
                raise FieldError(f"domains.{name}", f"the built-in corpus has {known} only; give its source")
        if not self.mixture and not any(domain.weight for domain in self.domains.values()):
            raise FieldError("domains", "every weight is zero")
        for cluster, weights in self.mixture.items():
            for name in weights:
                if name not in self.domains:
                    known = ", ".join(self.domains)
                    where = f"mixture.{cluster}.{name}"
                    raise FieldError(where, f"unknown domain, expected one of {known}")
            if not any(weights.values()):
                raise FieldError(f"mixture.{cluster}", "every weight is zero")
        return self

    def mixtures(self, clusters: Sequence[str]) -> dict[str, dict[str, float]]:
        """The weight of every domain in every cluster, in the order of the configuration.

        Raises:
            ConfigError: the mixture names an unknown cluster, a cluster is left with nothing to train on, or
                no cluster uses a domain.
        """
        for name in self.mixture:
            if name not in clusters:
                raise ConfigError(
                    f"data.mixture.{name}: unknown cluster, expected one of {', '.join(clusters)}"
                )
        default = {name: domain.weight for name, domain in self.domains.items()}
        mixtures = {
            cluster: {name: self.mixture.get(cluster, default).get(name, 0.0) for name in self.domains}
            for cluster in clusters
        }
        for cluster, weights in mixtures.items():
            if not any(weights.values()):
                raise ConfigError(f"data.mixture.{cluster}: not given, and every domain's own weight is zero")
        for name in self.domains:
            if not any(weights[name] for weights in mixtures.values()):
                raise ConfigError(f"data.domains.{name}: no cluster gives it any weight, leave it out")
        return mixtures


class ClusterData:
    """The sequences of one cluster, and the evaluation set that all clusters share.

    Args:
        config: the `data` section.
        clusters: names of all clusters, in topology order.
        cluster_index: which of them this is.
        tokenizer: what `config.tokenizer` names, when it is loaded already.

    Raises:
        ConfigError: text cannot be read, is too little, or the mixture does not fit the fleet.
    """

    def __init__(
        self,
        config: DataConfig,
        clusters: Sequence[str],
        cluster_index: int,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        mixtures = config.mixtures(clusters)
        self.config = config
        self.cluster = clusters[cluster_index]
        self.tokenizer = tokenizer or load_tokenizer(config.tokenizer)
        self.domains = tuple(config.domains)
        self._mixtures = mixtures
        self._schedule, self._drawn = mixture_schedule(list(mixtures[self.cluster].values()))
        self._packed: dict[str, _Packed] = {}
        self._shares: dict[str, range] = {}
        hashes = {}
        for name, domain in config.domains.items():
            documents = _documents(name, domain)
            hashes[name] = corpus_fingerprint(documents)
            tokens = _tokens(name, documents, hashes[name], self.tokenizer, config)
            users = [cluster for cluster in clusters if mixtures[cluster][name]]
            self._packed[name] = packed = _Packed(name, tokens, config, len(users))
            if self.cluster in users:
                self._shares[name] = range(users.index(self.cluster), packed.train, len(users))
        self.fingerprint = _hash(
            hashes,
            tokenizer_fingerprint(self.tokenizer),
            list(mixtures.items()),
            config.model_dump(include={"sequence_length", "eval_fraction", "eval_sequences", "seed"}),
        )
        """Hash of everything that decides the samples of the fleet: clusters compare it when they join."""

    def sequences(self, start: int, count: int) -> torch.Tensor:
        """Samples `start` to `start + count - 1` of this cluster: int64 [count, S + 1].

        `start` is the number of samples consumed so far, over all ranks and earlier lives of the cluster.
        """
        if start < 0 or count < 0:
            raise ValueError(f"start and count: expected at least 0, got {start} and {count}")
        rows = np.empty((count, self.config.sequence_length + 1), dtype=np.int64)
        for row, sample in enumerate(range(start, start + count)):
            name, index = self.locate(sample)
            rows[row] = self._packed[name].rows[index]
        return torch.from_numpy(rows)

    def locate(self, sample: int) -> tuple[str, int]:
        """Which sequence sample number `sample` of this cluster is: its domain and its index there."""
        cycle, place = divmod(sample, len(self._schedule))
        which = int(self._schedule[place])
        name = self.domains[which]
        share = self._shares[name]
        epoch, position = divmod(
            cycle * int(self._drawn[-1, which]) + int(self._drawn[place, which]), len(share)
        )
        order = _permutation(self.config.seed, self.cluster, name, epoch, len(share))
        return name, share[int(order[position])]

    def evaluation(self, domain: str | None = None) -> torch.Tensor:
        """The held-out sequences, the same on every cluster, of one domain or of all: int64 [n, S + 1]."""
        if domain is not None and domain not in self._packed:
            raise ValueError(f"domain: {domain!r} is not one of {', '.join(self.domains)}")
        names = self.domains if domain is None else (domain,)
        parts = [self._packed[name].evaluation(self.config.eval_sequences) for name in names]
        return torch.from_numpy(np.concatenate(parts))

    def unigram_entropy(self) -> float:
        """Loss (nats per token) that a model knowing only token frequencies reaches on the evaluation set.

        Frequencies are those of the training text, the domains mixed as the fleet's average mixture, with one
        added to each count so that no token is impossible.
        """
        vocabulary = len(self.tokenizer)
        frequencies = np.zeros(vocabulary)
        for name, packed in self._packed.items():
            shares = [weights[name] / sum(weights.values()) for weights in self._mixtures.values()]
            counts = np.bincount(packed.rows[: packed.train].reshape(-1), minlength=vocabulary) + 1.0
            frequencies += sum(shares) / len(shares) * counts / counts.sum()
        targets = self.evaluation()[:, 1:].numpy()
        return float(-np.log(frequencies[targets]).mean())


class _Packed:
    """The sequences of one domain: training first, then what is held out."""

    def __init__(self, name: str, tokens: npt.NDArray[Any], config: DataConfig, users: int) -> None:
        width = config.sequence_length + 1
        total = len(tokens) // width
        self.held_out = max(1, round(total * config.eval_fraction))
        self.train = total - self.held_out
        if self.train < users:
            raise ConfigError(
                f"data.domains.{name}: too little text: {len(tokens)} tokens make {total} sequences of "
                f"{width}; with {self.held_out} held out, none is left for some of {users} clusters"
            )
        self.rows = tokens[: total * width].reshape(total, width)

    def evaluation(self, at_most: int) -> npt.NDArray[np.int64]:
        count = min(at_most, self.held_out)
        chosen = self.train + np.arange(count) * self.held_out // count
        rows: npt.NDArray[np.int64] = self.rows[chosen].astype(np.int64)
        return rows


def mixture_schedule(weights: Sequence[float]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """A periodic order of D domains in which every start has the right mixture, to less than one sample.

    Tijdeman's algorithm ("The chairman assignment problem", 1980), which bounds the deviation of every domain
    after every n samples by 1 - 1/(2D - 2). Weights that need a period above 10,000 are rounded.

    Args:
        weights: [D] not negative, not all zero.

    Returns:
        [P] domain of each sample of a period, and [P + 1, D] how often each domain came before it.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    period = math.lcm(*((weight / total).denominator for weight in exact))
    if period > _FINEST_PERIOD:
        parts = [max(1, round(weight / total * _FINEST_PERIOD)) if weight else 0 for weight in exact]
        period = sum(parts)
    else:
        parts = [int(weight / total * period) for weight in exact]
    active = [domain for domain, part in enumerate(parts) if part]
    schedule = np.zeros(period, dtype=np.int64)
    drawn = np.zeros((period + 1, len(weights)), dtype=np.int64)
    scale = max(2 * len(active) - 2, 1)
    counts = [0] * len(weights)
    for n in range(1, period + 1):
        # How far each domain is behind, in 1 / (period * scale): one that is not may not be drawn, and of the
        # others the one comes first that would soonest be too far behind.
        behind = {domain: scale * (parts[domain] * n - period * counts[domain]) for domain in active}
        due = {
            domain: Fraction(scale * period - period - lag, parts[domain])
            for domain, lag in behind.items()
            if lag >= period or len(active) == 1
        }
        chosen = min(due, key=lambda domain: (due[domain], domain))
        counts[chosen] += 1
        schedule[n - 1] = chosen
        drawn[n] = counts
    return schedule, drawn


@lru_cache(maxsize=16)
def _permutation(seed: int, cluster: str, domain: str, epoch: int, size: int) -> npt.NDArray[np.int64]:
    """Order of a cluster's share in one epoch: sorts raw bits, a stream that numpy keeps across versions."""
    bits = np.random.PCG64(int(_hash(seed, cluster, domain, epoch), 16)).random_raw(size)
    return np.argsort(bits, kind="stable")


def _documents(name: str, domain: DomainConfig) -> Dataset:
    where = f"data.domains.{name}"
    if domain.source == "builtin":
        return BUILTIN[name]()
    if domain.source == "hub":
        assert domain.path is not None
        return hub_documents(domain.path, domain.name, domain.split, domain.text_column, where)
    assert domain.files is not None
    return file_documents(domain.files, domain.text_column, where)


def _tokens(
    name: str, documents: Dataset, corpus: str, tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> npt.NDArray[Any]:
    """All tokens of a domain, memory-mapped from the cache; the first who asks makes them there."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "moe_fragment"
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else home
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f"{_hash(corpus, tokenizer_fingerprint(tokenizer))}.npy"
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _tokenise(name, documents, tokenizer, path)
    tokens: npt.NDArray[Any] = np.load(path, mmap_mode="r")
    return tokens


def _tokenise(name: str, documents: Dataset, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    def encode(batch: Mapping[str, list[str | None]]) -> dict[str, list[list[int]]]:
        texts = [text for text in batch[TEXT] if text]
        if not texts:
            return {"tokens": []}
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return {"tokens": [[*tokens, tokenizer.eos_token_id] for tokens in encoded]}

    table, partial = path.with_suffix(".arrow"), path.with_suffix(".partial")
    tokenised = documents.map(
        encode,
        batched=True,
        batch_size=64,
        remove_columns=documents.column_names,
        features=Features({"tokens": List(Value("int32"))}),
        cache_file_name=str(table),
        load_from_cache_file=False,
        new_fingerprint=path.stem,
        desc=f"Tokenising {name}",
    )
    parts = [
        batch.column("tokens").combine_chunks().flatten()
        for batch in tokenised.with_format("arrow").iter(1000)
    ]
    total = sum(len(part) for part in parts)
    kind = np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32
    with open(partial, "wb") as file:
        header = {"descr": np.dtype(kind).str, "fortran_order": False, "shape": (total,)}
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(part.to_numpy().astype(kind).tobytes())
    os.replace(partial, path)
    table.unlink(missing_ok=True)


def _hash(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

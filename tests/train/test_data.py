"""What clusters train and evaluate on: never the same text twice, and the same whoever asks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from moe_fragment.schema import explain
from moe_fragment.train.data import ClusterData, DataConfig, mixture_schedule

CLUSTERS = ("berlin", "oslo", "pune")
LENGTH = 15


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two domains of numbered lines, so that every sequence is unlike every other."""
    directory = tmp_path_factory.mktemp("corpus")
    for domain, lines in (("up", 200), ("down", 90)):
        for part in range(3):
            text = "\n".join(f"{domain} {part * lines + i:05d}" for i in range(lines))
            (directory / f"{domain}{part}.txt").write_text(text)
    return directory


def make_config(corpus: Path, **options: Any) -> DataConfig:
    domains = {n: {"source": "files", "files": str(corpus / f"{n}*.txt")} for n in ("up", "down")}
    defaults = {"domains": domains, "sequence_length": LENGTH, "cache_dir": str(corpus / "cache")}
    return DataConfig.model_validate(defaults | {"eval_sequences": 5} | options)


def make_all(config: DataConfig) -> list[ClusterData]:
    return [ClusterData(config, CLUSTERS, c) for c in range(len(CLUSTERS))]


def rows(sequences: torch.Tensor) -> list[bytes]:
    return [bytes(np.asarray(row, dtype=np.uint16).tobytes()) for row in sequences.numpy()]


def test_packing_keeps_every_token_in_order(corpus: Path) -> None:
    """All sequences of a domain, in order, are its documents with an end-of-text token after each."""
    data = ClusterData(make_config(corpus), ["only"], 0)
    packed = data._packed["down"]
    end = data.tokenizer.eos_token_id
    expected = [token for i in range(3) for token in [*(corpus / f"down{i}.txt").read_bytes(), end]]
    whole = len(expected) // (LENGTH + 1)
    assert packed.rows.reshape(-1).tolist() == expected[: whole * (LENGTH + 1)]
    assert (packed.train, packed.held_out) == (whole - round(whole * 0.05), round(whole * 0.05))
    sequences = data.sequences(0, 3)
    assert (sequences.shape, sequences.dtype) == ((3, LENGTH + 1), torch.int64)


def test_clusters_and_evaluation_share_nothing(corpus: Path) -> None:
    fleet = make_all(make_config(corpus))
    seen = [set(rows(data.sequences(0, 2000))) for data in fleet]
    for c, mine in enumerate(seen):
        for others in seen[c + 1 :]:
            assert not mine & others
    held_out = set(rows(fleet[0].evaluation()))
    assert not held_out & set().union(*seen)
    packed = fleet[0]._packed.values()
    assert sum(map(len, seen)) == sum(p.train for p in packed), "together the clusters see all of it"


def test_a_sample_does_not_depend_on_who_asks(corpus: Path) -> None:
    """One rank, four ranks with batches of their own, a life that begins in the middle: the same samples."""
    config = make_config(corpus, mixture={"oslo": {"up": 0.7, "down": 0.3}})
    one = ClusterData(config, CLUSTERS, 1).sequences(0, 96)
    four = ClusterData(config, CLUSTERS, 1)
    batches = [four.sequences(step * 12 + rank * 3, 3) for step in range(8) for rank in (3, 1, 0, 2)]
    order = [step * 12 + rank * 3 + i for step in range(8) for rank in (3, 1, 0, 2) for i in range(3)]
    assert torch.equal(torch.cat(batches), one[order])
    assert torch.equal(ClusterData(config, CLUSTERS, 1).sequences(40, 56), one[40:])
    assert one.shape == (96, LENGTH + 1)
    assert four.sequences(5, 0).shape == (0, LENGTH + 1)


def test_an_epoch_sees_everything_once_and_the_next_in_another_order(corpus: Path) -> None:
    data = ClusterData(make_config(corpus, mixture={"pune": {"down": 1}}), CLUSTERS, 2)
    size = len(data._shares["down"])
    first, second = rows(data.sequences(0, size)), rows(data.sequences(size, size))
    assert len(set(first)) == size
    assert set(first) == set(second)
    assert first != second
    other_seed = ClusterData(make_config(corpus, mixture={"pune": {"down": 1}}, seed=1), CLUSTERS, 2)
    assert rows(other_seed.sequences(0, size)) != first


def test_mixtures_are_honoured(corpus: Path) -> None:
    config = make_config(corpus, mixture={"berlin": {"up": 0.8, "down": 0.2}, "oslo": {"down": 3}})
    for cluster, share in ((0, 0.8), (1, 0.0), (2, 0.5)):
        data = ClusterData(config, CLUSTERS, cluster)
        names = [data.locate(sample)[0] for sample in range(300)]
        for n in range(1, 301):
            assert abs(names[:n].count("up") - share * n) < 1
        tokens = data.sequences(0, 20)
        for row, name in zip(tokens, names, strict=False):
            assert name in data.tokenizer.decode(row)


@given(st.lists(st.floats(0, 5).map(lambda w: round(w, 2)), min_size=1, max_size=5).filter(any))
@settings(deadline=None, max_examples=25)
def test_schedule_is_right_after_every_sample(weights: list[float]) -> None:
    schedule, drawn = mixture_schedule(weights)
    period, total = len(schedule), sum(weights)
    counts = Counter[int]()
    for n, domain in enumerate(schedule.tolist(), start=1):
        assert drawn[n - 1].tolist() == [counts[d] for d in range(len(weights))]
        counts[domain] += 1
        for d in range(len(weights)):
            assert abs(counts[d] - n * drawn[-1, d] / period) < 1
    for d, weight in enumerate(weights):
        assert drawn[-1, d] / period == pytest.approx(weight / total, abs=2e-4)
        assert (drawn[-1, d] == 0) == (weight == 0)


def test_evaluation_is_the_same_everywhere(corpus: Path) -> None:
    fleet = make_all(make_config(corpus, mixture={"oslo": {"down": 1}}))
    sets = [data.evaluation() for data in fleet]
    assert all(torch.equal(sets[0], other) for other in sets)
    assert sets[0].shape == (10, LENGTH + 1)
    assert torch.equal(fleet[1].evaluation("up"), sets[0][:5])
    with pytest.raises(ValueError, match="'left' is not one of up, down"):
        fleet[0].evaluation("left")


def test_fingerprint_says_whether_clusters_see_the_same(corpus: Path, tmp_path: Path) -> None:
    base = make_config(corpus)
    prints = [data.fingerprint for data in make_all(base)]
    assert len(set(prints)) == 1
    changes: list[dict[str, Any]] = [{"seed": 1}, {"sequence_length": 7}, {"mixture": {"oslo": {"up": 1}}}]
    prints += [ClusterData(make_config(corpus, **change), CLUSTERS, 0).fingerprint for change in changes]
    for path in corpus.glob("*.txt"):
        (tmp_path / path.name).write_text(path.read_text().replace("00007", "00000"))
    prints.append(ClusterData(make_config(tmp_path), CLUSTERS, 0).fingerprint)
    assert len(set(prints)) == 1 + len(changes) + 1
    moved = make_config(corpus, cache_dir=str(tmp_path / "cache"))
    assert ClusterData(moved, CLUSTERS, 0).fingerprint == prints[0], (
        "where the cache lies is nobody's business"
    )


def test_unigram_entropy_is_the_plain_formula(corpus: Path) -> None:
    data = ClusterData(make_config(corpus, mixture={"pune": {"up": 1}}), CLUSTERS, 0)
    frequencies = np.zeros(259)
    for name, share in (("up", (0.5 + 0.5 + 1) / 3), ("down", (0.5 + 0.5) / 3)):
        packed = data._packed[name]
        counts = Counter(packed.rows[: packed.train].reshape(-1).tolist())
        total = sum(counts.values()) + 259
        frequencies += [share * (counts[token] + 1) / total for token in range(259)]
    losses = [-np.log(frequencies[t]) for row in data.evaluation().tolist() for t in row[1:]]
    assert data.unigram_entropy() == pytest.approx(np.mean(losses))


def test_the_builtin_corpus(tmp_path: Path) -> None:
    """The default configuration works as it is, and the second start reads what the first one cached."""
    config = DataConfig(cache_dir=str(tmp_path))
    data = ClusterData(config, ["a", "b"], 0)
    cached = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")}
    assert len(cached) == 2
    assert 2.5 < data.unigram_entropy() < 4
    again = ClusterData(config, ["a", "b"], 1, tokenizer=data.tokenizer)
    assert again.fingerprint == data.fingerprint
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.npy")} == cached
    assert not list(tmp_path.glob("*.arrow"))


FILES = {"source": "files", "files": "x"}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"domains": {"poems": {}}}, "data.domains.poems: the built-in corpus has 'prose' and 'code' only"),
        ({"domains": {}}, "data.domains: expected at least 1"),
        ({"domains": {"x": {"source": "hub"}}}, "data.domains.x.path: required with source 'hub'"),
        ({"domains": {"x": {"source": "files"}}}, "data.domains.x.files: required with source 'files'"),
        (
            {"domains": {"x": FILES | {"split": "t"}}},
            "data.domains.x.split: has no effect with source 'files'",
        ),
        ({"domains": {"x": FILES | {"weight": 0}}}, "data.domains: every weight is zero"),
        ({"domains": {"x": FILES | {"weight": -1}}}, "data.domains.x.weight: expected at least 0"),
        ({"domains": {"x": FILES | {"weight": float("inf")}}}, "data.domains.x.weight: "),
        (
            {"mixture": {"oslo": {"poems": 1}}},
            "data.mixture.oslo.poems: unknown domain, expected one of prose",
        ),
        ({"mixture": {"oslo": {"prose": 0}}}, "data.mixture.oslo: every weight is zero"),
        ({"mixture": {"oslo": {"prose": -1}}}, "data.mixture.oslo.prose: expected at least 0"),
        ({"sequence_length": 0}, "data.sequence_length: expected at least 1, got 0"),
        ({"eval_fraction": 1}, "data.eval_fraction: expected less than 1"),
        ({"sequence_lenght": 8}, "data.sequence_lenght: unknown field, did you mean 'sequence_length'?"),
    ],
)
def test_bad_sections_are_explained(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        DataConfig.model_validate(section)
    assert message in explain(error.value, "recipe.yaml", "data")


def test_a_mixture_must_fit_the_fleet(corpus: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data\.mixture\.rome: unknown cluster, expected one of berlin, oslo"
    ):
        make_config(corpus, mixture={"rome": {"up": 1}}).mixtures(CLUSTERS)
    only_up = {cluster: {"up": 1} for cluster in CLUSTERS}
    with pytest.raises(ValueError, match=r"data\.domains\.down: no cluster gives it any weight"):
        make_config(corpus, mixture=only_up).mixtures(CLUSTERS)
    silent = {n: {"source": "files", "files": "x", "weight": 0} for n in ("up", "down")}
    with pytest.raises(ValueError, match=r"data\.mixture\.oslo: not given"):
        make_config(corpus, domains=silent, mixture={"berlin": {"up": 1}, "pune": {"down": 1}}).mixtures(
            CLUSTERS
        )


def test_too_little_text(corpus: Path) -> None:
    with pytest.raises(ValueError, match=r"data\.domains\.down: too little text: 2\d\d\d tokens make 2 seq"):
        ClusterData(make_config(corpus, sequence_length=1300), CLUSTERS, 0)


def test_bounds(corpus: Path) -> None:
    data = ClusterData(make_config(corpus), CLUSTERS, 0)
    with pytest.raises(ValueError, match="expected at least 0, got -1 and 2"):
        data.sequences(-1, 2)
    assert data.sequences(10**12, 1).shape == (1, LENGTH + 1)

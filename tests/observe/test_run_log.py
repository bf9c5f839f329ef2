"""What a run log gives back, while it is written, after it was torn, and over several lives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.observe import RunLog, RunLogError, RunWriter
from moe_fragment.observe.layout import surviving

CLUSTERS = ("berlin", "oslo", "pune")
LAYERS, EXPERTS = 2, 4


def open_writer(run: Path, cluster: str = "berlin", **options: Any) -> RunWriter:
    arguments: dict[str, Any] = {"clusters": CLUSTERS, "layers": LAYERS, "experts": EXPERTS, "emulated": True}
    return RunWriter(run / cluster, cluster=cluster, **(arguments | options))


def write_step(writer: RunWriter, step: int, value: int = 1, **scalars: Any) -> None:
    """A step whose every count is `value`, so that it is seen which life a row came from."""
    writer.step(
        step,
        {"loss": float(value), "tokens": 10, **scalars},
        {
            peer: {"dispatch": {"sent": value, "received": 2}}
            for peer in CLUSTERS
            if peer != writer.schema.cluster
        },
        np.full((LAYERS, len(CLUSTERS)), value),
        np.full((LAYERS, EXPERTS), value),
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    traffic = rng.integers(0, 100, (3, 5, LAYERS, 3))
    load = rng.integers(0, 100, (3, 5, LAYERS, EXPERTS))
    for c, cluster in enumerate(CLUSTERS):
        with open_writer(tmp_path, cluster) as writer:
            for s in range(5):
                peer = CLUSTERS[(c + 1) % 3]
                wan = {peer: {"trunk": {"sent": 100 * c + s, "received": 7}}}
                writer.step(
                    s + 1, {"loss": 2.0 - s, "tokens": 3, "grad_norm": 0.5}, wan, traffic[c, s], load[c, s]
                )
            writer.event("note", "all well", detail=[1, 2])
            writer.evaluation(5, 1.25, 64)
    log = RunLog(tmp_path)
    assert (log.clusters, log.present, log.emulated) == (CLUSTERS, CLUSTERS, True)
    assert log.steps[["step", "cluster"]].values.tolist() == [[s, c] for s in range(1, 6) for c in CLUSTERS]
    assert log.steps["loss"].tolist() == [2.0 - s for s in range(5) for _ in CLUSTERS]
    np.testing.assert_array_equal(log.traffic(), traffic.transpose(1, 2, 0, 3))
    np.testing.assert_array_equal(log.traffic(layer=1), traffic.transpose(1, 2, 0, 3)[:, 1])
    np.testing.assert_array_equal(log.traffic(steps=[4, 2]), log.traffic()[[3, 1]])
    np.testing.assert_array_equal(log.traffic(steps=slice(-2, None)), log.traffic()[-2:])
    np.testing.assert_array_equal(log.load(), load.swapaxes(0, 1))
    sent = log.wan[log.wan["sent_bytes"] > 0]
    assert set(log.wan["channel"]) == {"trunk"}
    assert not (log.wan["cluster"].astype(str) == log.wan["peer"].astype(str)).any()
    row = sent[(sent["step"] == 3) & (sent["cluster"] == "oslo")].iloc[0]
    assert (row["peer"], row["sent_bytes"], row["received_bytes"]) == ("pune", 102, 7)
    assert log.evaluations[["cluster", "loss", "tokens"]].values.tolist() == [[c, 1.25, 64] for c in CLUSTERS]
    assert log.events["kind"].tolist() == ["note"] * 3
    assert log.events["fields"].iloc[0] == {"detail": [1, 2]}


def test_one_cluster_or_several_paths(tmp_path: Path) -> None:
    """Clusters share no file system: their directories may lie anywhere once they were collected."""
    for place, cluster in (("here", "berlin"), ("there", "pune")):
        with open_writer(tmp_path / place, cluster) as writer:
            write_step(writer, 1)
    alone = RunLog(tmp_path / "here" / "berlin")
    assert (alone.present, alone.name) == (("berlin",), "here")
    assert alone.traffic()[0, :, 1:].sum() == 0
    both = RunLog([tmp_path / "there", tmp_path / "here" / "berlin"])
    assert both.present == ("berlin", "pune")
    assert both.traffic()[0, 0].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]


def test_reading_while_writing(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        log = RunLog(tmp_path)
        assert log.steps.empty
        assert log.traffic().shape == (0, LAYERS, 3, 3)
        assert not log.refresh()
        write_step(writer, 1)
        assert len(log.steps) == 0, "nothing changes under the reader before it asks"
        assert log.refresh()
        assert log.steps["step"].tolist() == [1]
        write_step(writer, 2, value=5, codec_error=0.25)
        log.refresh()
        assert log.traffic()[:, 0, 0, 0].tolist() == [1, 5]
        assert log.steps["codec_error"].isna().tolist() == [True, False]
        with open_writer(tmp_path, "oslo") as late:
            write_step(late, 2, value=3)
        assert log.refresh(), "a cluster that appears later is found"
        assert log.present == ("berlin", "oslo")
        assert log.traffic()[1, 0, :, 0].tolist() == [5, 3, 0]
        assert not log.refresh()


def test_refresh_reads_only_what_was_appended(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        write_step(writer, 1)
        log = RunLog(tmp_path)
        assert len(log.steps) == 1
        metrics = tmp_path / "berlin" / "metrics.jsonl"
        with open(metrics, "r+b") as file:
            file.write(b"#")  # had the reader gone back to the start it would trip over this
        write_step(writer, 2)
        log.refresh()
        assert log.steps["step"].tolist() == [1, 2]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "traffic.bin", "load.bin", "wan.bin"])
def test_a_torn_tail_is_not_there_yet_and_is_cut_on_resume(tmp_path: Path, name: str) -> None:
    with open_writer(tmp_path) as writer:
        write_step(writer, 1)
        write_step(writer, 2, value=2)
    with open(tmp_path / "berlin" / name, "ab") as file:
        file.write(b'{"step": 3, "lo')
    log = RunLog(tmp_path)
    assert log.steps["step"].tolist() == [1, 2]
    assert log.traffic()[:, 0, 0, 0].tolist() == [1, 2]
    assert log.events.empty
    with open_writer(tmp_path, resume_step=2) as writer:
        write_step(writer, 3, value=3)
    for reader in (log, RunLog(tmp_path)):
        reader.refresh()
        assert reader.steps["step"].tolist() == [1, 2, 3]
        assert reader.traffic()[:, 0, 0, 0].tolist() == [1, 2, 3]
        assert reader.load()[:, 0, 0, 0].tolist() == [1, 2, 3]
        assert reader.wan.groupby("step")["sent_bytes"].sum().tolist() == [2, 4, 6]
        assert reader.events["kind"].tolist() == ["resumed"]


def test_the_later_life_wins(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        for step in range(1, 7):
            write_step(writer, step, value=step)
        writer.evaluation(3, 3.0, 8)
        writer.evaluation(6, 6.0, 8)
        writer.event("note", "first life")
    early_bird = RunLog(tmp_path)
    assert len(early_bird.steps) == 6
    with open_writer(tmp_path, resume_step=4) as writer:
        early_bird.refresh()
        assert early_bird.steps["step"].tolist() == [1, 2, 3, 4], "before the new life has written a step"
        assert len(early_bird.traffic()) == 4
        write_step(writer, 5, value=50)
    for log in (early_bird, RunLog(tmp_path)):
        log.refresh()
        assert log.steps["loss"].tolist() == [1, 2, 3, 4, 50]
        assert log.traffic()[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 50]
        assert log.evaluations["step"].tolist() == [3]
        assert log.events["kind"].tolist() == ["note", "resumed"], "events are history"


def test_killed_between_the_arrays_and_the_line(tmp_path: Path) -> None:
    """The arrays of a step whose line was never written belong to no step, and lose to the next life."""
    with open_writer(tmp_path) as writer:
        write_step(writer, 1)
        write_step(writer, 2, value=9)
    metrics = tmp_path / "berlin" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes().splitlines(keepends=True)[0])
    assert RunLog(tmp_path).traffic()[:, 0, 0, 0].tolist() == [1]
    with open_writer(tmp_path, resume_step=1) as writer:
        write_step(writer, 2, value=2)
    assert RunLog(tmp_path).traffic()[:, 0, 0, 0].tolist() == [1, 2]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=12))
def test_surviving_is_replay(rows: list[tuple[bool, int]]) -> None:
    """The fast rule against the obvious one: replay the file, drop rows as lives begin and steps repeat."""
    kept: list[tuple[int, int]] = []
    for i, (marker, step) in enumerate(rows):
        kept = [row for row in kept if (row[1] <= step if marker else row[1] < step)]
        if not marker:
            kept.append((i, step))
    steps = np.array([-1 if marker else step for marker, step in rows], dtype=np.int64)
    cuts = np.array([step + 1 if marker else step for marker, step in rows], dtype=np.int64)
    assert np.flatnonzero(surviving(steps, cuts)).tolist() == [i for i, _ in kept]


def test_not_finite_is_missing(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        write_step(writer, 1, grad_norm=float("inf"))
        writer.event("overflow", "gradients overflowed", norm=float("nan"))
        writer.evaluation(1, float("nan"), 8)
    for line in (tmp_path / "berlin" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    log = RunLog(tmp_path)
    assert log.steps["grad_norm"].isna().all()
    assert log.events["fields"].iloc[0] == {"norm": None}
    assert log.summary()["eval_loss"] is None


def test_the_writer_refuses(tmp_path: Path) -> None:
    good = np.zeros((LAYERS, 3), dtype=int), np.zeros((LAYERS, EXPERTS), dtype=int)
    with open_writer(tmp_path) as writer:
        write_step(writer, 3)
        scalars = {"loss": 1.0, "tokens": 1}
        with pytest.raises(ValueError, match="not after step 3"):
            writer.step(3, scalars, {}, *good)
        with pytest.raises(KeyError, match="'tokens' is missing"):
            writer.step(4, {"loss": 1.0}, {}, *good)
        with pytest.raises(ValueError, match="'loss' is 'low', not a number"):
            writer.step(4, scalars | {"loss": "low"}, {}, *good)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="taken by the log"):
            writer.step(4, scalars | {"cluster": 1}, {}, *good)
        with pytest.raises(KeyError, match="'berlin' is not a peer of 'berlin'"):
            writer.step(4, scalars, {"berlin": {}}, *good)
        with pytest.raises(KeyError, match="channel 'telegraph' is not one of"):
            writer.step(4, scalars, {"oslo": {"telegraph": {"sent": 1}}}, *good)
        with pytest.raises(KeyError, match="'sent' and 'received' expected"):
            writer.step(4, scalars, {"oslo": {"trunk": {"lost": 1}}}, *good)
        with pytest.raises(ValueError, match=r"traffic_LC: shape \(4, 2\), expected \(2, 3\)"):
            writer.step(4, scalars, {}, good[1].T, good[1])
        with pytest.raises(ValueError, match="load_LE: float64 values, expected integers"):
            writer.step(4, scalars, {}, good[0], good[1] * 0.5)
        with pytest.raises(ValueError, match="a count is negative or above 2147483647"):
            writer.step(4, scalars, {}, good[0], good[1] + 2**31)
    assert RunLog(tmp_path).steps["step"].tolist() == [3], "a refused step leaves nothing behind"
    with pytest.raises(ValueError, match="already holds a run log"):
        open_writer(tmp_path)
    with pytest.raises(ValueError, match="cannot resume, the log there has experts 4, not 8"):
        open_writer(tmp_path, resume_step=3, experts=8)
    with pytest.raises(ValueError, match="'rome' is not among the clusters"):
        open_writer(tmp_path, "rome")


def test_the_reader_refuses_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="no such run directory"):
        RunLog(tmp_path / "nowhere")
    with pytest.raises(RunLogError, match="holds no run log"):
        RunLog(tmp_path)
    with pytest.raises(RunLogError, match="no run directory was given"):
        RunLog([])
    with open_writer(tmp_path):
        pass
    with pytest.raises(RunLogError, match="has not finished its first step"):
        RunLog(tmp_path).summary()
    schema = tmp_path / "berlin" / "schema.json"
    text = schema.read_text()
    schema.write_text(text.replace('"version": 1', '"version": 7'))
    with pytest.raises(RunLogError, match="schema version 7, but this package reads version 1"):
        RunLog(tmp_path)
    schema.write_text(text[:20])
    with pytest.raises(RunLogError, match="not a run log schema"):
        RunLog(tmp_path)
    schema.write_text(text.replace('"layers": 2', '"layers": null'))
    with pytest.raises(RunLogError, match="missing or has the wrong type"):
        RunLog(tmp_path)
    schema.write_text(text)
    with pytest.raises(RunLogError, match="a file, but a run directory was expected"):
        RunLog(schema)
    with open_writer(tmp_path, "oslo", layers=3):
        pass
    with pytest.raises(RunLogError, match="layers 3 differs from 2"):
        RunLog(tmp_path)
    with pytest.raises(RunLogError, match="'berlin' was already read"):
        RunLog([tmp_path / "berlin", tmp_path / "oslo" / ".." / "berlin"])


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        write_step(writer, 1)
    path = tmp_path / "berlin" / "metrics.jsonl"
    good = path.read_bytes()
    for bad in (b"\0\0\0\n", b'{"step": \n', b"[1]\n"):
        path.write_bytes(good + bad + good)
        with pytest.raises(RunLogError, match=r"metrics\.jsonl: line 2 is damaged"):
            _ = RunLog(tmp_path).steps
    path.write_bytes(good + b'{"loss": 1}\n')
    with pytest.raises(RunLogError, match=r"metrics\.jsonl: line 2 has no step"):
        _ = RunLog(tmp_path).steps
    (tmp_path / "berlin" / "events.jsonl").write_text("{}\n")
    with pytest.raises(RunLogError, match=r"events\.jsonl: line 1 is not an event"):
        _ = RunLog(tmp_path).events

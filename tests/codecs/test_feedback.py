"""Nothing is lost for good: what was sent and what is left add up to what was given, whatever the rounds' fate."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_fragment.codecs import ErrorFeedback, PoisonedError, parse_codec

SPECS: list[Any] = [
    "none", "bf16", "int4", "int2", {"int2": {"rounding": "stochastic"}}, "sign", "sigma", "fp4",
    [{"topk": {"k": 4, "block": 64}}, "sigma"], [{"threshold": {"rms": 2.0}}, "int8"],
]  # fmt: skip
SIZE = 300


def deltas(rounds: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(SIZE, generator=generator) for _ in range(rounds)]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.95, 1.0])
def test_sent_and_left_are_what_was_given(spec: Any, decay: float) -> None:
    codec, feedback = parse_codec(spec), ErrorFeedback(SIZE, decay)
    for seed, delta in enumerate(deltas(3)):
        old = feedback.state.clone()
        sent = codec.decode(feedback.encode(codec, delta, seed=seed), SIZE)
        assert torch.equal(feedback.state, old), "until the round is through"
        feedback.commit()
        assert torch.allclose(sent + feedback.state, decay * old + delta, atol=1e-6)
    assert not codec.lossless or not feedback.state.any()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_fifty_rounds_lose_nothing(spec: Any) -> None:
    """With decay 1; every third round fails, and its delta is given again with the next."""
    codec, feedback = parse_codec(spec), ErrorFeedback(SIZE, 1.0)
    arrived, given, missed = torch.zeros(SIZE), torch.zeros(SIZE), torch.zeros(SIZE)
    for round_, delta in enumerate(deltas(50)):
        given += delta
        payload = feedback.encode(codec, delta + missed, seed=round_)
        if round_ % 3 == 1:
            feedback.discard()
            missed += delta
        else:
            codec.add(payload, arrived)
            feedback.commit()
            missed.zero_()
    assert torch.allclose(arrived + feedback.state + missed, given, atol=2e-4)


def test_a_constant_arrives_although_topk_never_sends_it_at_first() -> None:
    """Small values wait in the residual until they are the largest."""
    codec, feedback = parse_codec({"topk": {"k": 1, "block": 4}}), ErrorFeedback(4, 1.0)
    delta, arrived = torch.tensor([1.0, 0.4, 0.3, 0.2]), torch.zeros(4)
    for _ in range(200):
        codec.add(feedback.encode(codec, delta), arrived)
        feedback.commit()
    assert torch.allclose(arrived / 200, delta, atol=0.02)


def test_poison_leaves_the_residual_as_it_was() -> None:
    codec, feedback = parse_codec("int2"), ErrorFeedback(SIZE, 0.95)
    good = deltas(1)[0]
    feedback.encode(codec, good)
    feedback.commit()
    state = feedback.state.clone()
    feedback.encode(codec, good)
    with pytest.raises(PoisonedError):
        feedback.encode(codec, good.where(good < 2, torch.nan))
    assert torch.equal(feedback.state, state)
    assert feedback.pending is None
    with pytest.raises(RuntimeError, match="commit without an encode"):
        feedback.commit()
    feedback.encode(codec, good.view(3, 100).to(torch.float64))
    feedback.commit()
    assert not torch.equal(feedback.state, state)


def test_a_checkpoint_continues_where_it_was_even_during_a_round() -> None:
    codec, one, other = parse_codec("sign"), ErrorFeedback(SIZE, 0.9), ErrorFeedback(SIZE, 0.9)
    first, second = deltas(2)
    one.encode(codec, first)
    one.commit()
    one.encode(codec, second)
    assert one.pending is not None
    other.load(one.state.clone())
    other.pending = one.pending.clone()
    one.commit()
    other.commit()
    assert torch.equal(other.state, one.state)
    assert torch.equal(other.encode(codec, first), one.encode(codec, first))
    other.pending = None
    with pytest.raises(RuntimeError, match="commit without"):
        other.commit()


def test_what_does_not_fit() -> None:
    feedback = ErrorFeedback(4, 0.5)
    with pytest.raises(ValueError, match="decay: expected 0 to 1, got 1.5"):
        ErrorFeedback(4, 1.5)
    with pytest.raises(ValueError, match="delta: expected 4 values, got 3"):
        feedback.encode(parse_codec("int8"), torch.zeros(3))
    with pytest.raises(ValueError, match=r"residual: expected 4 values, got \[5\]"):
        feedback.load(torch.zeros(5))
    with pytest.raises(ValueError, match="NaN or infinity"):
        feedback.load(torch.full((4,), torch.inf))
    assert not feedback.state.any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_on_a_gpu(spec: Any) -> None:
    codec, feedback = parse_codec(spec), ErrorFeedback(SIZE, 1.0, "cuda")
    delta = deltas(1)[0].cuda()
    payload = feedback.encode(codec, delta)
    feedback.commit()
    assert torch.allclose(codec.decode(payload, SIZE) + feedback.state, delta, atol=1e-6)

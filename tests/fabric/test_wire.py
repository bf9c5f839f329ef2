"""Frames."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.fabric.wire import FRAME_BYTES, KINDS, Frame, kind_name

COUNT = st.integers(0, 2**62)


@given(step=COUNT, sequence=COUNT, kind=st.integers(0, len(KINDS) - 1), size=COUNT, at=st.floats(0, 1e9))
def test_decode_is_the_inverse_of_encode(step: int, sequence: int, kind: int, size: int, at: float) -> None:
    frame = Frame(step, sequence, kind, size, at)
    data = frame.encode()
    assert data.dtype == torch.uint8
    assert data.numel() == FRAME_BYTES
    assert Frame.decode(data) == frame


def test_other_bytes_are_no_frame() -> None:
    with pytest.raises(ValueError, match="does not start with a moe_fragment frame"):
        Frame.decode(torch.zeros(FRAME_BYTES, dtype=torch.uint8))


def test_frames_agree_on_the_exchange_not_on_its_size() -> None:
    frame = Frame(3, 4, 1, 100)
    assert frame.agrees(Frame(3, 4, 1, 0, 2.5))
    for other in (Frame(2, 4, 1), Frame(3, 5, 1), Frame(3, 4, 0)):
        assert not frame.agrees(other)


def test_kinds_have_names() -> None:
    assert kind_name(KINDS.index("verdict")) == "verdict"
    assert kind_name(99) == "unknown kind 99"

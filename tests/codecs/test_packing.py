"""Rows of columns survive the wire bit for bit, whatever their types and however few they are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_fragment.codecs import RowLayout

DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int16)
COLUMNS = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(DTYPES)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=60)
@given(columns=COLUMNS, rows=st.integers(0, 5), seed=st.integers(0, 99))
def test_unpack_is_the_inverse_of_pack(columns: list[tuple[int, torch.dtype]], rows: int, seed: int) -> None:
    """Odd widths put later columns at odd addresses; sglang#38773: no row at all."""
    layout = RowLayout(tuple(columns))
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randint(-300, 300, (rows, width), generator=generator).to(dtype) for width, dtype in columns
    ]
    packed = layout.pack(*tensors)
    assert packed.dtype == torch.uint8
    assert packed.shape == (rows, layout.row_bytes)
    for one, other in zip(layout.unpack(packed, torch.device("cpu")), tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_nan_and_signed_zero_survive() -> None:
    """What travels are bytes, not numbers."""
    layout = RowLayout(((3, torch.float32),))
    row = torch.tensor([[float("nan"), -0.0, float("-inf")]])
    (back,) = layout.unpack(layout.pack(row), torch.device("cpu"))
    assert torch.equal(back.view(torch.int32), row.view(torch.int32))


@pytest.mark.parametrize("rows", [0, 4])
def test_gradients_that_autograd_expanded(rows: int) -> None:
    """The gradient of a sum has stride 0; without rows it even counts as contiguous."""
    layout = RowLayout(((3, torch.float32), (2, torch.float32)))
    expanded = torch.ones(()).expand(rows, 3)
    strided = torch.arange(2.0 * rows).view(2, rows).t()
    one, other = layout.unpack(layout.pack(expanded, strided), torch.device("cpu"))
    assert torch.equal(one, expanded)
    assert torch.equal(other, strided)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_rows_of_a_gpu_are_packed_into_pinned_memory_and_come_back() -> None:
    layout = RowLayout(((8, torch.bfloat16), (2, torch.int16), (2, torch.float32)))
    device = torch.device("cuda")
    tensors = (
        torch.randn(5, 8, device=device).bfloat16(),
        torch.arange(10, device=device).view(5, 2),
        torch.rand(5, 2, device=device),
    )
    packed = layout.pack(*tensors)
    assert packed.device.type == "cpu"
    assert packed.is_pinned()
    for one, other in zip(layout.unpack(packed, device), tensors, strict=True):
        assert torch.equal(one, other.to(one.dtype))

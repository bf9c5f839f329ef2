"""Wire bytes, bubble, goodput, throughput and cost: small formulas, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.planning.bubble import bubble_fraction
from moe_fragment.planning.cost import gpu_hours, rent_usd
from moe_fragment.planning.goodput import YEAR_S, goodput
from moe_fragment.planning.throughput import flops_per_gpu, tokens_per_s
from moe_fragment.planning.wire import bits_per_parameter, ratio_to_fp32, wire_bytes


@pytest.mark.parametrize(
    ("codec", "bits"),
    [
        ("fp32", 32),
        ("BF16", 16),
        ("e3m0", 4),
        ("int8", 8),
        ("sign", 1),
        ("3-bit", 3),
        ("1.5 bits", 1.5),
        ("int4, fp32 scale per 128", 4.25),
        ("topk 64 of 4096, 2-bit values, 12-bit indices", 64 * 14 / 4096),
    ],
)
def test_encodings(codec: str, bits: float) -> None:
    assert bits_per_parameter(codec) == bits
    assert ratio_to_fp32(codec) == 32 / bits
    assert wire_bytes(800, codec) == pytest.approx(100 * bits)


@pytest.mark.parametrize(
    "codec",
    [
        "",
        "zip",
        "0-bit",
        "-4-bit",
        "int4, fp32 scale per 0",
        "int5, fp32 scale per 8",
        "topk 9 of 8, 2-bit values, 1-bit indices",
    ],
)
def test_encodings_nobody_knows(codec: str) -> None:
    with pytest.raises(ValueError, match="expected one of fp32"):
        bits_per_parameter(codec)


def test_covenant_72b() -> None:
    # arXiv:2603.08163: 146 times smaller than fp32.
    assert wire_bytes(72.7e9, "topk 64 of 4096, 2-bit values, 12-bit indices") == pytest.approx(
        1.988e9, rel=1e-3
    )


@given(stages=st.integers(1, 100), micro=st.integers(1, 1000), chunks=st.integers(1, 20))
def test_bubbles_shrink_with_micro_batches_and_chunks(stages: int, micro: int, chunks: int) -> None:
    idle = bubble_fraction(stages, micro, chunks)
    assert 0 <= idle < 1
    assert bubble_fraction(stages, micro + 1, chunks) <= idle
    assert bubble_fraction(stages, micro, chunks + 1) <= idle
    assert bubble_fraction(stages + 1, micro, chunks) >= idle


def test_bubble_by_hand() -> None:
    assert bubble_fraction(4, 8) == pytest.approx(3 / 11)
    assert bubble_fraction(4, 8, 2) == pytest.approx(3 / 19)
    assert bubble_fraction(1, 8) == 0


def test_goodput_of_decoupled_clusters() -> None:
    # arXiv:2604.21428; two clusters were fitted, eight were not.
    assert goodput(1.2e6, YEAR_S, 2) == pytest.approx(0.70, abs=0.005)
    assert goodput(1.2e6, YEAR_S, 8) == pytest.approx(0.88, abs=0.03)
    assert goodput(1000, 3600, 10, lost_s=0) == 1


@given(chips=st.floats(1, 1e7), mtbi=st.floats(1, 1e9), clusters=st.integers(1, 100), factor=st.floats(1, 10))
def test_goodput_is_monotone(chips: float, mtbi: float, clusters: int, factor: float) -> None:
    share = goodput(chips, mtbi, clusters)
    assert 0 < share <= 1
    assert goodput(chips * factor, mtbi, clusters) <= share
    assert goodput(chips, mtbi * factor, clusters) >= share
    assert goodput(chips, mtbi, clusters + 1) >= share


def test_throughput_and_cost_by_hand() -> None:
    assert tokens_per_s(8, 1000, 2.0) == 4000
    assert flops_per_gpu(6e9, 4000, 4) == 6e12
    assert gpu_hours(3600, 1e12, 1e12) == 1
    # DeepSeek-V3 (arXiv:2412.19437, Table 1): 2.788 million H800 hours at 2 USD.
    assert rent_usd(2.788e6, 2) == 5.576e6

"""One TCP path: measured figures, and what must hold for any path."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment.planning.network import gloo_send_time, nccl_send_time, stream_rate

GBPS = 1e9 / 8
sizes = st.floats(1, 1e12)
rates = st.floats(1e3, 1e12)
delays = st.floats(0, 1)
more = st.floats(1, 100)


@pytest.mark.parametrize(
    ("rtt_s", "streams", "measured_gbps"),
    # cirquit/hivemind-multi-cloud (arXiv:2306.03163), medians between GCP zones; only the first and last were fitted.
    [
        (0.1031, 1, 0.21),
        (0.1031, 10, 2.11),
        (0.1031, 40, 6.17),
        (0.0007, 1, 6.9),
        (0.157, 1, 0.133),
        (0.1031, 80, 6.22),
    ],
)
def test_streams_between_regions(rtt_s: float, streams: int, measured_gbps: float) -> None:
    assert stream_rate(rtt_s, streams, 6.9 * GBPS) / GBPS == pytest.approx(measured_gbps, rel=0.04)


@pytest.mark.parametrize(
    ("size_mib", "gbps", "delay_ms", "gloo_ms", "nccl_ms"),
    # BinhangYuan/tc_cluster_setting, results/p2p.md.
    [
        (64, 9.8, 1, 110, 59),
        (64, 9.8, 5, 274, 80),
        (64, 9.8, 10, 532, 113),
        (128, 9.8, 10, 972, 171),
        (128, 5, 0, 218, 217),
        (64, 2, 0, 271, 270),
        (64, 2, 5, 311, 275),
        (64, 1, 10, 620, 543),
        (128, 1, 10, 1160, 1083),
    ],
)
def test_point_to_point(size_mib: int, gbps: float, delay_ms: float, gloo_ms: float, nccl_ms: float) -> None:
    path = size_mib * 2**20, gbps * GBPS, delay_ms / 1e3
    assert nccl_send_time(*path) * 1e3 == pytest.approx(nccl_ms, rel=0.07)
    assert gloo_send_time(*path) * 1e3 == pytest.approx(gloo_ms, rel=0.08)


@pytest.mark.parametrize("send", [nccl_send_time, gloo_send_time])
@given(size=sizes, rate=rates, delay=delays, factor=more)
def test_sending_never_gets_faster_with_size_or_delay_nor_slower_with_bandwidth(
    send: object, size: float, rate: float, delay: float, factor: float
) -> None:
    assert callable(send)
    slack = 1 + 1e-9
    time = send(size, rate, delay)
    assert time >= size / rate
    assert send(size * factor, rate, delay) * slack >= time
    assert send(size, rate, delay * factor) * slack >= time
    assert send(size, rate * factor, delay) <= time * slack


@given(rtt=st.floats(0, 10), streams=st.integers(1, 1000), rate=rates, factor=more)
def test_streams_never_exceed_the_card_and_help(rtt: float, streams: int, rate: float, factor: float) -> None:
    carried = stream_rate(rtt, streams, rate)
    assert 0 < carried <= rate
    assert stream_rate(rtt, streams + 1, rate) >= carried
    assert stream_rate(rtt * factor, streams, rate) <= carried
    assert stream_rate(rtt, streams, rate * factor) >= carried

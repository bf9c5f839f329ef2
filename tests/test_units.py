from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_fragment import units
from moe_fragment.units import UnitError


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("5 Gbit/s", 625e6),
        ("5Gbit/s", 625e6),
        (" 5  Gbit / s ", 625e6),
        ("5 Gbps", 625e6),
        ("40 Mbps", 5e6),
        ("8 bps", 1.0),
        ("100 MB/s", 100e6),
        ("1 GiB/s", 2.0**30),
        ("1 Gibit/s", 2.0**27),
        ("64 kbit/s", 8000.0),
        ("60 MB/min", 1e6),
        ("1e3 B/s", 1000.0),
        ("0 B/s", 0.0),
        ("unlimited", math.inf),
    ],
)
def test_rates(text: str, bytes_per_s: float) -> None:
    assert units.parse_rate(text) == bytes_per_s


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_duration, "30 ms", 0.03),
        (units.parse_duration, "5 us", 5e-6),
        (units.parse_duration, "5 \u00b5s", 5e-6),
        (units.parse_duration, "5 \u03bcs", 5e-6),
        (units.parse_duration, ".5 s", 0.5),
        (units.parse_duration, "2 min", 120.0),
        (units.parse_duration, "1.5 h", 5400.0),
        (units.parse_size, "512 MiB", 512 * 2**20),
        (units.parse_size, "512 MB", 512 * 10**6),
        (units.parse_size, "1.1 GB", 1_100_000_000),
        (units.parse_size, "64 kbit", 8000),
        (units.parse_distance, "80 km", 80.0),
        (units.parse_distance, "500 m", 0.5),
        (units.parse_fraction, "0.1 %", 0.001),
        (units.parse_fraction, "100%", 1.0),
    ],
)
def test_other_quantities(parse: Callable[[object], float], text: str, value: float) -> None:
    assert parse(text) == value


def test_a_size_is_whole() -> None:
    assert isinstance(units.parse_size("1.1 GB"), int)


@pytest.mark.parametrize(
    ("parse", "example"),
    [
        (units.parse_rate, "a rate with its unit such as '5 Gbit/s'"),
        (units.parse_duration, "a duration with its unit such as '30 ms'"),
        (units.parse_size, "a size with its unit such as '512 MiB'"),
        (units.parse_distance, "a distance with its unit such as '80 km'"),
        (units.parse_fraction, "a percentage with its unit such as '0.1 %'"),
    ],
)
@pytest.mark.parametrize(
    ("given_", "shown"), [(5, "5"), (0.5, "0.5"), ("5", "'5'"), (None, "nothing"), ("", "''"), (True, "True")]
)
def test_a_bare_number_is_refused(
    parse: Callable[[object], float], example: str, given_: object, shown: str
) -> None:
    with pytest.raises(UnitError) as caught:
        parse(given_)
    assert str(caught.value) == f"expected {example}, got {shown}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("30 ms", "which is a duration"),
        ("5 Gbit", "which is a size"),
        ("5 s/Gbit", "which is something else"),
        ("5 parsec", "unknown unit 'parsec'"),
        ("5 Hz", "unknown unit 'Hz'"),
        ("5 Gb/s", "'Gb/s' may mean bits or bytes, write 'Gbit/s' or 'GB/s'"),
        ("5 mb/s", "'mb/s' may mean bits or bytes, write 'Mbit/s' or 'MB/s'"),
        ("5 kb", "'kb' may mean bits or bytes, write 'kbit' or 'kB'"),
        ("5 GBps", "unknown unit 'GBps', write 'GB/s'"),
        ("5 gbit/s", "unknown unit 'gbit', did you mean 'Gbit'?"),
        ("3 mbit/s", "unknown unit 'mbit', did you mean 'Mbit'?"),
        ("5 KB/s", "unknown unit 'KB', did you mean 'kB'?"),
        ("-5 Gbit/s", "the number must be finite and not negative"),
        ("nan Gbit/s", "the number must be finite and not negative"),
        ("inf Gbit/s", "the number must be finite and not negative"),
        ("1e999 Gbit/s", "the number must be finite and not negative"),
        ("1e99999999999 Gbit/s", "the number must be finite and not negative"),
        ("1,000 Mbit/s", "got '1,000 Mbit/s'"),
        ("2*3 Gbit/s", "got '2*3 Gbit/s'"),
        ("5 Gbit/s/s", "got '5 Gbit/s/s'"),
    ],
)
def test_a_bad_rate_says_why(text: str, reason: str) -> None:
    with pytest.raises(UnitError) as caught:
        units.parse_rate(text)
    message = str(caught.value)
    assert message.startswith("expected a rate with its unit such as '5 Gbit/s', got ")
    assert message.endswith(reason)


def test_a_fraction_is_at_most_one() -> None:
    with pytest.raises(UnitError, match=r"at most 100 %, got '101 %'"):
        units.parse_fraction("101 %")


def test_light_in_fibre() -> None:
    assert units.fibre_delay(80) == 0.0004


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.format_size(0), "0 B"),
        (units.format_size(999), "999 B"),
        (units.format_size(999.7), "1 kB"),
        (units.format_size(12_345_678), "12.3 MB"),
        (units.format_size(999_999), "1 MB"),
        (units.format_size(2e18), "2000 PB"),
        (units.format_rate(625e6), "5 Gbit/s"),
        (units.format_rate(math.inf), "unlimited"),
        (units.format_duration(0), "0 s"),
        (units.format_duration(0.03), "30 ms"),
        (units.format_duration(0.9999), "1 s"),
        (units.format_duration(59.96), "1 min"),
        (units.format_duration(119.9), "2 min"),
        (units.format_duration(125), "2 min 5 s"),
        (units.format_duration(3599.9), "1 h"),
        (units.format_duration(12_000), "3 h 20 min"),
        (units.format_duration(90_000), "1 d 1 h"),
        (units.format_duration(-0.5), "-500 ms"),
        (units.exact_rate(25e6), "200 Mbit/s"),
        (units.exact_rate(625e6), "5 Gbit/s"),
        (units.exact_rate(math.inf), "unlimited"),
        (units.exact_duration(0.015), "15 ms"),
        (units.exact_duration(0.0), "0 s"),
        (units.exact_fraction(0.0001), "0.01 %"),
    ],
)
def test_text_for_people(text: str, expected: str) -> None:
    assert text == expected


@given(st.integers(min_value=0, max_value=10**17))
def test_a_formatted_size_reads_back(size_bytes: int) -> None:
    assert units.parse_size(units.format_size(size_bytes)) == pytest.approx(size_bytes, rel=6e-3)


@given(st.floats(min_value=1e-3, max_value=1e14))
def test_a_formatted_rate_reads_back(rate: float) -> None:
    assert units.parse_rate(units.format_rate(rate)) == pytest.approx(rate, rel=6e-3)


@given(st.floats(min_value=1e-8, max_value=59))
def test_a_formatted_duration_reads_back(duration_s: float) -> None:
    assert units.parse_duration(units.format_duration(duration_s)) == pytest.approx(duration_s, rel=6e-3)


@given(st.floats(min_value=60, max_value=1e7))
def test_a_long_duration_adds_up(duration_s: float) -> None:
    words = units.format_duration(duration_s).split()
    parts = [units.parse_duration(f"{n} {unit}") for n, unit in zip(words[::2], words[1::2], strict=True)]
    assert sum(parts) == pytest.approx(duration_s, rel=2.5e-2)


_ANY_FLOAT = st.floats(min_value=0, max_value=1e30, allow_nan=False)


@given(_ANY_FLOAT)
def test_exact_text_reads_back_to_the_bit(value: float) -> None:
    assert units.parse_rate(units.exact_rate(value)) == value
    assert units.parse_duration(units.exact_duration(value)) == value


@given(st.floats(min_value=0, max_value=1))
def test_exact_fraction_reads_back_to_the_bit(value: float) -> None:
    assert units.parse_fraction(units.exact_fraction(value)) == value


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        rate = units.parse_rate(text)
    except UnitError:
        return
    assert rate >= 0


def test_pint_is_not_imported_until_needed() -> None:
    code = "import moe_fragment.units, sys; sys.exit('pint' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

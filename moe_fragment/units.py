"""The only place where text such as ``5 Gbit/s`` becomes a number, and the reverse.

Every ``parse_*`` takes what a person wrote and answers in one fixed unit: bytes, bytes per second, seconds,
kilometres, or a fraction of one. A number without its unit is refused, because nobody can tell whether
``bandwidth: 5`` meant bits or bytes. Units come from a registry with exactly the names below: pint's own one
reads ``Gb`` as gilbert, ``mbit`` as millibit, ``b`` as barn and lets hertz pass for bits per second.

Bits are written ``bit`` (or ``bps`` for bits per second), bytes ``B``. ``Gb`` is refused: half of the world
means bits by it. ``MB`` is 10^6 bytes and ``MiB`` is 2^20. Not here: money, FLOPs, dates.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
from decimal import Decimal, DecimalException
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pint


class UnitError(ValueError):
    """A quantity that cannot be read; the message is one sentence for the person who wrote it."""


_DEFINITIONS = (
    "byte = [information] = B = bytes",
    "bit = 0.125 byte = _ = bits",
    *(f"{prefix}B = 1e{3 * power} byte" for power, prefix in enumerate("kMGTP", start=1)),
    *(f"{prefix}bit = 1e{3 * power} bit" for power, prefix in enumerate("kMGTP", start=1)),
    *(f"{prefix}iB = {1024**power} byte" for power, prefix in enumerate("KMGTP", start=1)),
    *(f"{prefix}ibit = {1024**power} bit" for power, prefix in enumerate("KMGTP", start=1)),
    "second = [time] = s = sec = seconds",
    "ms = 1e-3 second",
    "us = 1e-6 second",
    "ns = 1e-9 second",
    "minute = 60 second = min = minutes",
    "hour = 3600 second = h = hours",
    "day = 86400 second = d = days",
    "bps = bit / second",
    *(f"{prefix}bps = 1e{3 * power} bps" for power, prefix in enumerate("kMGTP", start=1)),
    "km = [length]",
    "m = 1e-3 km",
    "fraction = [fraction]",
    "percent = 0.01 fraction",
)

_SIZE, _RATE = "a size", "a rate"
_DURATION, _DISTANCE, _FRACTION = "a duration", "a distance", "a percentage"
_TARGETS = {
    _SIZE: ("byte", "512 MiB"),
    _RATE: ("byte / second", "5 Gbit/s"),
    _DURATION: ("second", "30 ms"),
    _DISTANCE: ("km", "80 km"),
    _FRACTION: ("fraction", "0.1 %"),
}

_QUANTITY = re.compile(
    r"\s*(?P<number>[+-]?(?:(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|nan|inf(?:inity)?))"
    r"(?:\s*(?P<unit>%|[A-Za-z]+(?:\s*/\s*[A-Za-z]+)?))?\s*"
)
_AMBIGUOUS = re.compile(r"(?P<prefix>[kmgtp]?)b(?P<per>/s)?", re.IGNORECASE)


def parse_rate(text: object) -> float:
    """Bytes per second, one way, from ``5 Gbit/s``, ``40 Mbps``, ``1 GiB/s``; ``unlimited`` is ``inf``."""
    if isinstance(text, str) and text.strip() == "unlimited":
        return math.inf
    return float(_parse(text, _RATE))


def parse_duration(text: object) -> float:
    """Seconds from ``30 ms``, ``5 us``, ``2 min``."""
    return float(_parse(text, _DURATION))


def parse_size(text: object) -> int:
    """Bytes from ``512 MiB``, ``1.5 GB``, ``64 kbit``, to the nearest whole byte."""
    return int(_parse(text, _SIZE).to_integral_value())


def parse_distance(text: object) -> float:
    """Kilometres from ``80 km``."""
    return float(_parse(text, _DISTANCE))


def parse_fraction(text: object) -> float:
    """A fraction of one, 0 to 1, from a percentage such as ``0.1 %``."""
    value = _parse(text, _FRACTION)
    if value > 1:
        raise UnitError(f"expected {_expected(_FRACTION)} and at most 100 %, got {_got(text)}")
    return float(value)


def fibre_delay(distance_km: float) -> float:
    """Seconds one way over ``distance_km`` of fibre: light in glass takes 5 us per km."""
    return distance_km * 5 / 1e6


def format_size(size_bytes: float) -> str:
    """``12.3 MB``: three significant digits, decimal prefixes like the link rates it is compared with."""
    return _scaled(size_bytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_rate(rate_bytes_per_s: float) -> str:
    """``5 Gbit/s``: in bits, as people write link rates; ``inf`` is ``unlimited``."""
    if rate_bytes_per_s == math.inf:
        return "unlimited"
    return _scaled(8 * rate_bytes_per_s, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s", "Pbit/s"))


def format_duration(duration_s: float) -> str:
    """``30 ms``, ``1.5 s``, ``2 min 5 s``, ``3 h 20 min``, ``2 d 4 h``."""
    if duration_s < 0:
        return "-" + format_duration(-duration_s)
    if not math.isfinite(duration_s) or duration_s == 0:
        return f"{duration_s:g} s"
    if duration_s < 59.95:  # from here on three digits would read "60 s"
        return _scaled(duration_s * 1e9, 1000, ("ns", "us", "ms", "s"))
    parts: tuple[tuple[str, int], ...] = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for (large, large_s), (small, small_s) in itertools.pairwise(parts):
        whole = (
            round(duration_s / small_s) * small_s
        )  # rounded first, so that 119.9 s is 2 min, not "1 min 60 s"
        if whole >= large_s:
            rest = whole % large_s // small_s
            return f"{whole // large_s} {large}" + (f" {rest} {small}" if rest else "")
    raise AssertionError("a minute or more always has a part")


def exact_rate(rate_bytes_per_s: float) -> str:
    """The shortest text that ``parse_rate`` reads back as exactly this number, for files."""
    if rate_bytes_per_s == math.inf:
        return "unlimited"
    return _exact(rate_bytes_per_s, _RATE, ("Gbit/s", "Mbit/s", "kbit/s", "bit/s", "B/s"))


def exact_duration(duration_s: float) -> str:
    """The shortest text that ``parse_duration`` reads back as exactly this number, for files."""
    return _exact(duration_s, _DURATION, ("s", "ms", "us"))


def exact_fraction(fraction: float) -> str:
    """The percentage that ``parse_fraction`` reads back as exactly this number, for files."""
    return _exact(fraction, _FRACTION, ("%",))


@functools.cache
def _registry() -> pint.UnitRegistry:
    import pint  # here, because it takes longer to import than the rest of the light half of the package

    # Decimal keeps "0.1 %" and "1.1 GB" exact until the one final rounding to float or int.
    registry: pint.UnitRegistry = pint.UnitRegistry(None, non_int_type=Decimal)
    registry.load_definitions(_DEFINITIONS)
    return registry


@functools.cache
def _unit_names() -> tuple[str, ...]:
    names = set()
    for line in _DEFINITIONS:
        canonical, _, *others = (part.strip() for part in line.split("="))
        names |= {canonical, *others} - {"_"}
    return tuple(sorted(names))


@functools.cache
def _factor(unit: str) -> tuple[str | None, Decimal]:
    """What ``unit`` measures (None: nothing we know) and how many of the target unit of that kind it is."""
    registry = _registry()
    quantity = registry.Quantity(Decimal(1), registry.parse_units(unit.replace("%", "percent")))
    for kind, (target, _) in _TARGETS.items():
        if quantity.check(registry.parse_units(target).dimensionality):
            return kind, quantity.to(target).magnitude
    return None, Decimal(0)


def _parse(text: object, kind: str) -> Decimal:
    expected = f"expected {_expected(kind)}, got {_got(text)}"
    # Both micro signs, U+00B5 and the Greek letter U+03BC.
    plain = text.replace("\u00b5", "u").replace("\u03bc", "u") if isinstance(text, str) else ""
    match = _QUANTITY.fullmatch(plain)
    if match is None or match["unit"] is None:
        raise UnitError(expected)
    unit = re.sub(r"\s", "", match["unit"])
    if (ambiguous := _AMBIGUOUS.fullmatch(unit)) and "b" in unit:
        prefix, per = ambiguous["prefix"].upper().replace("K", "k"), ambiguous["per"] or ""
        raise UnitError(
            f"{expected}: '{unit}' may mean bits or bytes, write '{prefix}bit{per}' or '{prefix}B{per}'"
        )
    for name in unit.split("/"):
        if name != "%" and name not in _unit_names():
            raise UnitError(f"{expected}: unknown unit '{name}'{_suggestion(name)}")
    found, factor = _factor(unit)
    if found != kind:
        raise UnitError(f"{expected}, which is {found or 'something else'}")
    try:
        value = Decimal(match["number"]) * factor
        finite = math.isfinite(float(value))
    except (DecimalException, OverflowError):
        finite = False
    if not finite or value < 0:
        raise UnitError(f"{expected}: the number must be finite and not negative")
    return abs(value)  # "-0 s" is no negative number, but should not print as one either


def _expected(kind: str) -> str:
    return f"{kind} with its unit such as '{_TARGETS[kind][1]}'"


def _got(text: object) -> str:
    return "nothing" if text is None else repr(text)


def _suggestion(name: str) -> str:
    if re.fullmatch(
        r"[kMGTP]?i?Bps", name
    ):  # the closest name is 'Gbps', eight times less than what was meant
        return f", write '{name.removesuffix('ps')}/s'"
    by_lower: dict[str, list[str]] = {}
    for known in _unit_names():
        by_lower.setdefault(known.lower(), []).append(known)
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return f", did you mean {' or '.join(repr(unit) for unit in by_lower[close[0]])}?" if close else ""


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    if not math.isfinite(value):
        return f"{value} {units[0]}"
    sign, value = ("-" if value < 0 else ""), abs(value)
    for unit in units[:-1]:
        if value < base and float(f"{value:.3g}") < base:
            return f"{sign}{value:.3g} {unit}"
        value /= base
    digits = f"{value:.3g}" if value < 1000 else f"{value:.0f}"
    return f"{sign}{digits} {units[-1]}"


def _exact(value: float, kind: str, units: tuple[str, ...]) -> str:
    written = []
    for unit in units:
        number = Decimal(repr(float(value))) / _factor(unit)[1]
        text = f"{number.normalize():f} {unit}" if -15 < number.adjusted() < 15 else f"{number} {unit}"
        if float(_parse(text, kind)) == value:
            written.append((number < 1, len(text), text))
    return min(written, key=lambda candidate: candidate[:2])[2]  # "200 Mbit/s" rather than "0.2 Gbit/s"

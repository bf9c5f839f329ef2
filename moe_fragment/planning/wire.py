"""Bytes of a parameter vector on the wire, by the written name of its encoding.

Payload only: no headers, block scales only where the text names blocks. Encodings are described, not run.
"""

from __future__ import annotations

import re

FP32_BITS = 32

_FORMATS = {
    **dict.fromkeys(("fp32", "float32"), 32.0),
    **dict.fromkeys(("fp16", "float16", "bf16", "bfloat16"), 16.0),
    **dict.fromkeys(("fp8", "int8"), 8.0),
    **dict.fromkeys(("fp4", "e3m0", "int4"), 4.0),
    "int2": 2.0,
    "sign": 1.0,
}
_TOPK = re.compile(r"topk (\d+) of (\d+), (\d+(?:\.\d+)?)-bit values, (\d+(?:\.\d+)?)-bit indices")
_BLOCKS = re.compile(r"(\w+), (\w+) scale per (\d+)")
EXPECTED = (
    "one of " + ", ".join(_FORMATS) + ", '4-bit', 'int4, fp32 scale per 128', "
    "or 'topk 64 of 4096, 2-bit values, 12-bit indices'"
)


def bits_per_parameter(codec: str) -> float:
    """Bits one parameter takes under ``codec``, on average.

    ``topk K of N, V-bit values, I-bit indices`` sends K (V + I) bits per N parameters (SparseLoCo, arXiv:2508.15706;
    the payload of Covenant-72B, arXiv:2603.08163).

    Raises:
        ValueError: text that is no known encoding, or one that sends more values than there are.
    """
    text = " ".join(codec.lower().split())
    if match := _TOPK.fullmatch(text):
        kept, block, value_bits, index_bits = (float(part) for part in match.groups())
        if 0 < kept <= block:
            return kept * (value_bits + index_bits) / block
    elif match := _BLOCKS.fullmatch(text):
        if match[1] in _FORMATS and match[2] in _FORMATS and int(match[3]):
            return _FORMATS[match[1]] + _FORMATS[match[2]] / int(match[3])
    elif match := re.fullmatch(r"(\d+(?:\.\d+)?)[- ]bits?", text):
        if float(match[1]) > 0:
            return float(match[1])
    elif text in _FORMATS:
        return _FORMATS[text]
    raise ValueError(f"expected {EXPECTED}, got {codec!r}")


def wire_bytes(parameters: float, codec: str) -> float:
    """Payload bytes of ``parameters`` under ``codec``, one way, once."""
    return parameters * bits_per_parameter(codec) / 8


def ratio_to_fp32(codec: str) -> float:
    """How many times smaller than fp32."""
    return FP32_BITS / bits_per_parameter(codec)

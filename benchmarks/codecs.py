"""Codecs of the trunk's sync on one Gaussian vector: bytes, error, and time in copies of the vector.

Each way encodes and decodes in turns with a copy of the vector, in one process on one thread; times are medians over
the turns. A ratio to the copy counts the page faults of the fresh payload against the codec.

Peers, as far as they run on a CPU: `torch.topk` over the whole vector, PyTorch's DDP communication hooks, 1-bit Adam's
sign and scale, torchft's fp8. CPU only: a ratio compares work, not what a GPU would do.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.fleet import answer, command_line, say, table
from moe_fragment.codecs import parse_codec

SPECS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8": "fp8",
    "int8": "int8",
    "int4": "int4",
    "int4 stochastic": {"int4": {"rounding": "stochastic"}},
    "int4 one scale": {"int4": {"block": None}},
    "fp4": "fp4",
    "int2": "int2",
    "sign": "sign",
    "sigma": "sigma",
    "topk": "topk",
    "topk + int8": ["topk", "int8"],
    "topk + sigma": ["topk", "sigma"],
    "threshold + sigma": [{"threshold": {"rms": 2.4}}, "sigma"],
}
DENSITY = 64 / 4096


@dataclass(frozen=True)
class Way:
    """One way to put a vector on the wire: what `encode` returns is what travels."""

    encode: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    decode: Callable[[tuple[torch.Tensor, ...], int], torch.Tensor]


def ours(spec: Any) -> Way:
    """A codec of this package."""
    codec = parse_codec(spec)
    return Way(lambda vector: (codec.encode(vector),), lambda sent, size: codec.decode(sent[0], size))


OURS: dict[str, Callable[[], Way]] = {name: functools.partial(ours, spec) for name, spec in SPECS.items()}


# -- peers -----------------------------------------------------------------------------------------------------------


def whole_topk() -> Way:
    """The same density over the whole vector, with int32 indices."""

    def encode(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index = vector.abs().topk(round(DENSITY * len(vector)), sorted=False).indices
        return vector[index], index.to(torch.int32)

    return Way(encode, lambda sent, size: torch.zeros(size).index_copy_(0, sent[1].long(), sent[0]))


def ddp_fp16() -> Way:
    """What `fp16_compress_hook` does to a bucket."""
    return Way(lambda vector: (vector.to(torch.float16),), lambda sent, size: sent[0].float())


def ddp_per_tensor() -> Way:
    """What `quantization_pertensor_hook` does to a bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as hooks

    def encode(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        observer = torch.ao.quantization.MinMaxObserver()
        observer(vector)
        scale, zero = torch.tensor([*observer.calculate_qparams()])
        return hooks._quantize_per_tensor_backend(vector, scale, zero), scale, zero

    return Way(encode, lambda sent, size: hooks._dequantize_per_tensor_backend(*sent))


def ddp_per_channel() -> Way:
    """What `quantization_perchannel_hook` does, 512 values to a scale; a Python loop over the rows."""
    from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as hooks

    def encode(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = torch.nn.functional.pad(vector, (0, 512 - len(vector) % 512)).view(-1, 512)
        observer = torch.ao.quantization.PerChannelMinMaxObserver()
        observer(rows)
        scale, zero = observer.calculate_qparams()
        return hooks._quantize_per_channel_backend(rows, scale, zero), scale, zero.float()

    return Way(encode, lambda sent, size: hooks._dequantize_per_channel_backend(*sent).flatten()[:size])


def one_bit() -> Way:
    """The arithmetic of 1-bit Adam (arXiv 2102.02888) with one scale, its signs packed by numpy as DeepSpeed did."""

    def encode(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        signs = np.packbits(vector.ge(0).numpy())
        return torch.from_numpy(signs), vector.norm() / math.sqrt(len(vector))

    def decode(sent: tuple[torch.Tensor, ...], size: int) -> torch.Tensor:
        signs = torch.from_numpy(np.unpackbits(sent[0].numpy(), count=size))
        return signs.float().mul_(2).sub_(1).mul_(sent[1])

    return Way(encode, decode)


def torchft_fp8() -> Way:
    """torchft's fused fp8 kernels; raises on a machine that cannot run them."""
    from torchft.quantization import fused_dequantize_from_fp8, fused_quantize_into_fp8

    if not torch.cuda.is_available():
        raise RuntimeError("its Triton kernels need a GPU")

    def encode(vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (fused_quantize_into_fp8([vector.cuda().view(-1, 512)], 1),)

    def decode(sent: tuple[torch.Tensor, ...], size: int) -> torch.Tensor:
        out = torch.empty(size // 512, 512, device="cuda")
        fused_dequantize_from_fp8([out], sent[0], 1)
        return out.view(-1).cpu()

    return Way(encode, decode)


PEERS: dict[str, Callable[[], Way]] = {
    "torch.topk, whole vector": whole_topk,
    "DDP fp16 hook": ddp_fp16,
    "DDP per-tensor hook": ddp_per_tensor,
    "DDP per-channel hook": ddp_per_channel,
    "1-bit Adam's arithmetic": one_bit,
    "torchft fp8": torchft_fp8,
}


# -- the table -------------------------------------------------------------------------------------------------------

COLUMNS = {
    "way": "{name}",
    "**fp32 bytes / bytes**": "**{ratio:.2f}**",
    "error": "{error:.4f}",
    "error of what travels": "{error_sent:.4f}",
    "encode ms": "{encode_ms:.1f}",
    "**/ copy**": "**{encode_copies:.1f}**",
    "/ clone": "{encode_clones:.1f}",
    "decode ms": "{decode_ms:.1f}",
    "**/ copy** ": "**{decode_copies:.1f}**",
    "/ clone ": "{decode_clones:.1f}",
}


def timed(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """A result and its milliseconds."""
    start = time.perf_counter()
    result = call(*arguments)
    return result, 1e3 * (time.perf_counter() - start)


def measure(name: str, way: Way, vector: torch.Tensor, turns: int) -> dict[str, Any]:
    """One row; the first turn, which allocates, does not count."""
    there = torch.empty_like(vector)
    times = []
    for _ in range(turns + 1):
        copy_ms, clone_ms = timed(there.copy_, vector)[1], timed(vector.clone)[1]
        sent, encode_ms = timed(way.encode, vector)
        decoded, decode_ms = timed(way.decode, sent, len(vector))
        times.append((copy_ms, clone_ms, encode_ms, decode_ms))
    copy_ms, clone_ms, encode_ms, decode_ms = map(statistics.median, zip(*times[1:], strict=True))
    lost, travelled = decoded - vector, decoded != 0
    return {
        "name": name,
        "ratio": vector.nbytes / sum(tensor.nbytes for tensor in sent),
        "error": float(lost.norm() / vector.norm()),
        "error_sent": float(lost[travelled].norm() / vector[travelled].norm()),
        "copy_ms": copy_ms,
        "clone_ms": clone_ms,
        "encode_ms": encode_ms,
        "encode_copies": encode_ms / copy_ms,
        "encode_clones": encode_ms / clone_ms,
        "decode_ms": decode_ms,
        "decode_copies": decode_ms / copy_ms,
        "decode_clones": decode_ms / clone_ms,
    }


def main() -> None:
    """Command line."""
    parser = command_line(
        "codecs",
        __doc__,
        """  fp32 bytes / bytes     of the vector over what travels, scales and indices included
  error                  root mean square, relative to the vector
  error of what travels  the same over the coordinates that do not decode to zero
  / copy                 over a copy into memory that is there, in turns with it
  / clone                over a clone, which writes to fresh memory, as payloads and decoded vectors do""",
    )
    parser.add_argument("--millions", type=float, default=16.0, help="2**20 elements (16)")
    parser.add_argument("--turns", type=int, default=7, help="turns that count (7)")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    vector = torch.randn(int(options.millions * 2**20), generator=torch.Generator().manual_seed(0))
    rows, absent = [], {}
    for name, make in {**OURS, **PEERS}.items():
        if options.only not in name:
            continue
        say(f"codecs: {name}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the hooks' observers announce their retirement
                rows.append(measure(name, make(), vector, options.turns))
        except (ImportError, RuntimeError) as error:
            absent[name] = str(error)
    missing = [f"\n{name} does not run here: {reason}" for name, reason in absent.items()]
    found = {"elements": len(vector), "rows": rows, "absent": absent}
    answer("codecs", found, "\n".join([table(COLUMNS, rows), *missing]), as_json=options.json)


if __name__ == "__main__":
    main()

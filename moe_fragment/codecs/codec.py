"""How a contribution to the trunk's sync looks on the wire: one vector in, one uint8 payload out, and back.

A codec is a value format, with at most one sparsifier before it. The payload is the format's bytes of the values that
travel, then the sparsifier's bytes that say where they belong. It is uint8 because gloo sends no fp8 and no int16
("Invalid scalar type"). A payload says neither its codec nor its size: both ends know them from the recipe.
"""

from __future__ import annotations

import torch

from moe_fragment.codecs.blocks import refuse_poison
from moe_fragment.codecs.scratch import Scratch
from moe_fragment.codecs.stage import Sparsifier, ValueFormat


class PoisonedError(ValueError):
    """A contribution holds NaN or infinity and must not reach the other clusters."""


class Codec:
    """Encodes and decodes vectors of any size; keeps working memory, and a thread shares none with another."""

    def __init__(self, values: ValueFormat, sparsifier: Sparsifier | None = None) -> None:
        self.values = values
        self.sparsifier = sparsifier
        self.scratch = Scratch()

    @property
    def sparse(self) -> bool:
        """Whether a payload leaves coordinates out."""
        return self.sparsifier is not None

    @property
    def lossless(self) -> bool:
        """Whether decoding gives back every bit of an fp32 vector."""
        return self.values.lossless and not self.sparse

    @property
    def cast(self) -> torch.dtype | None:
        """A dtype with the range of fp32 that every value is rounded to, so that sums may travel like contributions."""
        return self.values.cast if not self.sparse else None

    @property
    def value_bits(self) -> int:
        """Bits of a value that travels, without scales and indices; two or less want error feedback."""
        return self.values.value_bits

    @property
    def bits(self) -> float:
        """Bits per element of a large vector: values, scales and indices. For `threshold`, what it expects."""
        if self.sparsifier is None:
            return self.values.bits
        return self.sparsifier.density * self.values.bits + self.sparsifier.index_bits

    def payload_bytes(self, size: int) -> int | None:
        """Bytes of an encoded vector of `size` elements; None where they depend on the data."""
        if self.sparsifier is None:
            return self.values.payload_bytes(size)
        kept, index_bytes = self.sparsifier.kept(size), self.sparsifier.index_bytes(size)
        return None if kept is None or index_bytes is None else self.values.payload_bytes(kept) + index_bytes

    @torch.no_grad()
    def encode(self, vector: torch.Tensor, *, seed: int = 0) -> torch.Tensor:
        """The payload, uint8 [payload_bytes(n)], on the vector's device.

        Args:
            vector: floating point, any shape and strides; flattened, arithmetic in fp32.
            seed: of stochastic rounding; the same vector and seed give the same bytes on one kind of device.

        Raises:
            PoisonedError: NaN or infinity, also as a number beyond fp32.
        """
        flat = self._flat(vector)
        refuse_poison(flat, "a vector to encode holds NaN or infinity", PoisonedError)
        if self.sparsifier is None:
            payload = self._empty(self.values.payload_bytes(len(flat)), flat.device)
            self.values.encode(flat, payload, self.scratch, seed)
            return payload
        coordinates, index = self.sparsifier.select(flat, self.scratch)
        split = self.values.payload_bytes(len(coordinates))
        payload = self._empty(split + len(index), flat.device)
        self.values.encode(flat.index_select(0, coordinates), payload[:split], self.scratch, seed)
        payload[split:] = index
        return payload

    @torch.no_grad()
    def decode(self, payload: torch.Tensor, size: int) -> torch.Tensor:
        """fp32 [size] on the payload's device, zero where a sparse payload says nothing.

        Raises:
            ValueError: not the bytes of an encoded vector of `size` elements.
        """
        payload = _bytes(payload)
        if self.sparsifier is None:
            out = torch.empty(size, dtype=torch.float32, device=payload.device)
            self._decode_values(payload, out)
            return out
        coordinates, values = self._decode_sparse(payload, size)
        return values.new_zeros(size).index_copy_(0, coordinates, values)

    @torch.no_grad()
    def add(
        self,
        payload: torch.Tensor,
        total: torch.Tensor,
        *,
        weight: float = 1.0,
        counts: torch.Tensor | None = None,
    ) -> None:
        """Adds `weight` times the decoded vector to `total`, in place; a sparse one never becomes dense.

        Args:
            payload: from `encode`, on any device.
            total: fp32 [n].
            weight: of this contribution.
            counts: fp32 [n]; grows by `weight` wherever this payload says something, so that `total / counts` is
                the mean over the contributors of a coordinate.

        Raises:
            ValueError: as `decode`; `total` and `counts` are untouched.
        """
        for name, tensor in (("total", total), ("counts", counts)):
            if tensor is not None and (tensor.dtype != torch.float32 or tensor.shape != (total.numel(),)):
                raise ValueError(
                    f"{name}: expected fp32 [{total.numel()}], got {tensor.dtype} {list(tensor.shape)}"
                )
        payload = _bytes(payload).to(total.device)
        if self.sparsifier is None:
            decoded = self.scratch.get("decoded", len(total), torch.float32, total.device)
            self._decode_values(payload, decoded)
            total.add_(decoded, alpha=weight)
            if counts is not None:
                counts.add_(weight)
            return
        coordinates, values = self._decode_sparse(payload, len(total))
        total.index_add_(0, coordinates, values, alpha=weight)
        if counts is not None:
            counts.index_add_(0, coordinates, torch.full_like(values, weight))

    def _flat(self, vector: torch.Tensor) -> torch.Tensor:
        if not vector.is_floating_point():
            raise ValueError(f"a codec encodes floating-point vectors, got {vector.dtype}")
        if vector.dtype == torch.float32 and vector.is_contiguous():
            flat = vector.detach().view(-1)
            # With fewer than two elements any stride is contiguous, but not one that can be viewed as bytes.
            if flat.stride(0) == 1:
                return flat
        flat = self.scratch.get("flat", vector.numel(), torch.float32, vector.device)
        flat.view(vector.shape).copy_(vector)
        return flat

    def _decode_values(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        expected = self.values.payload_bytes(len(out))
        if len(payload) != expected:
            raise ValueError(
                f"corrupt payload: expected {expected} bytes for {len(out)} values, got {len(payload)}"
            )
        self.values.decode(payload, out, self.scratch)

    def _decode_sparse(self, payload: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.sparsifier is not None
        coordinates, index_bytes = self.sparsifier.locate(payload, size, self.scratch)
        values = torch.empty(len(coordinates), dtype=torch.float32, device=payload.device)
        self._decode_values(payload[: len(payload) - index_bytes], values)
        return coordinates, values

    @staticmethod
    def _empty(size: int, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=device)


def _bytes(payload: torch.Tensor) -> torch.Tensor:
    if payload.dtype != torch.uint8 or payload.dim() != 1:
        raise ValueError(
            f"a payload is a uint8 tensor of one dimension, got {payload.dtype} {list(payload.shape)}"
        )
    return payload.contiguous()

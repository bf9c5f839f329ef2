"""How tensors look on the wire."""

from moe_fragment.codecs.packing import RowLayout

__all__ = ["RowLayout"]

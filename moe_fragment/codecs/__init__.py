"""How tensors look on the wire."""

from moe_fragment.codecs.codec import Codec, PoisonedError
from moe_fragment.codecs.feedback import ErrorFeedback
from moe_fragment.codecs.packing import RowLayout
from moe_fragment.codecs.parse import parse_codec

__all__ = ["Codec", "ErrorFeedback", "PoisonedError", "RowLayout", "parse_codec"]

"""FLOPs of training on one token: six per active matrix parameter, and causal attention.

Not here: recomputation (it costs time, but model FLOPs are what utilisation is quoted in), optimizer, router sort.
"""

from __future__ import annotations

from moe_fragment.planning.parameters import count
from moe_fragment.planning.shape import ModelShape


def attention_flops_per_token(shape: ModelShape, sequence: int) -> float:
    """FLOPs per token, forward and backward, of scores and weighted sums over a causal context.

    A token looks back on half of ``sequence`` tokens on average; two matmuls of two FLOPs, three times (forward,
    and twice as much backward): ``6 * layers * sequence * heads * (key width + value width) / 2``.
    Source: PaLM (arXiv:2204.02311, appendix B), halved for the causal mask as FlashAttention-2 counts
    (arXiv:2307.08691, section 4.1).
    """
    if shape.attention == "mla":
        widths = shape.qk_nope + shape.qk_rope + shape.v_head_dim
    else:
        widths = 2 * shape.head_width
    return 6.0 * shape.num_layers * sequence * shape.num_heads * widths / 2


def training_flops_per_token(shape: ModelShape, sequence: int) -> float:
    """FLOPs per token, forward and backward: 6 N of active matrix parameters, and causal attention.

    Args:
        sequence: tokens per sequence; 0 leaves attention out (the plain 6 N rule).

    Source: Kaplan et al. (arXiv:2001.08361, section 2.1).
    """
    return 6.0 * count(shape).matmul + attention_flops_per_token(shape, sequence)

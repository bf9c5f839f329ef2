"""The idle fraction of a pipeline's fill and drain, for equal stages and free transfers."""

from __future__ import annotations


def bubble_fraction(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Idle time over all time of a stage: ``(p - 1) / (m v + p - 1)``; at least 0, below 1.

    GPipe and 1F1B idle alike (arXiv:1811.06965, section 2.3); with ``chunks`` (v) pieces of the model per stage 1F1B is
    interleaved and idles v times less (Megatron-LM, arXiv:2104.04473, section 2.2, there relative to the busy time).

    Args:
        stages: p, at least 1.
        micro_batches: m per step, at least 1.
        chunks: v, model pieces per stage.
    """
    return (stages - 1) / (micro_batches * chunks + stages - 1)

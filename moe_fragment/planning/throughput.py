"""Rates of training from the seconds of a step, and the reverse of model FLOPs utilisation."""

from __future__ import annotations


def tokens_per_s(sequences: float, sequence: int, step_s: float) -> float:
    """Tokens per second of the whole fleet.

    Args:
        sequences: per step, over the whole fleet.
        sequence: tokens in one.
    """
    return sequences * sequence / step_s


def flops_per_gpu(flops_per_token: float, tokens_per_second: float, gpus: int) -> float:
    """Model FLOP/s of one accelerator, recomputation not counted (as Megatron-LM quotes it, arXiv:2104.04473)."""
    return flops_per_token * tokens_per_second / gpus

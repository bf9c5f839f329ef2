"""Accelerator hours and dollars of a training run. Rent of accelerators only: no storage, egress or idle time."""

from __future__ import annotations


def gpu_hours(tokens: float, flops_per_token: float, flops_per_gpu_s: float) -> float:
    """Hours on one accelerator to train on ``tokens``.

    Args:
        flops_per_gpu_s: model FLOP/s that one accelerator reaches (peak times utilisation).
    """
    return tokens * flops_per_token / flops_per_gpu_s / 3600


def rent_usd(hours: float, usd_per_gpu_hour: float) -> float:
    """Dollars for ``hours`` of one accelerator at a price of zero or more."""
    return hours * usd_per_gpu_hour

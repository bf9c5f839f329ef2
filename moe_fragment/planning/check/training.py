"""The kinds of case about whole training runs: throughput, and what a run costs."""

from __future__ import annotations

from pydantic import model_validator

from moe_fragment.planning import cost, throughput
from moe_fragment.planning.catalogue import Accelerator, accelerators
from moe_fragment.planning.check.kinds import Inputs, Predictions, Shape
from moe_fragment.planning.flops import training_flops_per_token
from moe_fragment.planning.quantities import NonNegative, Positive, Share, Whole
from moe_fragment.schema import Count, FieldError


class Throughput(Inputs):
    """A measured step: what it says about the accelerators."""

    model: Shape
    gpu: str | None = None
    """Name in the catalogue; only ``mfu`` needs it."""
    gpus: Count
    seq: Count
    """Tokens per sequence."""
    batch: Count
    """Sequences per step, over all accelerators."""
    layout: str = ""
    """How the model was split, for the reader: it shows in ``step_s``."""
    step_s: Positive

    def predictions(self) -> Predictions:
        tokens = throughput.tokens_per_s(self.batch, self.seq, self.step_s)

        def flops() -> float:
            return throughput.flops_per_gpu(training_flops_per_token(self.model, self.seq), tokens, self.gpus)

        return {
            "tflops_per_gpu": lambda: flops() / 1e12,
            "mfu": lambda: flops() / _accelerator(self.gpu).dense_flops("bf16"),
            "tokens_per_s": lambda: tokens,
            "tokens_per_s_per_gpu": lambda: tokens / self.gpus,
        }


class TrainingCost(Inputs):
    """A training run, from hours that are known or from tokens and the speed of an accelerator.

    Hours: ``gpu_hours``; or ``tokens`` with ``gpu_hours_per_trillion_tokens``; or ``tokens`` with the model (``model``
    or ``active_params``) and its speed (``tflops_per_gpu``, or ``gpu`` and ``mfu``).
    """

    gpu_hours: Positive | None = None
    tokens: Positive | None = None
    gpu_hours_per_trillion_tokens: Positive | None = None
    model: Shape | None = None
    active_params: Positive | None = None
    """Instead of ``model``: parameters at work per token."""
    seq: Whole = 0
    """Tokens per sequence, for attention; 0 leaves it out. Only with ``model``."""
    tflops_per_gpu: Positive | None = None
    """Model TFLOP/s that one accelerator reaches."""
    gpu: str | None = None
    """Name in the catalogue, for ``mfu`` and for the price when none is given."""
    mfu: Share | None = None
    """Share of the data sheet's dense bf16 rate that is reached."""
    gpus: Count | None = None
    """How many accelerators; only ``days`` needs it."""
    usd_per_gpu_hour: NonNegative | None = None
    """Default the lowest on-demand price of ``gpu``."""

    @model_validator(mode="after")
    def _check(self) -> TrainingCost:
        if self.gpu_hours is not None:
            self._nothing_but("gpu_hours", "tokens", "gpu_hours_per_trillion_tokens")
        elif self.tokens is None:
            raise FieldError("tokens", "required when gpu_hours is not given")
        if self.gpu_hours is not None or self.gpu_hours_per_trillion_tokens is not None:
            given = "gpu_hours" if self.gpu_hours is not None else "gpu_hours_per_trillion_tokens"
            self._nothing_but(given, "model", "active_params", "tflops_per_gpu", "mfu")
        else:
            if (self.model is None) == (self.active_params is None):
                raise FieldError("active_params", "expected it or model, and not both")
            if (self.tflops_per_gpu is None) == (self.mfu is None):
                raise FieldError("tflops_per_gpu", "expected it or mfu, and not both")
            if self.mfu is not None:
                _accelerator(self.gpu)
        if self.seq and self.model is None:
            raise FieldError("seq", "expected nothing without model")
        return self

    def predictions(self) -> Predictions:
        return {
            "gpu_hours": self._hours,
            "usd": lambda: cost.rent_usd(self._hours(), self._usd_per_hour()),
            "days": lambda: self._hours() / self._gpus() / 24,
        }

    def _nothing_but(self, given: str, *others: str) -> None:
        for name in others:
            if getattr(self, name) is not None:
                raise FieldError(name, f"expected nothing, because {given} is given")

    def _hours(self) -> float:
        if self.gpu_hours is not None:
            return self.gpu_hours
        assert self.tokens is not None
        if self.gpu_hours_per_trillion_tokens is not None:
            return self.tokens / 1e12 * self.gpu_hours_per_trillion_tokens
        if self.model is not None:
            per_token = training_flops_per_token(self.model, self.seq)
        else:
            assert self.active_params is not None
            per_token = 6 * self.active_params
        if self.tflops_per_gpu is not None:
            return cost.gpu_hours(self.tokens, per_token, self.tflops_per_gpu * 1e12)
        assert self.mfu is not None
        return cost.gpu_hours(self.tokens, per_token, _accelerator(self.gpu).dense_flops("bf16") * self.mfu)

    def _usd_per_hour(self) -> float:
        if self.usd_per_gpu_hour is not None:
            return self.usd_per_gpu_hour
        if self.gpu is None:
            raise FieldError("usd_per_gpu_hour", "required when gpu is not given")
        return _price(self.gpu)

    def _gpus(self) -> int:
        if self.gpus is None:
            raise FieldError("gpus", "required for days")
        return self.gpus


def _accelerator(name: str | None) -> Accelerator:
    if name is None:
        raise FieldError("gpu", "required for a share of its peak (mfu)")
    known = accelerators()
    if name not in known:
        raise FieldError(
            "gpu", f"expected an accelerator of the catalogue ({', '.join(known)}), got '{name}'"
        )
    if "bf16" in known[name].lacks:
        raise FieldError(
            "gpu", f"'{name}' has no bf16 arithmetic, so a share of its bf16 rate (mfu) means nothing"
        )
    return known[name]


def _price(name: str) -> float:
    row = accelerators().get(name)
    if row is None or row.usd_per_hour is None:
        raise FieldError("usd_per_gpu_hour", f"required, because the catalogue has no price for '{name}'")
    return row.usd_per_hour[0]

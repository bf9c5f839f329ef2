"""The `sync` section of a recipe: how the trunk's copies stay together.

Every strategy has defaults of its own; a field that has no effect with the chosen strategy is refused, so that nobody
tunes what is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from moe_fragment.codecs import Codec, parse_codec
from moe_fragment.schema import Count, FieldError, Section

Strategy = Literal[
    "allreduce",
    "butterfly",
    "local_sgd",
    "teleport",
    "diloco",
    "streaming_diloco",
    "decoupled",
    "parameter_server",
]

_COMMON = {"strategy", "preset"}
_ENCODED = {"codec", "error_feedback", "divide_by"}
_ROUND = {"every", "weights", "check_every", "guard"}
_PUSHED = {"every", "outer", "codec", "error_feedback"}
_USED: dict[str, set[str]] = {
    "allreduce": _ENCODED,
    "butterfly": {*_ROUND, "rounds"},
    "local_sgd": _ENCODED | _ROUND,
    "teleport": _ROUND,
    "diloco": {*_ENCODED, *_ROUND, "outer"},
    "streaming_diloco": {*_ENCODED, *_ROUND, "outer", "fragments", "overlap", "mix"},
    "decoupled": {*_PUSHED, "fragments", "overlap", "quorum", "grace", "merge"},
    "parameter_server": {*_PUSHED, "staleness"},
}
"""Fields that have an effect, by strategy."""

_DEFAULTS: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "butterfly": {"every": 1},
    "local_sgd": {"every": 32},
    "teleport": {"every": 512, "guard": {}},
    "diloco": {"every": 100, "outer": {"learning_rate": 0.7}},
    "streaming_diloco": {"every": 100, "overlap": 1, "mix": 0.5, "outer": {"learning_rate": 0.4}},
    "decoupled": {"every": 24, "overlap": 2, "outer": {"learning_rate": 0.7}},
    "parameter_server": {"every": 16, "outer": {"learning_rate": 1.0, "momentum": 0.0}},
}

PRESETS: dict[str, dict[str, Any]] = {
    # SparseLoCo (arXiv 2508.15706): 64 of 4,096 at 2 bits, 146 times smaller than fp32.
    "sparseloco": {
        "strategy": "diloco",
        "every": 30,
        "outer": {"learning_rate": 1.0, "momentum": 0.0},
        "codec": [{"topk": {"k": 64, "block": 4096}}, {"sigma": {"bits": 2}}],
        "error_feedback": 0.95,
    },
    # Streaming DiLoCo (arXiv 2501.18512, table 1): E3M0 and H = 100, 400 times fewer bits than a bf16 gradient a step.
    "streaming_fp4": {
        "strategy": "streaming_diloco",
        "every": 100,
        "overlap": 1,
        "mix": 0.5,
        "outer": {"learning_rate": 0.4},
        "codec": "fp4",
    },
}


class OuterConfig(Section):
    """The outer optimizer of the DiLoCos and of asynchronous strategies: SGD on pseudo-gradients."""

    learning_rate: float = Field(default=0.7, gt=0, allow_inf_nan=False)
    """Default .7 for diloco and decoupled, .4 for streaming_diloco, as published; 1 for parameter_server."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Default .9; 0 for parameter_server."""
    nesterov: bool = True
    """Default on."""


class GuardConfig(Section):
    """Bounds on the distance between trunk copies before a merge, relative to the trunk's norm."""

    warn: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Above it, say so and halve the round. Default .1."""
    refuse: float = Field(default=0.45, gt=0, allow_inf_nan=False)
    """Above it, do not merge: every cluster keeps its own trunk and trains on. Default .45."""
    experts: float = Field(default=4.0, gt=0, allow_inf_nan=False)
    """How many times as far apart copies of experts may be, which train on other tokens each. Default 4."""

    @model_validator(mode="after")
    def _order(self) -> GuardConfig:
        if self.warn > self.refuse:
            raise FieldError("warn", f"expected at most refuse = {self.refuse:g}, got {self.warn:g}")
        return self


class SyncConfig(Section):
    """The `sync` section: how the trunk's copies stay together."""

    strategy: Strategy = "allreduce"
    """`allreduce` (exact, every step; or encoded), `butterfly` (pairwise), `local_sgd` (average parameters every H
    steps), `teleport` (the same, rarely, with a guard), `diloco`, `streaming_diloco`; without waiting for anybody
    `decoupled` (quorum and grace) and `parameter_server` (bounded staleness). Default allreduce."""
    preset: str | None = None
    """Published settings under a name, `sparseloco` or `streaming_fp4`; other fields given here override them."""
    every: Count = 1
    """H: steps between two syncs of the same parameter. Default 1 for butterfly, 32 for local_sgd, 512 for teleport,
    100 for the DiLoCos."""
    fragments: Count | None = None
    """Parts of the trunk that are synced one after another. Default: one per layer, 8 at most."""
    overlap: int = Field(default=0, ge=0)
    """Steps (tau) that a fragment's transfer may take, hidden behind training; below every / fragments. Default 1 for
    streaming_diloco."""
    mix: float = Field(default=0.0, ge=0, le=1)
    """Weight (alpha) of a cluster's own weights in a merge. Default .5 for streaming_diloco."""
    outer: OuterConfig = OuterConfig(learning_rate=1.0, momentum=0.0)
    """Of the DiLoCos and of asynchronous strategies."""
    rounds: Literal["all", "one"] = "all"
    """Of butterfly: all log2 C rounds in one sync (exact), or one round per sync (mixing). Default all."""
    weights: Literal["tokens", "equal"] = "tokens"
    """What a merge weighs clusters by: the tokens each trained on since the last one, or equally. Default tokens."""
    codec: Any = None
    """How contributions look on the wire, a stage or a list of them (`int8`, `[{topk: {k: 64}}, sigma]`). Default none:
    fp32."""
    error_feedback: float | None = Field(default=None, ge=0, le=1)
    """Decay of what a codec lost, added to the next contribution. Required with two bits or less. Default none."""
    quorum: Count = 1
    """Of decoupled: how many clusters must have pushed a fragment before it is merged. Default 1."""
    grace: float = Field(default=0.5, ge=0, le=1)
    """Of decoupled: part of what is left of `overlap` steps that others get on top of the quorum. Default .5."""
    merge: Literal["rda", "average"] = "rda"
    """Of decoupled: `rda` keeps the length of contributions that point apart, `average` does not. Default rda."""
    staleness: Count = 4
    """Of parameter_server: how many pushes a cluster may be ahead of the slowest before it has to wait. Default 4."""
    divide_by: Literal["clusters", "contributors"] = "clusters"
    """What the mean of sparse contributions is over, element by element. Default clusters."""
    guard: GuardConfig | None = None
    """Watch over the distance between trunk copies. Default: on for teleport, off for the others."""
    check_every: int = Field(default=10, ge=0)
    """Compare a checksum of the global copies at every n-th merge; 0 never. Default 10."""

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        given = dict(data)
        name = given.get("preset")
        if name is not None:
            if name not in PRESETS:
                raise FieldError("preset", f"expected one of {', '.join(PRESETS)}, got {name!r}")
            given = _over(PRESETS[name], given)
            if given["strategy"] != PRESETS[name]["strategy"]:
                raise FieldError("strategy", f"preset {name} is one of {PRESETS[name]['strategy']}")
        strategy = given.get("strategy", "allreduce")
        if not isinstance(strategy, str) or strategy not in _USED:
            return given
        for field in given:
            if field in cls.model_fields and field not in _USED[strategy] | _COMMON:
                raise FieldError(field, f"has no effect with strategy {strategy}")
        return _over(_DEFAULTS[strategy], given)

    @model_validator(mode="after")
    def _composes(self) -> SyncConfig:
        codec = self.build_codec()
        if codec.value_bits <= 2 and self.error_feedback is None:
            raise FieldError(
                "error_feedback",
                "required with two bits or less, which ruin training without it; 0.95 is usual",
            )
        if codec.lossless and self.error_feedback is not None:
            raise FieldError("error_feedback", "has no effect without a codec that loses something")
        if self.guard is not None and codec.sparse:
            raise FieldError("guard", "cannot tell how far copies are apart from sparse contributions")
        if "divide_by" in self.model_fields_set and not codec.sparse:
            raise FieldError("divide_by", "has no effect without a sparsifier in the codec")
        if self.strategy == "butterfly" and self.is_gradient:
            for field in ("weights", "guard", "check_every"):
                if field in self.model_fields_set:
                    raise FieldError(field, "has no effect with every: 1, which sums gradients")
        if self.only_mixes:
            for field in ("weights", "guard", "check_every"):
                if field in self.model_fields_set:
                    raise FieldError(field, "has no effect with rounds: one, which has no global copy")
        streams = self.strategy == "streaming_diloco"
        if streams and self.overlap and self.overlap * (self.fragments or 1) >= self.every:
            raise FieldError(
                "overlap",
                f"expected less than every / fragments = {self.every / (self.fragments or 1):g} steps, got "
                f"{self.overlap}: one fragment is under way at a time",
            )
        return self

    def build_codec(self) -> Codec:
        """The codec.

        Raises:
            FieldError: it does not exist, or not like this.
        """
        try:
            return parse_codec(self.codec)
        except FieldError as error:
            raise FieldError(f"codec.{error.field}", error.message) from None
        except ValueError as error:
            raise FieldError("codec", str(error)) from None

    @property
    def is_gradient(self) -> bool:
        """Whether the trunk's gradient is summed in every step, so that copies never differ."""
        return self.strategy == "allreduce" or (
            self.strategy == "butterfly" and self.rounds == "all" and self.every == 1
        )

    @property
    def is_asynchronous(self) -> bool:
        """Whether clusters wait for nobody, and push and pull in their own time."""
        return self.strategy in ("decoupled", "parameter_server")

    @property
    def only_mixes(self) -> bool:
        """Whether there is no global copy."""
        return self.strategy == "butterfly" and self.rounds == "one"

    @property
    def needs_side_rail(self) -> bool:
        """Whether transfers outlast steps."""
        return self.is_asynchronous or self.overlap > 0


def _over(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults with what is given on top; sections field by field."""
    merged = dict(defaults)
    for field, value in given.items():
        if isinstance(merged.get(field), dict) and isinstance(value, Mapping) and field != "codec":
            merged[field] = {**merged[field], **value}
        else:
            merged[field] = value
    return merged

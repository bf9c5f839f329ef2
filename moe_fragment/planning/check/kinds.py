"""One class per kind of case: the inputs it takes, and the formulas that predict its values from them.

Fields carry their units in their names, as case files write them; decimal prefixes (``gbps`` is 10^9 bits per second,
``GBps`` is 10^9 bytes per second), one direction; ``delay_ms`` is one way, ``rtt_ms`` a round trip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from moe_fragment.planning import all_reduce, bubble, data_parallel, goodput, network, overlap, wire
from moe_fragment.planning.catalogue import models
from moe_fragment.planning.parameters import count
from moe_fragment.planning.quantities import NonNegative, Positive
from moe_fragment.planning.shape import ModelShape, from_transformers
from moe_fragment.schema import Count, FieldError, Section

GBPS = 1e9 / 8
"""Bytes per second in a Gbit/s."""


def read_shape(value: Any) -> Any:
    """A model's name in the catalogue, a transformers configuration, or a shape, as a shape."""
    if isinstance(value, str):
        known = models()
        if value not in known:
            raise ValueError(f"expected a model of the catalogue ({', '.join(known)}), got {value!r}")
        return known[value].shape
    if isinstance(value, Mapping) and {"num_hidden_layers", "model_type"} & set(value):
        return from_transformers(value)
    return value


Shape = Annotated[ModelShape, BeforeValidator(read_shape)]
Predictions = Mapping[str, Callable[[], float]]


class Inputs(Section):
    """What one kind of case takes."""

    def predictions(self) -> Predictions:
        """Every value this kind can predict, by name; computed when asked for."""
        raise NotImplementedError


class AllReduce(Inputs):
    """A vector summed over nodes with one link each."""

    backend: all_reduce.Backend
    nodes: Count
    bytes: Positive
    gbps: Positive
    delay_ms: NonNegative = 0.0

    def predictions(self) -> Predictions:
        return {
            "time_s": lambda: all_reduce.ring_time(
                self.backend, self.bytes, self.nodes, self.gbps * GBPS, self.delay_ms / 1e3
            ),
            "bytes_per_node": lambda: all_reduce.ring_bytes(self.bytes, self.nodes),
        }


class Send(Inputs):
    """One message from one node to another."""

    backend: all_reduce.Backend
    bytes: Positive
    gbps: Positive
    delay_ms: NonNegative = 0.0

    def predictions(self) -> Predictions:
        send = network.nccl_send_time if self.backend == "nccl" else network.gloo_send_time
        return {"time_s": lambda: send(self.bytes, self.gbps * GBPS, self.delay_ms / 1e3)}


class Tcp(Inputs):
    """Parallel TCP streams over one path."""

    rtt_ms: NonNegative
    streams: Count
    nic_gbps: Positive

    def predictions(self) -> Predictions:
        return {
            "gbps": lambda: network.stream_rate(self.rtt_ms / 1e3, self.streams, self.nic_gbps * GBPS) / GBPS
        }


class HierarchicalAllReduce(Inputs):
    """A vector summed over nodes of several accelerators."""

    bytes: Positive
    nodes: Count
    gpus_per_node: Count
    intra_GBps: Positive
    inter_GBps: Positive

    def predictions(self) -> Predictions:
        return {
            "time_s": lambda: all_reduce.hierarchical_time(
                self.bytes, self.nodes, self.gpus_per_node, self.intra_GBps * 1e9, self.inter_GBps * 1e9
            ),
            "wan_bytes_per_gpu": lambda: all_reduce.hierarchical_wan_bytes(
                self.bytes, self.nodes, self.gpus_per_node
            ),
        }


class DataParallelSync(Inputs):
    """Copies of a model brought together by one of three methods."""

    nodes: Count
    bytes: Positive
    gbps: Positive
    delay_ms: NonNegative = 0.0
    method: data_parallel.Method

    def predictions(self) -> Predictions:
        return {
            "time_s": lambda: data_parallel.sync_time(
                self.method, self.bytes, self.nodes, self.gbps * GBPS, self.delay_ms / 1e3
            )
        }


class Utilisation(Inputs):
    """The bandwidth at which a strategy keeps the accelerators as busy as asked, or how busy a bandwidth keeps them."""

    layers: Annotated[Count, Field(le=10_000)]
    params: Positive
    step_s: Positive
    sync_every: Count
    strategy: overlap.Strategy
    bits: Positive
    fragment_layers: Count | None = None
    target_utilisation: Annotated[float, Field(gt=0, lt=1)] | None = None
    gbps: Positive | None = None

    @model_validator(mode="after")
    def _check(self) -> Utilisation:
        streaming = self.strategy.startswith("streaming")
        if streaming and self.fragment_layers is None:
            raise FieldError("fragment_layers", f"required for strategy '{self.strategy}'")
        if not streaming and self.fragment_layers is not None:
            raise FieldError("fragment_layers", f"expected nothing for strategy '{self.strategy}'")
        if (self.target_utilisation is None) == (self.gbps is None):
            raise FieldError("target_utilisation", "expected it or gbps, and not both")
        return self

    def predictions(self) -> Predictions:
        plan = overlap.Plan(
            strategy=self.strategy,
            layers=self.layers,
            parameters=self.params,
            step_s=self.step_s,
            sync_every=self.sync_every,
            bits=self.bits,
            fragment_layers=self.fragment_layers or self.layers,
        )
        target, gbps = self.target_utilisation, self.gbps
        if target is not None:
            return {"gbps": lambda: overlap.bandwidth_for(plan, target) / 1e9}
        assert gbps is not None
        return {"compute_utilisation": lambda: overlap.utilisation(plan, gbps * 1e9)}


class OuterUtilisation(Inputs):
    """Rounds of compute, each followed by an exchange."""

    compute_s: Positive
    comm_s: NonNegative

    def predictions(self) -> Predictions:
        return {"compute_utilisation": lambda: overlap.outer_utilisation(self.compute_s, self.comm_s)}


class ParameterCount(Inputs):
    """The size of a model."""

    config: Shape

    def predictions(self) -> Predictions:
        counted = count(self.config)
        return {
            name: lambda name=name: float(getattr(counted, name))  # type: ignore[misc]
            for name in ("total", "active", "active_without_embedding", "trunk", "experts", "one_expert")
        }


class Wire(Inputs):
    """A parameter vector under an encoding."""

    params: Positive
    codec: str

    @model_validator(mode="after")
    def _check(self) -> Wire:
        try:
            wire.bits_per_parameter(self.codec)
        except ValueError as error:
            raise FieldError("codec", str(error)) from None
        return self

    def predictions(self) -> Predictions:
        return {
            "ratio": lambda: wire.ratio_to_fp32(self.codec),
            "bytes": lambda: wire.wire_bytes(self.params, self.codec),
        }


class Goodput(Inputs):
    """A fleet whose chips fail, split into clusters that fail apart."""

    chips: Positive
    mtbi_years: Positive
    clusters: Count
    lost_s: NonNegative = goodput.LOST_S

    def predictions(self) -> Predictions:
        return {
            "goodput": lambda: goodput.goodput(
                self.chips, self.mtbi_years * goodput.YEAR_S, self.clusters, self.lost_s
            )
        }


class Bubble(Inputs):
    """A pipeline of equal stages."""

    stages: Count
    microbatches: Count
    schedule: Literal["1f1b", "gpipe", "interleaved"]
    chunks: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Bubble:
        if (self.schedule == "interleaved") != (self.chunks is not None):
            raise FieldError(
                "chunks", "expected model pieces per stage for schedule 'interleaved', and only there"
            )
        return self

    def predictions(self) -> Predictions:
        return {"fraction": lambda: bubble.bubble_fraction(self.stages, self.microbatches, self.chunks or 1)}

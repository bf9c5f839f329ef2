"""A cluster's ranks as a pipeline: DeepSpeed's engine runs the stages, the fleet decides when they step.

DeepSpeed's schedule (1F1B) does everything up to the reduced gradients; its optimizer step is taken out of it and left
to whoever has the fleet's verdict. Nothing but hidden vectors and their gradients passes between stages: every stage
reads the micro-batch itself, and router losses are attached to the hidden vectors where they arise, as an identity
whose backward gives them their gradient.

All clusters run the same stages and as many micro-batches, so that the same layers of all clusters exchange tokens in
the same order; another order would be a deadlock (1F1B waits forward and backward).
"""

from __future__ import annotations

import contextlib
import io
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, OptimizerStep
from torch import nn

from moe_fragment.train.cluster_engine import ClusterEngine, StageTimes
from moe_fragment.train.local_experts import LocalExperts
from moe_fragment.train.loss import Batch, auxiliary_loss, router_options, token_losses
from moe_fragment.train.stages import EMBEDDING, Stage, cut, is_tied, pieces, run


class _Tied(TiedLayerSpec):
    """The embedding, which is there already."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__(EMBEDDING, nn.Embedding)
        self._embedding = embedding

    def build(self, log: bool = False) -> nn.Module:
        return self._embedding


class _Attach(torch.autograd.Function):
    """Hidden vectors as they are; in backward the loss attached to them has the gradient 1."""

    @staticmethod
    def forward(ctx: Any, hidden_BSD: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.dtype = loss.dtype
        return hidden_BSD.view_as(hidden_BSD)

    @staticmethod
    def backward(ctx: Any, gradient_BSD: torch.Tensor) -> Any:
        return gradient_BSD, gradient_BSD.new_ones((), dtype=ctx.dtype)


@dataclass
class _Work:
    """Micro-batches to run, and what came of them."""

    batches: Sequence[Batch]
    expected_tokens: float
    accumulation: int
    begun: int = 0
    tokens: int = 0
    cross_entropy: float | torch.Tensor = 0.0


class PipelinedModel(PipelineModule):
    """A stage of a model, for DeepSpeed's pipeline engine.

    Its layers are the pieces of the model, with placeholders for those of other stages; its forward is the stage's own.

    Args:
        model: of which `cut` has left the stage, fragmented.
        own: modules of the stage's pieces.
        stage: which part of the model it is.
        bounds: of all stages.
        tied: whether head and embedding are one parameter.
    """

    def __init__(
        self, model: Any, own: Sequence[nn.Module], stage: Stage, bounds: Sequence[int], *, tied: bool
    ) -> None:
        self._bounds = list(bounds)
        layers: list[Any] = [nn.Identity() for _ in range(stage.count)]
        layers[stage.low : stage.high] = own
        if tied:
            layers[0] = layers[-1] = _Tied(model.base_model.embed_tokens)
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its layers
            super().__init__(layers, num_stages=len(bounds) - 1, dynamic_shape=True)
        self._layer_specs: list[Any] = []  # or they would keep what other stages have
        # Not as a submodule, which would give every parameter a second name. It has buffers that no piece has.
        self.__dict__["transformer"] = model.to(get_accelerator().device_name(self.local_rank))
        self.stage = stage
        self.work: _Work | None = None

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = self._bounds
        self._set_bounds(self._bounds[self.stage_id], self._bounds[self.stage_id + 1])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The next of `work`'s micro-batches: hidden vectors [B, S, D], or of the last stage its loss."""
        model, work = self.transformer, self.work
        assert work is not None, "no micro-batches to run"
        index = work.begun
        batch = work.batches[index]
        work.begun += 1
        options = router_options(model) if self.training else {}
        with model.fragmented.micro_batch(index, counted=not batch.filler):
            outputs, decoder = run(model, self.stage, inputs, attention_mask=batch.attention_mask, **options)
        loss = auxiliary_loss(model, decoder, batch) if self.training else None
        if not self.stage.is_last:
            return outputs if loss is None else _Attach.apply(outputs, loss / work.expected_tokens)
        cross_entropy = token_losses(outputs, batch)
        work.tokens += batch.tokens
        work.cross_entropy += cross_entropy.detach().double()
        total = cross_entropy if loss is None else cross_entropy + loss.to(cross_entropy.dtype)
        return total * (work.accumulation / work.expected_tokens)  # the engine divides by the accumulation


class PipelineClusterEngine(ClusterEngine):
    """Of a rank of a pipeline; see `ClusterEngine`."""

    def __init__(self, engine: Any, model: Any, local_experts: LocalExperts | None, outline: str) -> None:
        self.outline = outline
        super().__init__(engine, model, local_experts)
        pipelined: PipelinedModel = engine.module
        self._pipelined = pipelined
        self._started = 0.0
        if EMBEDDING in pipelined.tied_modules and not pipelined.stage.is_first:
            weight = model.get_input_embeddings().weight
            self.mirrored = frozenset(name for name, held in model.named_parameters() if held is weight)
        methods = engine._INSTRUCTION_MAP
        engine._INSTRUCTION_MAP = {
            **methods,
            ForwardPass: self._timed(methods[ForwardPass]),
            BackwardPass: self._timed(methods[BackwardPass]),
            OptimizerStep: lambda _: None,  # it is `step` that takes it
        }

    def _timed(self, execute: Callable[..., None]) -> Callable[..., None]:
        def timed(engine: Any, **options: Any) -> None:
            began = time.monotonic()
            execute(engine, **options)
            ended = time.monotonic()
            if self.times is not None and self.module.training:
                self.times.busy_s += ended - began
                self.times.until_s = ended - self._started

        return timed

    def run(self, batches: Sequence[Batch], expected_tokens: float) -> tuple[float, float]:
        self.module.train()
        self.times, self._started = StageTimes(), time.monotonic()
        return self._execute(self.deepspeed._train_schedule(), batches, expected_tokens)

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> tuple[float, float]:
        self.module.eval()
        return self._execute(self.deepspeed._inference_schedule(len(batches)), batches, 1.0)

    def _execute(
        self, schedule: Any, batches: Sequence[Batch], expected_tokens: float
    ) -> tuple[float, float]:
        engine = self.deepspeed
        engine.module.train(self.module.training)
        batches = [batch.to(self.device) for batch in batches]
        self._pipelined.work = work = _Work(batches, expected_tokens, self.accumulation)
        engine.set_dataiterator(iter([(batch.input_ids, batch.labels) for batch in batches]))
        engine.total_loss, engine._compute_loss = None, True
        engine._exec_schedule(schedule)
        self._pipelined.work = None
        return work.tokens, float(work.cross_entropy)

    def step(self) -> None:
        self.deepspeed._exec_optimizer_step()


class StagePart:
    """A model cut down to one stage, not wrapped yet.

    Args:
        model: whole; it is cut in place.
        bounds: of all stages.
        number: of the stage.
    """

    def __init__(self, model: Any, bounds: Sequence[int], number: int) -> None:
        self._model = model
        self._bounds = bounds
        self._stage = Stage.of(bounds, number)
        self._tied = is_tied(model)
        row = pieces(model)
        self._own = [piece.module for piece in row[self._stage.low : self._stage.high]]
        self.outline = "; ".join(
            f"stage {stage} runs {row[low].name}" + (f" to {row[high - 1].name}" if high > low + 1 else "")
            for stage, (low, high) in enumerate(itertools.pairwise(bounds))
        )
        """Who runs what, for people."""
        cut(model, self._stage)

    def pipelined(self) -> PipelinedModel:
        """For `deepspeed.initialize`, after the model was fragmented; collective over the cluster."""
        return PipelinedModel(self._model, self._own, self._stage, self._bounds, tied=self._tied)

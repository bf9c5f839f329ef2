"""Where a transformers model can be cut into the stages of a pipeline, and the cut itself.

A model is a row of pieces: the embedding, the decoder layers, the last norm, the head. A stage keeps a range of them
and runs the family's own forward over what it kept, so there is no second implementation of anything: a stage that does
not begin with the embedding is given the hidden vectors instead, one that does not end with the head returns them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from moe_fragment.schema import ConfigError

EMBEDDING, NORM, HEAD = "embed_tokens", "norm", "lm_head"
_WITHOUT_WEIGHTS = "rotary_emb"


@dataclass(frozen=True)
class Piece:
    """A part of a model that one stage runs."""

    name: str
    module: nn.Module


def pieces(model: Any) -> list[Piece]:
    """The pieces of a whole model, in the order in which they run.

    Raises:
        ConfigError: the model is no such row.
    """
    decoder, head = model.base_model, getattr(model, HEAD, None)
    children = dict(decoder.named_children())
    unknown = children.keys() - {EMBEDDING, "layers", NORM, _WITHOUT_WEIGHTS}
    lacks = {EMBEDDING, "layers", NORM} - children.keys()
    if decoder is model or not isinstance(head, nn.Module) or unknown or lacks:
        what = f"has {min(unknown)}" if unknown else f"lacks {min(lacks)}" if lacks else "has another head"
        raise ConfigError(
            f"deepspeed: pipeline.stages: {type(model).__name__} cannot be cut into stages: it {what}; expected an "
            f"embedding, layers, a norm and {HEAD}"
        )
    layers = [Piece(f"layers.{number}", layer) for number, layer in enumerate(decoder.layers)]
    return [Piece(EMBEDDING, decoder.embed_tokens), *layers, Piece(NORM, decoder.norm), Piece(HEAD, head)]


def is_tied(model: Any) -> bool:
    """Whether head and embedding are one parameter."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


@dataclass(frozen=True)
class Stage:
    """Which pieces of a model a stage runs: [`low`, `high`) of `count`."""

    low: int
    high: int
    count: int

    @property
    def is_first(self) -> bool:
        """Whether it begins with token ids."""
        return self.low == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with logits."""
        return self.high == self.count

    @staticmethod
    def of(bounds: Sequence[int], stage: int) -> Stage:
        """Number `stage` of those with these bounds."""
        return Stage(bounds[stage], bounds[stage + 1], bounds[-1])


def cut(model: Any, stage: Stage) -> None:
    """Leave nothing of a whole model but a stage, in place; what stays has the names it had.

    The last stage of a model with tied embeddings keeps the embedding for its weight.
    """
    decoder, names, tied = model.base_model, [piece.name for piece in pieces(model)], is_tied(model)
    kept = set(names[stage.low : stage.high])
    layers = nn.ModuleList()
    for number, layer in enumerate(decoder.layers):
        if f"layers.{number}" in kept:
            layers.add_module(str(number), layer)
    decoder.layers = layers
    if NORM not in kept:
        decoder.norm = nn.Identity()
    if EMBEDDING not in kept and not (tied and HEAD in kept):
        decoder.embed_tokens = nn.Identity()
    if HEAD not in kept:
        model.lm_head = nn.Identity()


def alone(model: Any, index: int) -> tuple[Any, Stage]:
    """A copy of one piece of a whole model as a stage of its own."""
    decoder, stage = model.base_model, Stage(index, index + 1, len(pieces(model)))
    held = decoder.layers, decoder.norm, decoder.embed_tokens, model.lm_head
    cut(model, stage)
    try:
        return copy.deepcopy(model), stage
    finally:
        decoder.layers, decoder.norm, decoder.embed_tokens, model.lm_head = held


def run(model: Any, stage: Stage, inputs: Any, **options: Any) -> tuple[Any, Any]:
    """A stage's forward.

    Args:
        model: of which `cut` has left this stage.
        stage: itself.
        inputs: token ids [B, S] on the first stage, else hidden vectors [B, S, D].
        options: for the decoder.

    Returns:
        hidden vectors [B, S, D], or of the last stage logits [B, S, V]; and the decoder's outputs.
    """
    source = {"input_ids": inputs} if stage.is_first else {"inputs_embeds": inputs}
    outputs = model.base_model(**source, use_cache=False, **options)
    hidden_BSD = outputs.last_hidden_state
    return (model.lm_head(hidden_BSD) if stage.is_last else hidden_BSD), outputs


def parameters_of(module: nn.Module) -> Iterator[nn.Parameter]:
    """What is trained of a piece."""
    return (parameter for parameter in module.parameters() if parameter.requires_grad)

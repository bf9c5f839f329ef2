"""The same training twice: by a fleet through the product, and by one process in plain torch."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.fleet.harness import Place, Rank
from tests.fleet.models import build, join, steer, whole_state

if TYPE_CHECKING:
    from moe_fragment.train.loss import Batch
    from moe_fragment.train.step import Stepper

CONFIGS = Path(__file__).parents[2] / "ds_configs"
LAYOUTS: dict[str, list[list[int]]] = {
    "even": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "uneven": [[0, 1, 2, 3, 4, 5, 6], [7]],
    "scattered": [[0, 2, 7], [1, 3, 4, 5, 6]],
    "reversed": [[6, 1, 3], [7, 5, 4, 2, 0]],
    "none": [[0, 1, 2, 3, 4, 5, 6, 7], []],
    "thirds": [[0, 5, 7], [1, 6], [2, 3, 4]],
    "alone": [[0, 1, 2, 3, 4, 5, 6, 7]],
    "replicated": [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7]],
    "hot": [[0, 1, 2, 3, 6], [6, 4, 5, 7, 1]],
}
"""Experts of each cluster, in packed order. In `hot`, experts 1 and 6 are on both."""
ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
EXPECTED_TOKENS = 100


@dataclass(frozen=True)
class Scenario:
    """One training run; everything that both sides need to know."""

    sizes: tuple[int, ...] = (1, 1)
    model: str = "qwen3"
    options: dict[str, Any] = field(default_factory=dict)
    zero: str = "zero1-fp32"
    layout: str = "scattered"
    accumulation: int = 1
    checkpointing: bool = False
    padding: str = ""
    """`left`, `right` or none."""
    share: str = "unequal"
    """Sequences per rank: `equal`, `unequal`, `idle` (the last rank has none) or `one` (a single token)."""
    steered: str = ""
    """`starved`: the last cluster's experts get no token; `crowded`: rank 0's tokens all go to expert 5."""
    steps: int = 20
    clip_norm: float = 1.0
    learning_rate: float = 3e-3
    length: int = 12
    sync: dict[str, Any] = field(default_factory=dict)
    exchange: str = "tokens"
    parallel: tuple[tuple[float, ...], ...] = ()
    """Of each cluster's ranks, their shares of its experts; none where each rank holds them all."""
    partition: tuple[int, ...] = ()
    """Of each stage of a pipeline, how many layers it has (embedding, decoder layers, norm, head)."""

    @property
    def stages(self) -> int:
        """Of each cluster's pipeline; 1 for none."""
        return max(1, len(self.partition))

    def model_of(self, dtype: torch.dtype = torch.float32) -> Any:
        """The whole model at the start."""
        from moe_fragment.models.recompute import recompute_layers

        model = build(self.model, dtype=dtype, **self.options)
        if self.steered == "starved":
            steer(model, away_from=tuple(LAYOUTS[self.layout][-1]))
        elif self.steered == "crowded":
            steer(model, marked_to=5)
        if self.checkpointing:
            recompute_layers(model)
        return model

    def places(self) -> list[Place]:
        """All ranks of the fleet that read data of their own: of a pipeline, one for all stages."""
        widths = tuple(size // self.stages for size in self.sizes)
        return [Place(widths, c, r) for c, size in enumerate(widths) for r in range(size)]

    def reader(self, place: Place) -> Place:
        """The one of `places` that a rank belongs to."""
        width = place.size // self.stages
        return next(p for p in self.places() if (p.cluster, p.rank) == (place.cluster, place.rank % width))

    def sequences(self, place: Place, micro: int) -> int:
        """How many sequences rank `place` has in micro-batch `micro`."""
        if self.share == "equal":
            return 2
        if self.share == "one":
            return int((place.cluster, place.rank, micro) == (len(self.sizes) - 1, 0, 0))
        if self.share == "idle" and place.cluster == len(self.sizes) - 1 and place.rank == place.size - 1:
            return 0
        return 1 + 2 * place.cluster + place.rank + micro % 2

    def batch(self, step: int, place: Place, micro: int) -> Batch:
        """The micro-batch of a rank; made from its numbers alone."""
        from moe_fragment.train.loss import IGNORED, Batch
        from tests.fleet.models import SIGNPOST, VOCABULARY

        generator = torch.Generator().manual_seed(
            1 + step * 1009 + place.cluster * 101 + place.rank * 11 + micro
        )
        count = self.sequences(place, micro)
        length = 1 if self.share == "one" else self.length
        marked = self.steered == "crowded" and (place.cluster, place.rank) == (0, 0)
        tokens = torch.randint(
            0, SIGNPOST if marked else VOCABULARY, (count, length + 1), generator=generator
        )
        batch = Batch.of(tokens, 0)
        if not self.padding or not count:
            return batch
        mask = torch.ones_like(batch.input_ids)
        labels = batch.labels.clone()
        for row in range(count):
            padded = int(torch.randint(0, length // 2, (), generator=generator)) + (row == 0)
            where = slice(0, padded) if self.padding == "left" else slice(length - padded, length)
            mask[row, where] = 0
            labels[row, where] = IGNORED
        return Batch(batch.input_ids, labels, mask)

    def batches(self, step: int, place: Place) -> list[Batch]:
        """All micro-batches of a step of one of `places`."""
        return [self.batch(step, place, micro) for micro in range(self.accumulation)]


Pieces = dict[str, torch.Tensor]
"""Tensors by canonical name."""


@dataclass
class History:
    """What a run went through. `weights` (before) and `gradients` (before clipping) are by step, where kept."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    outcomes: list[int] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    trunk_hashes: list[str] = field(default_factory=list)
    """Of the trunk's master weights after each step."""
    weights: dict[int, Pieces] = field(default_factory=dict)
    gradients: dict[int, Pieces] = field(default_factory=dict)
    syncs: list[tuple[int, int, str]] = field(default_factory=list)
    """(step, fragment, outcome) of each."""
    final: Pieces = field(default_factory=dict)
    """Weights at the end."""
    biases: dict[int, torch.Tensor | None] = field(default_factory=dict)
    """Of all routers, before each kept step and (under the number of steps) at the end."""


# -- the fleet's side --------------------------------------------------------------------------------------------


def start(rank: Rank, scenario: Scenario) -> Stepper:
    """A fresh fragmented model, DeepSpeed engine and stepper on this rank."""
    from moe_fragment.placement import Placement
    from moe_fragment.sync import SyncConfig
    from moe_fragment.train.engine import build_engine
    from moe_fragment.train.step import Stepper

    model = scenario.model_of()
    layout = LAYOUTS[scenario.layout]
    first = scenario.options.get("first_k_dense", 0)
    placement = Placement(
        clusters=rank.topology.names,
        num_experts=1 + max(expert for held in layout for expert in held),
        layers=dict.fromkeys(range(first, model.config.num_hidden_layers), layout),
    )
    config = json.loads((CONFIGS / f"{scenario.zero}.json").read_text())
    if scenario.partition:
        config["pipeline"] = {"stages": scenario.stages, "partition": list(scenario.partition)}
    engine = build_engine(
        model,
        placement,
        rank.fabric,
        config,
        shares=scenario.parallel[rank.place.cluster] or None if scenario.parallel else None,
        accumulation=scenario.accumulation,
        learning_rate=scenario.learning_rate,
        **ADAM,
    )
    engine.fragmented.route_locally(scenario.exchange == "local")
    return Stepper(
        engine,
        rank.fabric,
        expected_tokens=EXPECTED_TOKENS,
        clip_norm=scenario.clip_norm,
        sync=SyncConfig(**scenario.sync),
        exchange_tokens=scenario.exchange == "tokens",
    )


def canonical(rank: Rank, stepper: Stepper, flats: list[torch.Tensor]) -> Pieces:
    """The tensors that this cluster's ranks hold together in such flat buffers, whole, on every rank of it.

    Second copies, such as a tied embedding's on the last stage, must be the same to the bit.
    """
    sizes = stepper.shards.canonical_sizes
    found = {name: torch.zeros(size, dtype=torch.float32) for name, size in sizes.items()}
    for shard in stepper.shards.shards:
        piece = flats[shard.flat].detach()[shard.position : shard.position + shard.size]
        found[shard.name][shard.offset : shard.offset + shard.size] = piece
    for tensor in found.values():
        rank.fabric.cluster_sum(tensor)  # others hold zeros there; this also turns -0.0 into 0.0 ...
        tensor += 0.0  # ... and so does this, in a cluster of one rank
    for shard in stepper.shards.mirrors:
        piece = flats[shard.flat].detach()[shard.position : shard.position + shard.size]
        assert torch.equal(piece + 0.0, found[shard.name][shard.offset : shard.offset + shard.size])
    return found


def digest(pieces: Pieces) -> str:
    """Hash of tensors, names included."""
    found = hashlib.sha256()
    for name, tensor in sorted(pieces.items()):
        found.update(name.encode())
        found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def trunk_digest(rank: Rank, stepper: Stepper) -> str:
    """Hash of this cluster's copy of the trunk's master weights."""
    from moe_fragment.train.zero import is_expert

    pieces = canonical(rank, stepper, stepper.shards.masters())
    return digest({name: piece for name, piece in pieces.items() if not is_expert(name)})


def train(rank: Rank, scenario: Scenario, keep: tuple[int, ...] = ()) -> History:
    """Case: train, and keep weights and gradients of the steps in `keep`."""
    stepper = start(rank, scenario)
    history = History()
    watched: list[list[torch.Tensor]] = []
    give = stepper.shards.set_gradients

    def watch(flats: list[torch.Tensor]) -> None:
        watched.append([flat.clone() for flat in flats])
        give(flats)

    stepper.shards.set_gradients = watch  # type: ignore[method-assign]
    for step in range(scenario.steps):
        watched.clear()
        if step in keep:
            history.weights[step] = canonical(rank, stepper, stepper.shards.masters())
            history.biases[step] = cluster_bias(rank, stepper)
        report = stepper.step(
            rank.next_step(),
            scenario.batches(step, scenario.reader(rank.place)),
            learning_rate=scenario.learning_rate,
        )
        record(history, report)
        last = step + 1 == scenario.steps
        for sync in stepper.sync.after_step(step + 1, report.own_tokens, last=last):
            history.syncs.append((sync.step, sync.fragment, sync.outcome))
        if step in keep:
            clipped = min(1.0, scenario.clip_norm / (report.grad_norm + 1e-6)) if scenario.clip_norm else 1.0
            history.gradients[step] = {
                name: piece / clipped for name, piece in canonical(rank, stepper, watched[0]).items()
            }
        history.trunk_hashes.append(trunk_digest(rank, stepper))
    history.biases[scenario.steps] = cluster_bias(rank, stepper)
    history.final = canonical(rank, stepper, stepper.shards.masters())
    stepper.engine.destroy()
    return history


def train_on_links(rank: Rank, scenario: Scenario, links: dict[str, str], key: str) -> History:
    """Case: train over emulated links between all clusters, on both rails of a gateway."""
    from moe_fragment.fabric.emulation import LinkEmulator
    from tests.fleet.harness import topology_of

    rails = [rail for rail in (rank.fabric._rail, rank.fabric._side) if rail is not None]
    emulator = LinkEmulator(topology_of(scenario.sizes, **links), rank.place.cluster, key=key)
    for rail in rails:
        rail._emulator = emulator
    try:
        return train(rank, scenario)
    finally:
        for rail in rails:
            rail._emulator = None
        rank.fabric.everyone(emulator.close)


def record(history: History, report: Any) -> None:
    """Add a step's report."""
    history.losses.append(report.loss)
    history.norms.append(report.grad_norm)
    history.outcomes.append(report.outcome)
    history.reasons.append(report.reason)


def router_bias(model: Any) -> torch.Tensor | None:
    """Selection biases of all routers, [L, E]; None for a model without."""
    from moe_fragment.models.router import routers

    found = [router.e_score_correction_bias for router in routers(model)]
    return torch.stack([bias.clone() for bias in found if bias is not None]) if found else None


def cluster_bias(rank: Rank, stepper: Stepper) -> torch.Tensor | None:
    """`router_bias` of the whole model, whose stages have their own."""
    own = router_bias(stepper.engine.module)
    fragmented = stepper.engine.fragmented
    found = {}
    for layers, biases in rank.fabric.cluster_gather((fragmented.positions(), own)):
        found |= dict(zip(layers, biases if biases is not None else (), strict=False))
    return torch.stack([found[layer] for layer in sorted(found)]) if found else None


# -- one process -------------------------------------------------------------------------------------------------


def gradients_of(model: Any, scenario: Scenario, step: int) -> tuple[float, int]:
    """Run a step's micro-batches of the whole fleet; leaves the mean's gradients, returns (loss, tokens)."""
    from moe_fragment.train.loss import micro_batch_losses

    total, tokens = 0.0, 0
    for place in scenario.places():
        for batch in scenario.batches(step, place):
            if batch.filler:  # one process has no rank without a sequence
                continue
            losses = micro_batch_losses(model, batch)
            losses.total.backward()
            total += float(losses.cross_entropy.double())
            tokens += losses.tokens
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad /= tokens
    return total / tokens, tokens


def reference(scenario: Scenario) -> History:
    """The run in one process: AdamW on the whole model, the same micro-batches one after the other."""
    from moe_fragment.models.router import reset_router_load, router_load, update_router_bias

    model = scenario.model_of()
    parameters = sorted(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for _, p in parameters if p.ndim > 1], "weight_decay": ADAM["weight_decay"]},
            {"params": [p for _, p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=scenario.learning_rate,
        betas=ADAM["betas"],
        eps=ADAM["eps"],
    )
    history = History()
    for step in range(scenario.steps):
        loss, _ = gradients_of(model, scenario, step)
        largest = scenario.clip_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), largest)
        optimizer.step()
        optimizer.zero_grad()
        history.losses.append(loss)
        history.norms.append(float(norm))
        if router_bias(model) is not None:
            update_router_bias(model, router_load(model))
            reset_router_load(model)
    history.biases[scenario.steps] = router_bias(model)
    return history


def gradients_at(
    scenario: Scenario,
    weights: Pieces,
    bias: torch.Tensor | None,
    step: int,
    dtype: torch.dtype = torch.float32,
) -> Pieces:
    """One process's gradients of step `step` at a fleet's canonical weights and biases, by parameter name."""
    from moe_fragment.models.router import routers

    model = scenario.model_of(dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("batched_mm")  # torch's grouped matmul has no fp64
    if bias is not None:
        for router, values in zip(routers(model), bias, strict=True):
            router.e_score_correction_bias.copy_(values)
    with torch.no_grad():
        state = whole_state(weights, model)
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name].view(parameter.shape))
    gradients_of(model, scenario, step)
    return {name: parameter.grad.reshape(-1) for name, parameter in model.named_parameters()}


def by_expert(whole: Pieces, like: Pieces) -> Pieces:
    """One process's tensors under the canonical names of `like`: stacked experts one by one."""
    pieces = {}
    for name, tensor in whole.items():
        if name in like:
            pieces[name] = tensor
            continue
        experts = tensor.view(join(name, like).shape)
        pieces.update({f"{name}#{expert}": row for expert, row in enumerate(experts)})
    return pieces

"""Whole runs (`ClusterRun`) on a shared test fleet, and what they left on disk."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.fleet.harness import NAMES, Rank, topology_of

ROOT = Path(__file__).parents[2]
DEEPSPEED = ROOT / "ds_configs"
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.01,
}
MODELS: dict[str, dict[str, Any]] = {
    "fragment": {
        "architecture": "moe_fragment",
        "config": {
            **TINY,
            "num_experts": 6,
            "moe_intermediate_size": 24,
            "num_shared_experts": 1,
            "scoring": "sigmoid",
            "routed_scaling_factor": 1.5,
            "router_bias": True,
            "router_bias_update_rate": 0.01,
        },
    },
    "qwen3": {
        "architecture": "qwen3_moe",
        "config": {**TINY, "num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True},
    },
    "mixtral": {"architecture": "mixtral", "config": {**TINY, "num_local_experts": 6}},
}
EVERYWHERE: dict[str, dict[str, Any]] = {
    "placement": {"policy": "replicated", "table": None},
    "experts": {"exchange": "local"},
}
"""Sections of a recipe whose clusters train apart, each with all experts."""
PLACEMENT = {"policy": "manual", "table": {"ada": [0, 2, 5], "bob": [1, 3, 4]}}


def recipe_for(
    home: Path,
    *,
    name: str = "run",
    sizes: tuple[int, ...] = (2, 1),
    model: str = "fragment",
    zero: str = "zero1-fp32",
    config: dict[str, Any] | None = None,
    sections: dict[str, dict[str, Any]] | None = None,
    **train: Any,
) -> dict[str, Any]:
    """A recipe as a dictionary; its data is a text written under `home`, its run directory `home/name`.

    Args:
        home: directory of this recipe's files.
        name: of the run.
        sizes: ranks of clusters ada and bob.
        model: key of `MODELS`.
        zero: DeepSpeed configuration.
        config: changes to the model's configuration.
        sections: changes to other sections.
        train: fields of the `train` section.
    """
    text = home / "text.txt"
    if not text.exists():
        home.mkdir(parents=True, exist_ok=True)
        text.write_text(story())
    chosen = MODELS[model]
    recipe: dict[str, Any] = {
        "name": name,
        "out": str(home),
        "model": {**chosen, "config": {**chosen["config"], **(config or {})}},
        "data": {
            "domains": {"text": {"source": "files", "files": str(text)}},
            "sequence_length": 16,
            "eval_sequences": 4,
            "cache_dir": str(home / "cache"),
        },
        "topology": topology_of(sizes).to_dict(),
        "placement": PLACEMENT,
        "train": {"steps": 6, "batch": 5, "shares": {"ada": 3, "bob": 2}, "learning_rate": 1e-2, **train},
        "deepspeed": {"config": str(DEEPSPEED / f"{zero}.json")},
    }
    for section, fields in (sections or {}).items():
        recipe[section] = {**recipe.get(section, {}), **fields}
    return recipe


def story() -> str:
    """A few thousand words, the same everywhere."""
    words = ("the", "expert", "tokens", "wander", "over", "slow", "links", "home", "again", "and", "learn")
    generator = torch.Generator().manual_seed(7)
    chosen = torch.randint(0, len(words), (3000,), generator=generator).tolist()
    return " ".join(words[index] for index in chosen)


def load(recipe: dict[str, Any]) -> Any:
    """The recipe, checked; files inlined as `Recipe.load` does."""
    import json

    from moe_fragment.train.recipe import Recipe

    data = {**recipe, "deepspeed": dict(recipe["deepspeed"])}
    if isinstance(path := data["deepspeed"]["config"], str):
        data["deepspeed"]["config"] = json.loads(Path(path).read_text())
    return Recipe.from_dict(data)


_lives = itertools.count()


@contextlib.contextmanager
def run_on(rank: Rank, recipe: dict[str, Any]) -> Iterator[Any]:
    """A `ClusterRun` on the test fleet's fabric, which it neither joins nor leaves."""
    from moe_fragment.train import life
    from moe_fragment.train.peers import Peer
    from moe_fragment.train.run import ClusterRun
    from moe_fragment.train.world import World

    fabric, number = rank.fabric, next(_lives)
    gather = fabric.gather
    cluster = NAMES[rank.place.cluster]
    world = World(cluster, rank.place.rank, rank.place.size, coordinator="")
    watch = SimpleNamespace(this=Peer.this(cluster, rank.place.rank), peers=[])
    with (
        mock.patch.object(life, "connect", return_value=fabric),
        # The coordinator's store remembers: every life of a run needs names of its own.
        mock.patch.object(fabric, "gather", lambda key, value: gather(f"life {number} {key}", value)),
        mock.patch.object(fabric, "close"),
    ):
        fabric.meter.drain()
        run = ClusterRun(load(recipe), world, watch)  # type: ignore[arg-type]
        try:
            yield run
        finally:
            run.close()
            run.stepper.engine.destroy()


def train(rank: Rank, recipe: dict[str, Any]) -> int:
    """Case: train until the recipe's last step; returns the step at which this life began."""
    with run_on(rank, recipe) as run:
        began: int = run.step_number
        run.train()
    return began


def refused(rank: Rank, recipe: dict[str, Any]) -> str:
    """Case: what a run that cannot begin is refused with."""
    try:
        with run_on(rank, recipe) as run:
            run.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it ran"


def train_to(rank: Rank, recipe: dict[str, Any], last: int) -> int:
    """Case: train, and save, up to step `last` only, as if interrupted then; returns where this life began."""
    with run_on(rank, recipe) as run:
        began: int = run.step_number
        while run.step_number < last:
            run._one_step()
            run.save()
    return began


def train_on_a_full_disk(rank: Rank, recipe: dict[str, Any]) -> str:
    """Case: the disk of the first cluster's rank 1 is full when the last checkpoint is written."""
    from moe_fragment.train import checkpoint

    write = checkpoint.save_file

    def no_space(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "step-00000003" in str(path) and (rank.place.cluster, rank.place.rank) == (0, 1):
            raise OSError(28, "No space left on device")
        write(tensors, path)

    with mock.patch.object(checkpoint, "save_file", no_space):
        return refused(rank, recipe)


def heal_on_a_full_disk(rank: Rank, recipe: dict[str, Any]) -> str:
    """Case: the last cluster is to receive a checkpoint, and its disk is full."""
    from moe_fragment.train import heal

    def no_space(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with mock.patch.object(heal._Inbox, "take", no_space):
        return refused(rank, recipe)


def restore_weights(rank: Rank, recipe: dict[str, Any]) -> tuple[list[str], bool, int]:
    """Case: kinds of tensors read, whether the weights came back, and how much optimizer state there is."""
    from moe_fragment.train.checkpoint import Checkpoint, checkpoint_path
    from moe_fragment.train.state import restore

    kinds: set[str] = set()
    with run_on(rank, recipe) as run:
        shards, last = run.stepper.shards, Checkpoint(checkpoint_path(run.directory, run.step_number))
        masters = [master.clone() for master in shards.masters()]
        for flat, master in enumerate(shards.masters()):
            master.data.zero_()
            shards.zero.optimizer.state.pop(shards._state_key(flat))

        def read(kind: str, name: str, offset: int, size: int) -> torch.Tensor:
            kinds.add(kind)
            return last.read(kind, name, offset, size)

        restore(shards, read, last.manifest.steps, moments=False)
        same = all(
            torch.equal(
                one[shard.position : shard.position + shard.size], other[shard.position :][: shard.size]
            )
            for shard in shards.shards
            for one, other in [(shards.masters()[shard.flat], masters[shard.flat])]
        )
        return sorted(kinds), same, sum(len(shards.moments(flat)) for flat in range(len(masters)))


def train_poisoned(rank: Rank, recipe: dict[str, Any], poisoned: tuple[int, ...]) -> str:
    """Case: in these steps one gradient of the last cluster's first rank is not a number; returns how it ended."""
    try:
        with run_on(rank, recipe) as run:
            shards = run.stepper.shards
            gradients = shards.gradients

            def poison() -> list[torch.Tensor]:
                flats: list[torch.Tensor] = gradients()
                if rank.place.cluster == 1 and run.step_number in poisoned:
                    flats[0][0] = float("nan")
                return flats

            with mock.patch.object(shards, "gradients", poison):
                run.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it ran"


def train_unmerged(rank: Rank, recipe: dict[str, Any]) -> str:
    """Case: every transfer of the last merge fails on the last cluster; returns how the run ended."""
    try:
        with run_on(rank, recipe) as run:
            send = rank.fabric.collective

            def fail_at_the_end(*arguments: Any, **options: Any) -> Any:
                transfer = send(*arguments, **options)
                if run.step_number == recipe["train"]["steps"] and rank.place.cluster:
                    result = transfer.wait()[1]
                    return SimpleNamespace(wait=lambda: (False, result))
                return transfer

            with mock.patch.object(rank.fabric, "collective", fail_at_the_end):
                run.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it ran"


def sync_state(rank: Rank, recipe: dict[str, Any]) -> dict[tuple[str, str], torch.Tensor]:
    """Case: what the sync of a run that has just begun holds on this rank, by kind and parameter."""
    with run_on(rank, recipe) as run:
        return {(kind, name): values.clone() for kind, name, _, values in run.stepper.sync.state()}


def sequences_read(rank: Rank, recipe: dict[str, Any], last: int) -> list[int]:
    """Case: train and save up to step `last`; returns the numbers of the sequences this rank trained on."""
    numbers: list[int] = []
    with run_on(rank, recipe) as run:
        read = run.data.sequences

        def watch(start: int, count: int) -> torch.Tensor:
            numbers.extend(range(start, start + count))
            found: torch.Tensor = read(start, count)
            return found

        with mock.patch.object(run.data, "sequences", watch):
            while run.step_number < last:
                run._one_step()
        run.save()
    return numbers


# -- what is on disk ---------------------------------------------------------------------------------------------


def state_of(home: Path, recipe: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
    """Everything a checkpoint of all clusters holds, under keys in which no layout appears.

    Weights and moments by canonical name (the trunk once per cluster), the sync's state, router biases, random states,
    step counts and the data position.
    """
    from moe_fragment.sync.state import FEEDBACK, IN_FLIGHT, LOST, OUTER, VELOCITY
    from moe_fragment.train.checkpoint import Checkpoint, checkpoint_path
    from moe_fragment.train.state import KINDS

    found: dict[str, torch.Tensor] = {}
    for cluster in recipe["train"]["shares"]:
        checkpoint = Checkpoint(checkpoint_path(home / recipe["name"] / cluster, step))
        manifest = checkpoint.manifest
        for name, size in manifest.sizes.items():
            for kind in KINDS:
                found[f"{cluster} {kind} {name}"] = checkpoint.read(kind, name, 0, size)
            found[f"{cluster} steps {name}"] = torch.tensor(manifest.steps[name])
        for kind in (OUTER, VELOCITY, FEEDBACK, LOST, IN_FLIGHT):
            for name in checkpoint.names(kind):
                found[f"{cluster} {kind} {name}"] = checkpoint.read(kind, name, 0, manifest.sizes[name])
        for kind in ("buffer", "random"):
            for name in checkpoint.names(kind):
                extra = checkpoint.extra(f"{kind}|{name}|0")
                assert extra is not None
                found[f"{cluster} {kind} {name}"] = extra
        found[f"{cluster} consumed"] = torch.tensor(manifest.consumed)
    return found


def losses_of(home: Path, recipe: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Loss by cluster and step."""
    from moe_fragment.observe import RunLog

    steps = RunLog(home / recipe["name"]).steps
    return {(row.cluster, row.step): row.loss for row in steps.itertuples()}

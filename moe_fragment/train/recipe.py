"""A recipe: everything that decides a training run, in one YAML file.

Sections are owned by the modules they configure; this one composes them, reads the topology and the DeepSpeed
configurations they name (looked up beside the recipe; other paths are the running process's), applies overrides by
dotted name, and refuses what cannot compose before any process starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from moe_fragment.fabric.config import FabricConfig
from moe_fragment.placement import Placement, PlacementError, place_experts
from moe_fragment.placement.policies import Policy
from moe_fragment.schema import ConfigError, Count, FieldError, Section, explain, load_yaml
from moe_fragment.sync.config import SyncConfig
from moe_fragment.topology import Topology
from moe_fragment.train.data import DataConfig, Weight
from moe_fragment.train.deepspeed_config import (
    check_deepspeed_config,
    is_bf16,
    partition_method,
    pipeline_stages,
)
from moe_fragment.train.tokenizer import BYTES
from moe_fragment.train.written_recipe import inline_files, override_field


class ModelConfig(Section):
    """The `model` section: what is trained."""

    architecture: str = "moe_fragment"
    """A transformers model type: `moe_fragment`, `qwen3_moe` or `mixtral` (tested), or another MoE family that
    dispatches through the experts interface. Default: the package's own model."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Fields of that model type's configuration; vocabulary and special tokens come from the tokenizer."""
    pretrained: str | None = None
    """Directory or hub name of weights to start from; then `architecture` and `config` come from there. Default: none,
    weights are drawn from `seed`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of the initial weights, the same on every cluster. Default 0."""
    activation_checkpointing: bool = False
    """Recompute layers in backward; their dispatch crosses the WAN once more. Default off."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention implementation of transformers. Default sdpa, which every device has."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if self.pretrained and self.config:
            raise FieldError("config", "has no effect with `pretrained`, which brings its own configuration")
        return self


class PlacementConfig(Section):
    """The `placement` section: which cluster holds which expert."""

    policy: Policy = "even"
    """`even`, `capacity` (by ranks, or by `capacities`), `replicated` (all experts on every cluster) or `manual` (by
    `table`). Default even."""
    capacities: dict[str, float] | None = None
    """Cluster to weight, for `capacity`. Default: ranks."""
    table: dict[Any, Any] | None = None
    """Cluster to expert ids, or layer to such a mapping, for `manual`."""


class ExpertsConfig(Section):
    """The `experts` section: how tokens and experts of different clusters meet."""

    exchange: Literal["tokens", "local"] = "tokens"
    """`tokens`: they travel to the experts, every step. `local`: they stay, and routing is restricted to the experts of
    their cluster; in an evaluation they travel. Default tokens."""
    local_parallel: bool | dict[str, list[Annotated[float, Field(gt=0, allow_inf_nan=False)]]] = False
    """Whether a cluster's experts are spread over its ranks, each on one, and tokens travel inside the cluster too;
    otherwise every rank has all of them. Or: cluster to its ranks' shares of the experts, relative to each other. In a
    pipeline it is the ranks of a stage that share its experts. One rank has nobody to share with. Default false."""


class DeepSpeedConfig(Section):
    """The `deepspeed` section: a DeepSpeed configuration (file or mapping), and other ones for single clusters."""

    config: str | dict[str, Any]
    """Of every cluster that has none of its own. Required."""
    clusters: dict[str, str | dict[str, Any]] = Field(default_factory=dict)
    """Cluster to a configuration of its own; all clusters compute in the same precision. Default none."""


class TrainConfig(Section):
    """The `train` section."""

    steps: Count
    """Optimizer steps of the whole run."""
    batch: Count
    """Sequences per step over the whole fleet."""
    shares: dict[str, Weight] | None = None
    """Cluster to its part of the batch, relative to the others; 0 is allowed. Default: by ranks."""
    accumulation: Count = 1
    """Micro-batches per step, the same on every rank. Default 1."""
    learning_rate: float = Field(default=3e-4, gt=0, allow_inf_nan=False)
    """Peak learning rate of AdamW. Default 3e-4."""
    min_learning_rate: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Where the schedule ends. Default 0."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps of linear warm-up. Default 0."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """From the peak to the end, over `steps`. Default cosine."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW. Default (.9, .95), usual for language models."""
    eps: float = Field(default=1e-8, gt=0, allow_inf_nan=False)
    """Of AdamW. Default 1e-8."""
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """Of matrices, not of norms and biases. Default .1."""
    clip_norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Largest gradient norm of the whole model (trunk once, each expert once); 0 for none. Default 1."""
    eval_every: int = Field(default=0, ge=0)
    """Evaluate each that many steps, and at the end; 0 for the end only. Default 0."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Checkpoint each that many steps, and at the end; 0 for the end only. Default 0."""
    keep_checkpoints: Count = 2
    """How many to keep; the newest that all clusters are known to have stays in any case. Default 2: one may be damaged
    by whatever ended the run."""
    max_skipped_steps: Count = 10
    """How many steps in a row may be given up for non-finite numbers before the run stops. Default 10."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of dropout and everything else that draws random numbers while training. Default 0."""

    @field_validator("betas")
    @classmethod
    def _betas(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError(f"expected two numbers from 0 up to, not including, 1, got {list(value)}")
        return value

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainConfig:
        if self.min_learning_rate > self.learning_rate:
            raise FieldError("min_learning_rate", f"expected at most learning_rate = {self.learning_rate}")
        return self


class Recipe(Section):
    """A recipe, checked. Read it with `Recipe.load`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Of the run; its directory is `out`/`name`."""
    out: str = "runs"
    """Where run directories go, on each cluster's own file system. Default `runs`."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    topology: dict[str, Any]
    placement: PlacementConfig = PlacementConfig()
    experts: ExpertsConfig = ExpertsConfig()
    sync: SyncConfig = SyncConfig()
    fabric: FabricConfig = FabricConfig()
    train: TrainConfig
    deepspeed: DeepSpeedConfig

    _written: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe.

        Args:
            path: YAML file; the files it names are looked up beside it.
            overrides: `section.field=value`, the value in YAML.

        Raises:
            ConfigError: one sentence that names the file, the field and what was expected.
        """
        path = Path(path)
        data = load_yaml(path)
        inline_files(data, path)
        for override in overrides:
            override_field(data, override)
            inline_files(data, path, base=Path())
        return cls.from_dict(data, where=str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "recipe") -> Recipe:
        """A recipe whose files are inlined already; see `load`."""
        try:
            recipe = cls(**data)
        except ValidationError as error:
            raise ConfigError(explain(error, where)) from None
        recipe._written = dict(data)
        recipe._check(where)
        return recipe

    def _check(self, where: str) -> None:
        topology = Topology.from_dict(self.topology, where=where, within="topology")
        try:
            self.data.mixtures(topology.names)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        for section, named in (
            ("train.shares", self.train.shares or {}),
            ("deepspeed.clusters", self.deepspeed.clusters),
            ("experts.local_parallel", self._local_shares),
        ):
            for name in named:
                if name not in topology.names:
                    known = ", ".join(topology.names)
                    raise ConfigError(f"{where}: {section}.{name}: unknown cluster, expected one of {known}")
        for name in topology.names:
            config = self.deepspeed_config(name)
            check_deepspeed_config(config, f"{where}: deepspeed")
            self._check_stages(config, topology, name, where)
            if is_bf16(config) != is_bf16(self.deepspeed_config(topology.names[0])):
                raise ConfigError(
                    f"{where}: deepspeed.clusters.{name}: bf16 on one cluster and fp32 on another; the rows they "
                    f"exchange need one precision"
                )
        if topology.num_rails % self.stages:
            raise ConfigError(
                f"{where}: topology.rails: expected a multiple of the {self.stages} stages (pipeline.stages), so that "
                f"each stage has as many, got {topology.num_rails}"
            )
        for name, size in zip(topology.names, topology.sizes, strict=True):
            width = size // self.stages
            given = len(self._local_shares.get(name, [0] * width))
            if given != width:
                whose = "cluster's" if self.stages == 1 else "stage's"
                raise ConfigError(
                    f"{where}: experts.local_parallel.{name}: expected a share for each of the {whose} {width} ranks, "
                    f"got {given}"
                )
        if self.model.pretrained and self.data.tokenizer == BYTES:
            raise ConfigError(
                f"{where}: data.tokenizer: required with model.pretrained, usually the same directory or name"
            )
        if self.fabric.emulate and not topology.is_local:
            raise ConfigError(
                f"{where}: fabric.emulate: links can be emulated on one machine only, but the topology has hosts"
            )
        if self.sync.is_asynchronous and self.experts.exchange != "local":
            raise ConfigError(
                f"{where}: sync.strategy: {self.sync.strategy} lets clusters be at different steps, between which "
                f"no token can travel; set experts.exchange: local"
            )
        try:
            batches = self.batches(topology)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from None
        if self.experts.exchange == "local" and not self.sync.is_gradient and 0 in batches:
            name = topology.names[batches.index(0)]
            raise ConfigError(
                f"{where}: train.shares: cluster {name} has no sequence of a batch, and where tokens stay "
                f"(experts.exchange: local) and clusters train apart nothing to do"
            )
        if (
            self.experts.exchange == "local"
            and not self.sync.is_gradient
            and self.model.config.get("router_bias")
        ):
            raise ConfigError(
                f"{where}: model.config.router_bias: follows the whole fleet's load in every step, which clusters that "
                f"train apart (experts.exchange: local, sync.strategy: {self.sync.strategy}) do not know"
            )

    def _check_stages(self, config: Mapping[str, Any], topology: Topology, name: str, where: str) -> None:
        """Refuse pipelines whose stages could not meet those of the other clusters."""
        first = topology.names[0]
        theirs = self.deepspeed_config(first)
        stages = pipeline_stages(config)
        for field, own, other in (
            ("stages", stages, pipeline_stages(theirs)),
            ("partition", partition_method(config), partition_method(theirs)),
        ):
            if own != other and (stages > 1 or field == "stages"):
                raise ConfigError(
                    f"{where}: deepspeed: pipeline.{field}: {own} on cluster {name}, {other} on cluster {first}; a "
                    f"layer must be on the same stage of all clusters, or their tokens would not meet"
                )
        size = topology.sizes[topology.index(name)]
        if size % stages:
            raise ConfigError(
                f"{where}: deepspeed: pipeline.stages: {stages} stages cannot be of equal width on cluster {name}, "
                f"which has {size} ranks"
            )

    @property
    def stages(self) -> int:
        """Of the pipeline in each cluster; 1 for none."""
        return pipeline_stages(self.deepspeed_config(self.fleet().names[0]))

    @property
    def run_directory(self) -> Path:
        """`out`/`name`, the home directory's `~` expanded; each cluster has a directory of its own in it."""
        return Path(self.out).expanduser() / self.name

    def fleet(self) -> Topology:
        """The topology."""
        return Topology.from_dict(self.topology, where=self.name, within="topology")

    def deepspeed_config(self, cluster: str) -> dict[str, Any]:
        """The DeepSpeed configuration of one cluster."""
        config = self.deepspeed.clusters.get(cluster, self.deepspeed.config)
        assert isinstance(config, dict), "files are inlined when the recipe is read"
        return config

    @property
    def _local_shares(self) -> dict[str, list[float]]:
        given = self.experts.local_parallel
        return given if isinstance(given, dict) else {}

    def local_shares(self, topology: Topology, cluster: str) -> list[float] | None:
        """Each rank's share of the experts of a cluster, or of its stage; None where every rank has them all."""
        width = topology.sizes[topology.index(cluster)] // self.stages
        if width == 1:
            return None
        return [1.0] * width if self.experts.local_parallel is True else self._local_shares.get(cluster)

    def batches(self, topology: Topology) -> tuple[int, ...]:
        """Sequences per step of each cluster; they add up to `train.batch`.

        Raises:
            ValueError: shares leave out a cluster, or are all zero.
        """
        shares = self.train.shares
        if shares is None:
            weights: list[float] = [float(size) for size in topology.sizes]
        else:
            missing = [name for name in topology.names if name not in shares]
            if missing:
                raise ValueError(f"train.shares.{missing[0]}: required, but not given")
            weights = [shares[name] for name in topology.names]
            if not any(weights):
                raise ValueError(f"train.shares: expected one of them above 0, got {weights}")
        return split_batch(self.train.batch, weights)

    def place(self, topology: Topology, *, num_experts: int, layers: Sequence[int]) -> Placement:
        """Which cluster holds which expert of the model.

        Raises:
            ConfigError: the placement does not fit the model or the fleet.
        """
        try:
            placement = place_experts(
                topology,
                num_experts=num_experts,
                layers=layers,
                policy=self.placement.policy,
                capacities=self.placement.capacities,
                table=self.placement.table,
            )
        except PlacementError as error:
            raise ConfigError(f"placement.{error}") from None
        return placement

    def facts(self) -> dict[str, Any]:
        """What clusters compare when they join, by dotted name: everything but paths and addresses."""
        topology = self.fleet()
        facts: dict[str, Any] = {}
        for section, value in self.model_dump(
            mode="json", exclude={"out": True, "data": {"cache_dir"}}
        ).items():
            if isinstance(value, dict) and section != "topology":
                facts |= {f"recipe {section}.{field}": inner for field, inner in value.items()}
            else:
                facts[f"recipe {section}"] = value
        facts["recipe topology"] = [list(topology.names), list(topology.sizes), topology.num_rails]
        return facts

    def dump(self) -> str:
        """YAML of the recipe as it was written, its files and overrides inlined."""
        return yaml.safe_dump(self._written, sort_keys=False)

    def dump_topology(self) -> str:
        """YAML of the topology."""
        return yaml.safe_dump(self.fleet().to_dict(), sort_keys=False)


def split_batch(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` sequences in proportion to `weights`, largest remainder first."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(part) for part in exact]
    order = sorted(range(len(weights)), key=lambda index: counts[index] - exact[index])
    for index in order[: total - sum(counts)]:
        counts[index] += 1
    return tuple(counts)

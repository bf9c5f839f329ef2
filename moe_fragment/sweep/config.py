"""A sweep file: one recipe, the changes that make its runs, and their seeds.

Everything is expanded and every run's recipe is checked before anything is started, so that the last run of a night
cannot fail for a typing error. Not here: running them, and what they measured.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from moe_fragment.schema import ConfigError, FieldError, Section, explain, load_yaml
from moe_fragment.train.model import check_model
from moe_fragment.train.recipe import Recipe

_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
_SEEDED = ("model.seed", "train.seed", "data.seed")
_OWN = ("name", "out")

Seeds = Annotated[tuple[Annotated[int, Field(strict=True, ge=0, lt=2**31)], ...], Field(min_length=1)]
Settings = dict[str, Any]
"""Dotted field of a recipe to its value."""


class RunConfig(Section):
    """One entry of `runs`."""

    name: str = Field(pattern=_NAME)
    """Of the run in the table; its directory is `out`/SWEEP/NAME-sSEED."""
    changes: Settings = Field(default_factory=dict, alias="set")
    """Changes to the recipe, over those of the sweep. Default none."""
    seeds: Seeds | None = None
    """Seeds of this run. Default: the sweep's."""


class SweepConfig(Section):
    """A sweep file."""

    name: str = Field(pattern=_NAME)
    """Of the sweep; its directory is `out`/`name`."""
    out: str = "runs"
    """Where sweep directories go. Default `runs`."""
    recipe: str
    """The recipe all runs start from, looked up beside the sweep file."""
    changes: Settings = Field(default_factory=dict, alias="set")
    """Changes to the recipe in all runs, dotted field to value. Default none."""
    runs: tuple[RunConfig, ...] = ()
    """Runs by name. Default none: then `grid` makes them."""
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Dotted field to values: a run for each combination, beside `runs`. Default none."""
    seeds: Seeds = (0,)
    """What `model.seed` (weights), `data.seed` (order of the samples) and `train.seed` are set to, a run for each.
    Default 0 alone."""
    target_loss: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Evaluation loss, nats per token; the table says when each run came below it. Default none."""

    @field_validator("grid")
    @classmethod
    def _no_seeds(cls, value: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for dotted in value:
            if dotted in _SEEDED:
                raise ValueError(f"{dotted} is set by `seeds`")
        return value

    @model_validator(mode="after")
    def _has_runs(self) -> SweepConfig:
        if not self.runs and not self.grid:
            raise FieldError("runs", "expected at least one run here or a field in grid")
        given = [("set", self.changes), *((f"runs.{run.name}.set", run.changes) for run in self.runs)]
        for where, changes in given:
            for dotted in changes:
                if dotted in _SEEDED:
                    raise FieldError(where, f"{dotted} is set by `seeds`")
                if dotted in _OWN:
                    raise FieldError(where, f"{dotted} of a run is made from the sweep's own")
        return self


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run with one seed."""

    name: str
    seed: int
    overrides: tuple[str, ...]
    """For `launch`."""
    recipe: Recipe
    """With these overrides."""

    @property
    def label(self) -> str:
        """Name of its run directory."""
        return f"{self.name}-s{self.seed}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep file, expanded and checked. Read it with `Sweep.load`."""

    path: Path
    config: SweepConfig
    recipe: Path
    jobs: tuple[Job, ...]
    varied: tuple[str, ...]
    """Dotted fields that differ by run, in the order of the file."""

    @property
    def directory(self) -> Path:
        """`out`/`name`, the home directory's `~` expanded."""
        return Path(self.config.out).expanduser() / self.config.name

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Sweep:
        """Read a sweep file and check the recipe of every run.

        Args:
            path: YAML file.
            overrides: `section.field=value` for the recipe of every run, over the file's; `name=` and `out=` are the
                sweep's.

        Raises:
            ConfigError: one sentence that names the file, the run and the field.
        """
        path = Path(path)
        data = load_yaml(path)
        rest = []
        for override in overrides:
            dotted, _, text = override.partition("=")
            if dotted in _OWN:
                data[dotted] = text
            else:
                rest.append(override)
        try:
            config = SweepConfig(**data)
        except ValidationError as error:
            raise ConfigError(explain(error, str(path))) from None
        recipe = path.parent / config.recipe
        runs = [*config.runs, *_combinations(config.grid)]
        seen: set[str] = set()
        for run in runs:
            if run.name.lower() in seen:
                raise ConfigError(f"{path}: runs: the name '{run.name}' is used twice")
            seen.add(run.name.lower())
        sweep = cls(path=path, config=config, recipe=recipe, jobs=(), varied=())
        jobs = tuple(_jobs(sweep, runs, rest))
        return replace(sweep, jobs=jobs, varied=_varied(runs, jobs))


def _jobs(sweep: Sweep, runs: Sequence[RunConfig], overrides: Sequence[str]) -> list[Job]:
    config, jobs = sweep.config, []
    checked: set[str] = set()
    for run in runs:
        changes = {**config.changes, **run.changes}
        seeds = run.seeds or config.seeds
        if len(set(seeds)) != len(seeds):
            raise ConfigError(f"{sweep.path}: run {run.name}: seeds: one is given twice in {list(seeds)}")
        for seed in seeds:
            own = {
                "out": str(sweep.directory),
                "name": f"{run.name}-s{seed}",
                **dict.fromkeys(_SEEDED, seed),
            }
            words = (
                *(f"{dotted}={written(value)}" for dotted, value in changes.items()),
                *overrides,
                *(f"{dotted}={written(value)}" for dotted, value in own.items()),
            )
            try:
                recipe = Recipe.load(sweep.recipe, words)
                _check(recipe, checked)
            except ConfigError as error:
                raise ConfigError(f"{sweep.path}: run {run.name}: {error}") from None
            jobs.append(Job(name=run.name, seed=seed, overrides=words, recipe=recipe))
    return jobs


def _check(recipe: Recipe, checked: set[str]) -> None:
    """What `launch` would refuse, once for all runs that share it."""
    topology = recipe.fleet()
    if not topology.is_local:
        raise ConfigError(
            "topology.clusters: a sweep starts clusters of local processes, but this one has hosts"
        )
    model = recipe.model.model_dump(exclude={"seed"})
    key = json.dumps([model, recipe.placement.model_dump(), recipe.topology], default=str)
    if key not in checked:
        check_model(recipe, topology)
        checked.add(key)


def _combinations(grid: Mapping[str, Sequence[Any]]) -> list[RunConfig]:
    """A run for each combination, named after its values: `every-16_codec-int8`."""
    runs = []
    for values in itertools.product(*grid.values()) if grid else ():
        chosen = dict(zip(grid, values, strict=True))
        parts = (f"{dotted.rpartition('.')[2]}-{_slug(value)}" for dotted, value in chosen.items())
        runs.append(RunConfig(name="_".join(parts), set=chosen))
    return runs


def _slug(value: Any) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", written(value)).strip("-") or "none"


def written(value: Any) -> str:
    """A value in YAML on one line, as an override takes it."""
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n").removesuffix("\n...")
    )


def _varied(runs: Sequence[RunConfig], jobs: Sequence[Job]) -> tuple[str, ...]:
    """Leaves of the fields that any run sets."""
    fields: dict[str, None] = {}
    recipes = {job.name: job.recipe for job in jobs}
    for run in runs:
        for dotted, value in run.changes.items():
            fields |= dict.fromkeys(_leaves(recipes[run.name], dotted, value))
    return tuple(fields)


def _leaves(recipe: Recipe, dotted: str, value: Any) -> list[str]:
    """A section that is given as a whole counts as its fields."""
    if not isinstance(value, Mapping) or not isinstance(resolved(recipe, dotted), BaseModel):
        return [dotted]
    return [leaf for name, inner in value.items() for leaf in _leaves(recipe, f"{dotted}.{name}", inner)]


def resolved(recipe: Recipe, dotted: str) -> Any:
    """The value of a recipe's field, defaults included; None where there is none."""
    node: Any = recipe
    for part in dotted.split("."):
        if isinstance(node, BaseModel):
            names = {info.alias or name: name for name, info in type(node).model_fields.items()}
            node = getattr(node, names.get(part, part), None)
        else:
            node = node.get(part) if isinstance(node, Mapping) else None
    return node

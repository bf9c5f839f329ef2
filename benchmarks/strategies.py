"""Time to the same loss: trunk strategies against a synchronous all-reduce, on links scaled to a large model's.

What is slow between clusters is a ratio: the seconds an exchange takes over the seconds a step computes. A model with
12 billion parameters whose C clusters all-reduce bf16 gradients sends 2 (C - 1) / C x 24 GB out of each of them: 24, 32
and 36 GB for 2, 3 and 4 clusters. That takes 96, 128 and 144 s where a cluster has 2 Gbit/s to all others together,
38 to 58 s at 5. A step of a cluster over 2**20 tokens is 6 x 12e9 x 2**20 = 7.5e16 FLOP, 3.0 s on 64 H100 at 40 % of
their 989 TFLOP/s (dense bf16). So an exchange takes as long as 32, 43 and 48, or 13 to 19 steps compute. This program
measures a small model's step on this machine, and gives the emulated links (each an equal part of what its cluster has)
the bandwidth at which the same all-reduce of that model takes as many of its steps; latencies (80 ms and 20 ms round
trip) shrink with the step.

Every cluster holds all experts and tokens stay at home, so that a step sends nothing but what the strategy sends. The
reference sends every parameter's gradient in bf16 after backward; overlapping the two could save it one step's
computing in 13 or 32. The strategies get more steps, each a cosine schedule over its own; the target is the
reference's last evaluation loss. Published for comparison: more than 20 times faster at the same loss, 12 billion
parameters in four regions on 2 to 5 Gbit/s (Decoupled DiLoCo).

Not here: accelerators, a real WAN, and whether a large model needs as many more steps as this one does. All clusters
compute on this machine's cores, so a step of four takes longer than one of two; the links follow.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import fleet
from benchmarks.fleet import say
from moe_fragment.observe import RunLog
from moe_fragment.sweep import Sweep, SweepError, build_table, run_sweep
from moe_fragment.sweep.table import plain_bytes_per_step, reached

ROOT = Path(__file__).parents[1]
PARAMETERS = 12e9
STEP_TOKENS = 2**20
FLOP_PER_S = 64 * 989e12 * 0.4
LARGE_STEP_S = 6 * PARAMETERS * STEP_TOKENS / FLOP_PER_S
BF16_BYTES = 2
NAMES = ("alpha", "beta", "gamma", "delta")
MIXTURES = ({"prose": 0.8, "code": 0.2}, {"prose": 0.2, "code": 0.8})
"""Of every other cluster."""
REFERENCE = "allreduce bf16"
OUTER = {"learning_rate": 0.7, "momentum": 0.5}
"""Less momentum than published: with a few dozen merges .9 costs much loss (docs/compression.md)."""
STRATEGIES: dict[str, dict[str, Any]] = {
    REFERENCE: {"codec": "bf16"},
    "butterfly": {"strategy": "butterfly", "every": 32},
    "local_sgd, int4": {"strategy": "local_sgd", "every": 32, "codec": "int4"},
    "teleport": {"strategy": "teleport", "every": 64},
    "diloco, int4": {"strategy": "diloco", "every": 32, "outer": OUTER, "codec": "int4"},
    "streaming, int4": {
        "strategy": "streaming_diloco",
        "every": 32,
        "outer": OUTER,
        "overlap": 5,
        "codec": "int4",
    },
    "decoupled, int4": {"strategy": "decoupled", "every": 32, "outer": OUTER, "overlap": 5, "codec": "int4"},
    "parameter_server, int4": {"strategy": "parameter_server", "every": 32, "codec": "int4"},
}
"""H is 32, of teleport 64 at first. Butterfly and teleport send all bits."""
LONGER = {"decoupled, int4": 2.0, "parameter_server, int4": 2.0}
"""Strategies that get more steps still, and how many times as many."""


@dataclass(frozen=True, kw_only=True)
class Wan:
    """What a cluster of the large model has: Gbit/s to all others together, each way; round trip in milliseconds."""

    gbps: float
    rtt_ms: float

    def steps_per_exchange(self, clusters: int) -> float:
        """Seconds of an all-reduce over seconds of a step."""
        return exchange_bytes(PARAMETERS, clusters) * 8 / (self.gbps * 1e9) / LARGE_STEP_S

    def scaled(self, clusters: int, step_s: float, parameters: float) -> dict[str, Any]:
        """The topology in which a small model's exchange takes as many of its steps.

        Args:
            clusters: how many.
            step_s: seconds that a step of the small model computes.
            parameters: of the small model.
        """
        exchange_s = self.steps_per_exchange(clusters) * step_s
        bits_per_s = 8 * exchange_bytes(parameters, clusters) / exchange_s / (clusters - 1)
        return fleet_of(
            clusters, f"{bits_per_s / 1e6:.4f} Mbit/s", f"{self.rtt_ms * step_s / LARGE_STEP_S:.4f} ms"
        )


def exchange_bytes(parameters: float, clusters: int) -> float:
    """What leaves each cluster in an all-reduce of bf16 gradients."""
    return 2 * (clusters - 1) / clusters * BF16_BYTES * parameters


def fleet_of(clusters: int, bandwidth: str, rtt: str) -> dict[str, Any]:
    """Clusters of one process each, a link between any two."""
    names = NAMES[:clusters]
    pairs = itertools.combinations(names, 2)
    return {
        "clusters": [{"name": name, "processes": 1} for name in names],
        "links": [{"between": list(pair), "bandwidth": bandwidth, "rtt": rtt} for pair in pairs],
    }


WANS = (Wan(gbps=2, rtt_ms=80), Wan(gbps=5, rtt_ms=20))


def sweep_of(
    home: Path, name: str, runs: dict[str, dict[str, Any]], topology: dict[str, Any], *, emulate: bool
) -> Sweep:
    """A sweep over the model of recipes/sweeps/compression.yaml.

    Args:
        home: where its file and its runs go.
        name: of the sweep.
        runs: label to changes.
        topology: the fleet.
        emulate: whether its links are, or are as fast as the machine.
    """
    shipped = yaml.safe_load((ROOT / "recipes" / "sweeps" / "compression.yaml").read_text())
    names = [cluster["name"] for cluster in topology["clusters"]]
    changes = {
        **shipped["set"],
        "fabric.emulate": emulate,
        "topology": topology,
        "data.mixture": dict(zip(names, itertools.cycle(MIXTURES), strict=False)),
    }
    data = {
        "name": name,
        "out": str(home),
        "recipe": str(ROOT / "recipes" / "demo.yaml"),
        "set": changes,
        "runs": [{"name": f"run-{at}", "set": runs[label]} for at, label in enumerate(runs)],
    }
    path = home / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return Sweep.load(path)


def run(sweep: Sweep) -> None:
    """Run it.

    Raises:
        SweepError: its first run, which the others are compared with, failed.
    """
    if sweep.jobs[0] in run_sweep(sweep):
        raise SweepError(f"run {sweep.jobs[0].label} failed")


def calibrate(home: Path, clusters: int) -> tuple[float, float]:
    """Seconds that a step of the small model computes, and how many parameters it has.

    The lowest decile of 90 steps that send nothing: other jobs on the machine make a step longer, never shorter.
    """
    alone = {
        "alone": {
            "train.steps": 100,
            "sync": {"strategy": "teleport", "every": 1000, "guard": {"warn": 9, "refuse": 9}},
        }
    }
    links = fleet_of(clusters, "1 Gbit/s", "1 ms")
    sweep = sweep_of(home, f"calibration-{clusters}", alone, links, emulate=False)
    run(sweep)
    (job,) = sweep.jobs
    steps = RunLog(job.recipe.run_directory).steps
    step_s = float(steps[steps["step"].between(10, 99)].groupby("step")["step_s"].max().quantile(0.1))
    return step_s, plain_bytes_per_step(job) / (2 * (clusters - 1)) / 4


def measure(
    home: Path, wan: Wan, clusters: int, step_s: float, parameters: float, steps: int, longer: float
) -> list[dict[str, Any]]:
    """A row per strategy over one link.

    Args:
        home: for the runs.
        wan: what the large model's clusters have.
        clusters: how many.
        step_s, parameters: of the small model, see `calibrate`.
        steps: of the reference.
        longer: how many times as many the others get.
    """
    runs = {
        label: {
            "sync": sync,
            "train.steps": steps if label == REFERENCE else round(steps * longer * LONGER.get(label, 1.0)),
            "train.eval_every": 20,
        }
        for label, sync in STRATEGIES.items()
    }
    links = wan.scaled(clusters, step_s, parameters)
    sweep = sweep_of(home, f"wan-{wan.gbps:g}-{clusters}", runs, links, emulate=True)
    run(sweep)
    table = build_table(sweep)
    curves = {
        label: table.curves[table.curves["run"] == job.name].reset_index(drop=True)
        for label, job in zip(STRATEGIES, sweep.jobs, strict=True)
    }
    rows = []
    target = float(curves[REFERENCE]["eval_loss"].iloc[-1])
    for (label, curve), row in zip(curves.items(), table.rows.to_dict("records"), strict=True):
        if row["status"] != "complete":
            say(f"strategies: {label} failed and is left out")
            continue
        to_target = reached(curve, target)
        waited_s = row["wan_wait_s"] / row["steps"]
        rows.append(
            {
                "clusters": clusters,
                "gbps": wan.gbps,
                "rtt_ms": wan.rtt_ms,
                "strategy": label,
                "steps": row["steps"],
                "final_loss": row["eval_loss"],
                "target_loss": target,
                "bytes_per_step": row["wan_bytes_per_step"],
                "computed_s": row["compute_s"] / row["steps"],
                "waited_s": waited_s,
                "undisturbed_step_s": step_s + waited_s,
                **to_target,
            }
        )
    reference = rows[0]
    for row in rows:
        row["ratio"] = reference["seconds_to_target"] / row["seconds_to_target"]
        row["undisturbed_step_ratio"] = reference["undisturbed_step_s"] / row["undisturbed_step_s"]
        row["undisturbed_ratio"] = (
            row["undisturbed_step_ratio"] * reference["steps_to_target"] / row["steps_to_target"]
        )
    return rows


COLUMNS = {
    "clusters": "{clusters}",
    "link of the 12 B model": "{gbps:g} Gbit/s, {rtt_ms:g} ms",
    "strategy": "{strategy}",
    "kB a step": "{kb:,.1f}",
    "computed, ms a step": "{computed_ms:.0f}",
    "waited, ms a step": "{waited_ms:.0f}",
    "steps to target": "{steps_to_target:.0f}",
    "seconds to target": "{seconds_to_target:.1f}",
    "**times faster to target**": "**{ratio:.1f}**",
    "undisturbed": "{undisturbed_ratio:.1f}",
    "undisturbed, per step": "{undisturbed_step_ratio:.1f}",
    "final loss (steps)": "{final_loss:.3f} ({steps:.0f})",
}


def render(rows: list[dict[str, Any]]) -> str:
    """The table for people; nan where the target was not reached."""
    shown = [
        row
        | {f"{name}_ms": 1e3 * row[f"{name}_s"] for name in ("computed", "waited")}
        | {"kb": row["bytes_per_step"] / 1e3}
        for row in rows
    ]
    return fleet.table(COLUMNS, shown)


def main() -> None:
    """Command line."""
    parser = fleet.command_line(
        "strategies",
        __doc__,
        """  times faster   seconds of training to the target loss, of the reference over this strategy's, as measured
  undisturbed    the same if every step had computed as long as the quickest tenth did while nothing was sent; other
                 jobs on the machine lengthen computing, but not the emulated link's transfers""",
    )
    parser.add_argument(
        "--clusters", type=int, nargs="+", default=[2, 3, 4], choices=[2, 3, 4], help="fleets to try (2 3 4)"
    )
    parser.add_argument(
        "--gbps", type=float, nargs="+", default=[2.0, 5.0], choices=[2.0, 5.0], help="links to try (2 5)"
    )
    parser.add_argument("--steps", type=int, default=200, help="of the reference (200)")
    parser.add_argument("--longer", type=float, default=2.0, help="times as many steps for the others (2)")
    parser.add_argument(
        "--step-ms", type=float, help="what a step computes, if this machine is busy (measured)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        rows = []
        for clusters in options.clusters:
            step_s, parameters = calibrate(home, clusters)
            if options.step_ms:
                step_s = options.step_ms / 1e3
            say(f"strategies: {clusters} clusters, a step computes {1e3 * step_s:.1f} ms")
            for wan in [wan for wan in WANS if wan.gbps in options.gbps]:
                exchange = wan.steps_per_exchange(clusters)
                say(f"strategies: {wan.gbps:g} Gbit/s, an exchange takes as long as {exchange:.1f} steps")
                rows += measure(home, wan, clusters, step_s, parameters, options.steps, options.longer)
    fleet.answer("strategies", {"rows": rows}, render(rows), as_json=options.json)


if __name__ == "__main__":
    main()

"""The `moe-fragment` command. Heavy imports happen inside the commands, so that `--help` is immediate."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="moe-fragment",
    help="Train mixture-of-experts transformers across fragmented GPU clusters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.field=value]...", help="Changes to the recipe, such as train.steps=100."
    ),
]


_INTERRUPTED = 130
"""What typer makes of a KeyboardInterrupt."""


class Dtype(StrEnum):
    """Number formats of exported weights."""

    fp32 = "fp32"
    bf16 = "bf16"


@app.command()
def launch(
    recipe: Annotated[Path, typer.Argument(help="Recipe (YAML).")],
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Run a recipe's fleet on this machine: a coordinator and one deepspeed launcher per cluster.

    A run that was interrupted goes on from its last checkpoint. Each cluster writes runs/NAME/CLUSTER.
    """
    from moe_fragment.train.launch import launch as start

    outcome = start(recipe, overrides or [], quiet=quiet)
    if as_json:
        _print(outcome)
        return
    from moe_fragment.observe.report import print_report
    from moe_fragment.observe.report import report as summarise

    print_report(summarise(outcome["run_dir"]))


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="Sweep file (YAML).")],
    overrides: Overrides = None,
    as_json: Json = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
    table_only: Annotated[
        bool, typer.Option("--table-only", help="Run nothing; rebuild the table from complete runs.")
    ] = False,
) -> None:
    """Run many variants of a recipe one after another, and tabulate loss, bytes and seconds.

    Complete runs are skipped, interrupted ones go on. Writes OUT/NAME/table.csv, curves.csv and merges.csv.
    """
    from moe_fragment.sweep import Sweep, SweepError, build_table, print_table, run_sweep
    from moe_fragment.sweep.show import as_json as to_json

    loaded = Sweep.load(file, overrides or [])
    failed = [] if table_only else run_sweep(loaded, quiet=quiet)
    table = build_table(loaded)
    table.write(loaded.directory)
    if as_json:
        _print(to_json(loaded, table))
    else:
        print_table(loaded, table)
    if failed:
        names = ", ".join(job.label for job in failed)
        raise SweepError(
            f"{len(failed)} of {len(loaded.jobs)} runs failed: {names}; the table has the reasons"
        )


@app.command()
def plan(
    check: Annotated[
        Path,
        typer.Option(
            "--check", metavar="CASES.json", help="Case file: inputs, published figures, tolerances."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Check the planner's cost model against published figures.

    Prints predicted, published, error, tolerance, and a count per kind. Misses are reported, they are no failure.
    """
    from moe_fragment.planning import check_file
    from moe_fragment.planning.check.show import as_json as to_json
    from moe_fragment.planning.check.show import print_check

    outcomes = check_file(check)
    if as_json:
        _print(to_json(outcomes))
    else:
        print_check(outcomes)


@app.command()
def coordinator(
    clusters: Annotated[int, typer.Option(min=1, help="How many clusters the fleet has.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    host: Annotated[
        str,
        typer.Option(
            help="Name or address under which clusters reach this host; localhost only serves this machine."
        ),
    ] = "localhost",
    heartbeat_timeout: Annotated[
        str,
        typer.Option(
            help="Silence after which a cluster leaves the membership; keep to fabric.heartbeat_timeout."
        ),
    ] = "5 s",
    as_json: Json = False,
) -> None:
    """Run the coordinator of one start of one fleet (membership and meeting point) until interrupted.

    Start it anew before the clusters are started again.

    It listens on all interfaces without encryption: keep it inside a VPN.
    """
    import signal

    from moe_fragment.fabric import Coordinator
    from moe_fragment.units import parse_duration

    # Waited for, not handled: a handler that sets an Event deadlocks when it comes while the Event is being waited for.
    stop = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, stop)
    server = Coordinator(
        clusters, host=host, port=port, heartbeat_timeout_s=parse_duration(heartbeat_timeout)
    )
    if as_json:
        _print({"address": server.address, "clusters": clusters})
    else:
        print(f"coordinator for {clusters} clusters at {server.address}", flush=True)
    signal.sigwait(stop)
    server.close()


@app.command()
def report(
    run: Annotated[
        list[Path], typer.Argument(help="Run directory, or several clusters' directories of one run.")
    ],
    as_json: Json = False,
) -> None:
    """Summarise a run: loss, speed, bytes over the WAN, where the time went."""
    from moe_fragment.observe.report import print_report
    from moe_fragment.observe.report import report as summarise

    summary = summarise(run if len(run) > 1 else run[0])
    if as_json:
        _print(summary)
    else:
        print_report(summary)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Run directory with one directory per cluster.")],
    out: Annotated[Path, typer.Option(help="Directory to write; must be empty or not exist.")],
    step: Annotated[
        int | None, typer.Option(help="Which checkpoint; default the newest all clusters have.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.fp32,
    as_json: Json = False,
) -> None:
    """Write the trained model as a directory that plain transformers opens."""
    import torch

    from moe_fragment.train.export import export as write
    from moe_fragment.train.export import summary

    dtypes = {Dtype.fp32: torch.float32, Dtype.bf16: torch.bfloat16}
    exported = write(run, out, step=step, dtype=dtypes[dtype])
    if as_json:
        _print(summary(exported))
        return
    print(
        f"wrote step {exported.step} to {exported.path}; it opens as {exported.architecture} in plain transformers"
    )
    if exported.needs_moe_fragment:
        print(f"  after `import moe_fragment`: {exported.why}")


def _print(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str), flush=True)


def _say(error: Exception) -> None:
    """One sentence for what a person can cause (our own errors, the system's); a mistake of ours keeps its trace."""
    if not isinstance(error, OSError) and not type(error).__module__.startswith("moe_fragment."):
        raise error
    sys.stderr.write(f"moe-fragment: {error}\n")


def main() -> None:
    """Run the command; bad input ends with one sentence and code 2, a failed run with code 1."""
    try:
        app()
    except (ValueError, OSError) as error:
        _say(error)
        sys.exit(2)
    except RuntimeError as error:
        _say(error)
        sys.exit(1)
    except SystemExit as ended:
        if ended.code == _INTERRUPTED:
            sys.stderr.write(
                "moe-fragment: interrupted; the same command goes on from the last checkpoint, if there is one\n"
            )
        raise

"""Runs a sweep's jobs one after another with `launch`, and keeps an account of them.

A complete run is skipped, an interrupted one goes on from its checkpoint, and one that fails leaves its reason in its
run directory (`failed.txt`) while the sweep goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tqdm import tqdm

from moe_fragment.schema import ConfigError
from moe_fragment.sweep.config import Job, Sweep
from moe_fragment.train.launch import LaunchError, is_complete, launch

FAILED = "failed.txt"


class SweepError(RuntimeError):
    """Runs of a sweep failed; the message names them."""


def run_sweep(sweep: Sweep, *, quiet: bool = False) -> list[Job]:
    """Run what is not complete yet.

    Args:
        sweep: expanded and checked.
        quiet: no progress bars.

    Returns:
        the jobs that failed.

    Raises:
        ConfigError: a run directory holds a run of another recipe.
        KeyboardInterrupt: interrupted; the same call goes on.
    """
    waiting = [job for job in sweep.jobs if not is_complete(job.recipe)]
    _refuse_others(sweep, waiting)
    done = len(sweep.jobs) - len(waiting)
    failed = []
    with tqdm(
        total=len(sweep.jobs), initial=done, desc=f"sweep {sweep.config.name}", unit="run", disable=quiet
    ) as bar:
        for job in waiting:
            bar.set_postfix_str(job.label)
            try:
                launch(sweep.recipe, job.overrides, quiet=quiet)
            except (LaunchError, ConfigError, OSError) as error:
                _record(job, str(error))
                failed.append(job)
                bar.write(f"run {job.label} failed: {error}", file=sys.stderr)
            else:
                (job.recipe.run_directory / FAILED).unlink(missing_ok=True)
            bar.update()
    return failed


def failure(job: Job) -> str | None:
    """Why the job's last start failed, if it did."""
    path = job.recipe.run_directory / FAILED
    return path.read_text(encoding="utf-8").strip() if path.is_file() else None


def _refuse_others(sweep: Sweep, jobs: Sequence[Job]) -> None:
    """A run that went on under other settings would be neither the old one nor the new one."""
    for job in jobs:
        for cluster in job.recipe.fleet().names:
            written = job.recipe.run_directory / cluster / "recipe.yaml"
            if written.is_file() and written.read_text(encoding="utf-8") != job.recipe.dump():
                raise ConfigError(
                    f"{sweep.path}: run {job.name}: {job.recipe.run_directory} holds a run with other settings; remove "
                    f"it, or give the sweep another name"
                )


def _record(job: Job, reason: str) -> None:
    directory = job.recipe.run_directory
    directory.mkdir(parents=True, exist_ok=True)
    (directory / FAILED).write_text(reason + "\n", encoding="utf-8")

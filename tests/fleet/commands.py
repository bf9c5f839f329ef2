"""Commands as a person types them, in sessions of their own, and the processes they leave in a directory."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import psutil

from moe_fragment.train.world import free_port
from tests.train.runs import ROOT

BIN = Path(sys.executable).parent
PRETRAIN = ROOT / "recipes" / "pretrain.py"
RUN_S = 240.0
"""Far more than any run needs, for machines that are busy with other things."""


class Command:
    """A command in a session of its own, its output in files."""

    running: ClassVar[list[Command]] = []

    def __init__(self, home: Path, *words: object) -> None:
        index = len(list(home.glob("*.out")))
        self.out, self.err = home / f"{index}.out", home / f"{index}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [str(BIN / str(words[0])), *map(str, words[1:])],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
                cwd=home,
                env={
                    **os.environ,
                    "DS_ACCELERATOR": "cpu",
                    "OMP_NUM_THREADS": "1",
                    "PATH": f"{BIN}:{os.environ['PATH']}",
                },
                start_new_session=True,
            )
        Command.running.append(self)

    def ends(self, within_s: float = RUN_S) -> int:
        """Its exit code."""
        return self.process.wait(within_s)

    @property
    def said(self) -> str:
        """Everything it wrote."""
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    @property
    def json(self) -> Any:
        """What it wrote to standard output."""
        return json.loads(self.out.read_text())


def belonging_to(home: Path) -> list[psutil.Process]:
    """Processes that work in `home`."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == home:
                found.append(process)
    return found


def until(ready: Callable[[], Any], within_s: float, story: Callable[[], str]) -> Any:
    """Poll until `ready()` is true; returns what it returned."""
    deadline = time.monotonic() + within_s
    while not (found := ready()):
        assert time.monotonic() < deadline, story()
        time.sleep(0.1)
    return found


def address_of(coordinator: Command) -> str:
    """Where a coordinator listens, once it does."""
    until(lambda: coordinator.out.read_text().endswith("}\n"), 60.0, lambda: coordinator.said)
    address: str = coordinator.json["address"]
    return address


def one_cluster(home: Path, recipe: Path, name: str, ranks: int, address: str, *more: object) -> Command:
    """One cluster of a fleet under a launcher of its own."""
    return Command(
        home,
        "deepspeed",
        *("--num_gpus", ranks, "--master_port", free_port(), PRETRAIN, "--recipe", recipe),
        *("--cluster", name, "--coordinator", address, *more),
    )


def ranks_of(home: Path, name: str) -> dict[tuple[str, int], int]:
    """Process ids by cluster and rank of a fleet under `moe-fragment launch`, as far as they have started."""
    found = {}
    for process in belonging_to(home):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            local = [word.removeprefix("--local_rank=") for word in words if word.startswith("--local_rank=")]
            if local and any(word.endswith(f"/{name}.yaml") for word in words) and "-m" not in words[:2]:
                cluster = words[words.index("--cluster") + 1] if "--cluster" in words else ""
                found[cluster, int(local[0])] = process.pid
    return found

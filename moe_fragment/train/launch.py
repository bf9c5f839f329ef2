"""`moe-fragment launch`: a coordinator and one deepspeed launcher per cluster, watched until the run is complete.

Whatever the launchers print goes to `launcher.log` in each cluster's run directory; what a person wants to see while it
runs is read from the run log. When one cluster ends badly, the others are ended too and the end of its log is shown.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from tqdm import tqdm

from moe_fragment.fabric import Coordinator
from moe_fragment.observe import RunLog
from moe_fragment.schema import ConfigError
from moe_fragment.topology import Topology
from moe_fragment.train.checkpoint import is_merged, saved_steps
from moe_fragment.train.lock import make_directory
from moe_fragment.train.model import check_model
from moe_fragment.train.peers import LAUNCH_PID
from moe_fragment.train.recipe import Recipe
from moe_fragment.train.view import RunView
from moe_fragment.train.world import free_port

_POLL_S = 0.5
_COMPILE_S = 300.0
_GRACE_S = 10.0
_SHOWN_LINES = 25
_OUR_LINES = 3
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class LaunchError(RuntimeError):
    """A cluster ended badly; the message names it and shows the end of its log."""


@dataclass
class _Launcher:
    cluster: str
    ranks: int
    process: subprocess.Popen[bytes]
    log: Path
    start: int
    """Where in the log this launch begins; earlier ones wrote before it."""


def launch(recipe_path: Path, overrides: Sequence[str], *, quiet: bool = False) -> dict[str, Any]:
    """Run the fleet of a recipe on this machine until it is complete.

    Args:
        recipe_path: the recipe.
        overrides: changes to it, `section.field=value`.
        quiet: no progress bar.

    Returns:
        run_dir, steps, tokens, final_loss, eval_loss, wan_bytes by channel, clusters.

    Raises:
        ConfigError: the recipe is wrong, names clusters on other hosts, or its run directory cannot be written.
        LaunchError: a cluster ended badly.
    """
    recipe = Recipe.load(recipe_path, overrides)
    topology = recipe.fleet()
    if not topology.is_local:
        raise ConfigError(
            f"{recipe_path}: topology.clusters: launch starts clusters of local processes; start each cluster with "
            f"hosts by `deepspeed --hostfile ... recipes/pretrain.py --recipe {recipe_path} --cluster NAME "
            f"--coordinator HOST:PORT`"
        )
    run = recipe.run_directory
    if is_complete(recipe):
        return result(run)
    try:
        check_model(recipe, topology)
    except ConfigError as error:
        raise ConfigError(f"{recipe_path}: {error}") from None
    for name in topology.names:
        make_directory(run / name)
    devices = place_ranks(topology, _accelerators())
    if any(cluster.accelerator == "cpu" for cluster in topology.clusters):
        _prepare_deepspeed()
    hosted = None
    if topology.coordinator is None:
        hosted = Coordinator(
            len(topology.names),
            heartbeat_timeout_s=recipe.fabric.heartbeat_timeout_s,
            join_timeout_s=recipe.fabric.quorum_timeout_s,
        )
    address = hosted.address if hosted is not None else topology.coordinator
    assert address is not None
    launchers: list[_Launcher] = []
    failed = None
    if not quiet:
        started = " and ".join(
            f"{n} ({size})" for n, size in zip(topology.names, topology.sizes, strict=True)
        )
        said = f"starting clusters {started}; what they print is in {run}/CLUSTER/launcher.log"
        tqdm.write(said, file=sys.stderr)  # above the bar of a sweep, if there is one
    with _stop_on_signals():
        try:
            for name, size in zip(topology.names, topology.sizes, strict=True):
                launchers.append(
                    _start(recipe_path, overrides, run / name, name, size, devices[name], address)
                )
            failed = _watch(launchers, recipe, run, topology, quiet=quiet)
        finally:
            _stop(launchers)
            if hosted is not None:
                hosted.close()
    if failed is not None:
        raise LaunchError(_story(failed))
    return result(run)


def result(run: Path) -> dict[str, Any]:
    """What `launch --json` prints."""
    summary = RunLog(run).summary()
    keys = ("steps", "tokens", "final_loss", "eval_loss", "wan_bytes", "clusters", "emulated")
    return {"run_dir": str(run), **{key: summary[key] for key in keys}}


def is_complete(recipe: Recipe) -> bool:
    """Whether this very recipe has been run to its end already, so that there is nothing to start."""
    run = recipe.run_directory
    for name in recipe.fleet().names:
        written = run / name / "recipe.yaml"
        if recipe.train.steps not in saved_steps(run / name) or not written.is_file():
            return False
        if not is_merged(run / name, recipe.train.steps):
            return False
        if written.read_text(encoding="utf-8") != recipe.dump():
            return False
    return True


@cache
def _prepare_deepspeed() -> None:
    """Compile DeepSpeed's CPU collectives once, so that ranks do not race for it; a second when it is done already."""
    try:
        done = _compile()
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"DeepSpeed's CPU collectives were not compiled within {_COMPILE_S:g} s; if a compilation was killed, "
            f"remove its lock: {_extensions()}/**/deepspeed_shm_comm/lock"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise LaunchError(f"DeepSpeed could not compile its CPU collectives (g++ is needed): {last}")


def _compile() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from deepspeed.comm.torch import build_shm_op; build_shm_op()"],
        env={**_environment(), "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=_COMPILE_S,
    )


def _extensions() -> str:
    """Where compiled extensions go: into the virtual environment, so that environments do not recompile in turns."""
    default = Path(sys.prefix) if sys.prefix != sys.base_prefix else Path.home() / ".cache"
    return os.environ.get("TORCH_EXTENSIONS_DIR", str(default / "torch_extensions"))


def _environment() -> dict[str, str]:
    """The launchers find the interpreter's own `deepspeed` and `ninja`; ranks share the cores fairly."""
    beside = os.path.dirname(sys.executable)
    return {
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": _extensions(),
        **os.environ,
        "PATH": os.pathsep.join([beside, os.environ.get("PATH", "")]),
        "PYTHONUNBUFFERED": "1",
        LAUNCH_PID: str(os.getpid()),
    }


def _accelerators() -> int:
    """How many GPUs this machine has; 0 runs on the CPU."""
    import torch

    return torch.cuda.device_count()


def place_ranks(topology: Topology, accelerators: int) -> dict[str, list[str]]:
    """The deepspeed launcher's options that give each cluster its ranks, and GPUs no other cluster uses.

    Args:
        topology: clusters whose accelerator is `cpu` need none.
        accelerators: GPUs of this machine.

    Raises:
        ConfigError: the machine has fewer GPUs than the topology needs.
    """
    needed = sum(cluster.size for cluster in topology.clusters if cluster.accelerator != "cpu")
    if accelerators < needed:
        raise ConfigError(
            f"topology.clusters: {needed} ranks need a GPU each, this machine has {accelerators}; use fewer processes, "
            f"or accelerator: cpu"
        )
    options, first = {}, 0
    for cluster in topology.clusters:
        if cluster.accelerator == "cpu":
            options[cluster.name] = ["--num_gpus", str(cluster.size)]
            continue
        chosen = ",".join(str(device) for device in range(first, first + cluster.size))
        options[cluster.name] = ["--include", f"localhost:{chosen}"]
        first += cluster.size
    return options


def _start(
    recipe: Path,
    overrides: Sequence[str],
    directory: Path,
    cluster: str,
    size: int,
    devices: Sequence[str],
    coordinator: str,
) -> _Launcher:
    log = directory / "launcher.log"
    deepspeed = shutil.which("deepspeed", path=_environment()["PATH"])
    if deepspeed is None:
        raise LaunchError(
            "the deepspeed launcher is not on PATH; is the package installed in this environment?"
        )
    command = [
        deepspeed,
        *devices,
        "--master_port",
        str(free_port()),
        "--module",
        "moe_fragment.train.main",
        "--recipe",
        str(recipe),
        "--cluster",
        cluster,
        "--coordinator",
        coordinator,
        *overrides,
    ]
    with log.open("ab") as output:
        # A session of its own: Ctrl-C reaches this process only, which then ends the others in order, and the group of
        # the launcher is the list of its ranks even when the launcher itself is gone.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(),
            start_new_session=True,
        )
        return _Launcher(cluster, size, process, log, output.tell())


def _watch(
    launchers: Sequence[_Launcher], recipe: Recipe, run: Path, topology: Topology, *, quiet: bool
) -> _Launcher | None:
    """Wait for all launchers, or for the first that ends badly: that one is returned."""
    view = None if quiet else RunView(run, recipe, topology)
    try:
        while any(launcher.process.poll() is None for launcher in launchers):
            failed = [launcher for launcher in launchers if launcher.process.poll() not in (None, 0)]
            if failed:
                return failed[0]
            if view is not None:
                view.refresh()
            time.sleep(_POLL_S)
        for launcher in launchers:
            if launcher.process.returncode:
                return launcher
        if view is not None:
            view.refresh()
        return None
    finally:
        if view is not None:
            view.close()


def _story(launcher: _Launcher) -> str:
    """Who ended, how, and why as far as its log tells."""
    with launcher.log.open("rb") as file:
        file.seek(launcher.start)
        lines = file.read().decode(errors="replace").splitlines()
    code = launcher.process.returncode
    ended = f"with code {code}"
    if code > 128 and 256 - code in set(signal.Signals):  # as the deepspeed launcher passes on a rank's -9
        ended = f"because a rank was killed ({signal.Signals(256 - code).name})"
        if launcher.ranks == 1:
            ended = ended.replace("a rank", "its rank 0")
    ours = [line for line in lines if line.startswith("moe-fragment:")]
    shown = "\n  ".join(dict.fromkeys(ours[:_OUR_LINES] or lines[-_SHOWN_LINES:]))
    return f"cluster {launcher.cluster} ended {ended}; {launcher.log} says:\n  {shown}"


def _stop(launchers: Sequence[_Launcher]) -> None:
    """End every process that is left: all of the launchers' sessions."""
    _ignore_signals()
    groups = {launcher.process.pid for launcher in launchers}
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) in groups:
                processes.append(process)
    # The launchers last: they kill hard whom they see dying.
    processes.sort(key=lambda process: process.pid in groups)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(_GRACE_S / 200)
    for process in filter(_is_alive, processes):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for launcher in launchers:
        launcher.process.wait()


def _is_alive(process: psutil.Process) -> bool:
    """Not ended; psutil would also wait for zombies of orphans until process 1, which may not care, collects them."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def _stop_on_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end the launch the way Ctrl-C does: through the clean-up."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        _ignore_signals()
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signals() -> None:
    """Nothing may interrupt the clean-up: whoever is not ended there trains on alone."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)

"""Real fleets for tests: one process a rank, its own DeepSpeed world per cluster, the fabric between
clusters.

Starting one takes seconds, so a fleet stays up and is sent *cases*: module-level functions `case(rank,
*args)` that all ranks run together. How a test ends, whatever happens: every rank answered; or some rank
raised, then the test fails with its traceback; or nobody answers within the time-out, then the test fails
with the Python stacks of every silent rank. In the last two cases the fleet is killed, and the next test that
asks for it gets a new one.

Ranks are forked from a server process that has imported the heavy packages once. They die with the test
process: the server ends when the test process does, and the kernel kills the ranks when the server ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_fragment.fabric import Fabric
    from moe_fragment.topology import Topology

NAMES = ("ada", "bob", "cyd")
START_TIMEOUT_S = 180.0
CASE_TIMEOUT_S = 180.0
GRACE_S = 8.0
"""How long the other ranks may go on after one has raised; usually they wait for it in vain."""
LOG_LINES = 60

_PRELOAD = [
    "torch",
    "transformers",
    "transformers.models.mixtral.modeling_mixtral",
    "transformers.models.qwen3_moe.modeling_qwen3_moe",
    "deepspeed",
    "torchft.manager",
]
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Place:
    """Where one process stands in the fleet."""

    sizes: tuple[int, ...]
    cluster: int
    rank: int

    @property
    def size(self) -> int:
        """Ranks of the cluster."""
        return self.sizes[self.cluster]

    def __str__(self) -> str:
        return f"cluster {NAMES[self.cluster]} rank {self.rank}"


@dataclass
class Rank:
    """What a case gets: this process's place, the fleet and the fabric; lives as long as the process."""

    place: Place
    topology: Topology
    fabric: Fabric
    stages: int = 1
    keep: dict[str, Any] = field(default_factory=dict)
    _step: int = -1

    def next_step(self) -> int:
        """A step number that no case has used on this fabric, the same on every rank."""
        self._step += 1
        return self._step


class FleetFailure(AssertionError):
    """A case failed or hung on some rank; the message has every rank's traceback or stacks."""


def topology_of(
    sizes: tuple[int, ...], *, bandwidth: str = "1 Gbit/s", rtt: str = "20 ms", jitter: str = "0 ms"
) -> Topology:
    """Clusters ada, bob, cyd of these sizes on this machine, every pair linked alike."""
    from moe_fragment.topology import Topology

    names = NAMES[: len(sizes)]
    return Topology.from_dict(
        {
            "clusters": [{"name": name, "processes": size} for name, size in zip(names, sizes, strict=True)],
            "links": [
                {"between": [one, other], "bandwidth": bandwidth, "rtt": rtt, "jitter": jitter}
                for index, one in enumerate(names)
                for other in names[index + 1 :]
            ],
        }
    )


class Fleet:
    """A running fleet of `sizes` ranks per cluster, in `stages`; use through the `fleets` fixture."""

    def __init__(self, sizes: tuple[int, ...], stages: int = 1) -> None:
        from moe_fragment.fabric import Coordinator
        from moe_fragment.train.world import free_port

        self.sizes = sizes
        self.places = [Place(sizes, c, r) for c, size in enumerate(sizes) for r in range(size)]
        self.alive = True
        self._logs = Path(tempfile.mkdtemp(prefix="fleet-"))
        self._coordinator = Coordinator(len(sizes), join_timeout_s=60.0)
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        ports = [free_port() for _ in sizes]
        try:
            for place in self.places:
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve,
                    args=(
                        place,
                        self._coordinator.address,
                        ports[place.cluster],
                        stages,
                        str(self._log(place)),
                        theirs,
                    ),
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            self._collect("start", START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise

    def run(
        self, case: Callable[..., Any], *arguments: Any, timeout_s: float = CASE_TIMEOUT_S
    ) -> list[list[Any]]:
        """Run `case(rank, *arguments)` on all ranks; returns its results by cluster and rank.

        Raises:
            FleetFailure: a rank raised or did not answer in time.
        """
        assert self.alive, "this fleet was ended by an earlier failure"
        message = pickle.dumps((case, arguments))
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
            answers = self._collect(getattr(case, "__name__", str(case)), timeout_s)
        except BaseException:
            self.kill()
            raise
        results = iter(answers)
        return [[next(results) for _ in range(size)] for size in self.sizes]

    def _collect(self, what: str, timeout_s: float) -> list[Any]:
        """Every rank's answer, in order of places."""
        waiting = dict(enumerate(self._pipes))
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        while waiting and (left_s := deadline - time.monotonic()) > 0:
            ready = multiprocessing.connection.wait(list(waiting.values()), left_s)
            for index in [index for index, pipe in waiting.items() if pipe in ready]:
                pipe = waiting.pop(index)
                try:
                    ok, answer = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[index].join(GRACE_S)
                    ok, answer = False, f"the process died (exit code {self._processes[index].exitcode})"
                if ok:
                    answers[index] = answer
                else:
                    errors[index] = f"{answer}\n{self._log_tail(self.places[index])}"
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if not errors and not waiting:
            return [answers[index] for index in range(len(self.places))]
        raise FleetFailure(self._describe(what, timeout_s, errors, list(waiting)))

    def _describe(self, what: str, timeout_s: float, errors: dict[int, str], silent: list[int]) -> str:
        for index in silent:
            pid = self._processes[index].pid
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        if silent:
            time.sleep(1.0)  # for the stacks to be written
        lines = [f"{what} on a fleet of {' + '.join(map(str, self.sizes))} ranks:"]
        lines += [f"\n{self.places[index]} failed:\n{text}" for index, text in errors.items()]
        reason = "after another rank failed" if errors else f"within {timeout_s:g} s"
        lines += [
            f"\n{self.places[index]} did not answer {reason}:\n{self._log_tail(self.places[index])}"
            for index in silent
        ]
        return "\n".join(lines)

    def _log(self, place: Place) -> Path:
        return self._logs / f"{NAMES[place.cluster]}-{place.rank}.log"

    def _log_tail(self, place: Place) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self._log(place).read_text(errors="replace").splitlines()[-LOG_LINES:])
        return ""

    def kill(self) -> None:
        """End every process of the fleet, those they started as well."""
        if not self.alive:
            return
        self.alive = False
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()  # in case it had not yet made itself the leader of its group
        for process in self._processes:
            process.join(5.0)
        for pipe in self._pipes:
            pipe.close()
        self._coordinator.close()
        shutil.rmtree(self._logs, ignore_errors=True)


class Fleets:
    """Hands out running fleets by their sizes and stages, and ends them all."""

    def __init__(self) -> None:
        self._running: dict[tuple[tuple[int, ...], int], Fleet] = {}

    def __call__(self, *sizes: int, stages: int = 1) -> Fleet:
        """The fleet with clusters of these sizes, each a pipeline of so many stages, started if there is none."""
        fleet = self._running.get((sizes, stages))
        if fleet is None or not fleet.alive:
            fleet = self._running[sizes, stages] = Fleet(sizes, stages)
        return fleet

    def close(self) -> None:
        """End all fleets."""
        for fleet in self._running.values():
            fleet.kill()
        _stop_server()


def _stop_server() -> None:
    """End the process that ranks are forked from now; by itself it takes seconds to unload what it imported."""
    from multiprocessing.forkserver import _forkserver  # type: ignore[attr-defined]

    pid = getattr(_forkserver, "_forkserver_pid", None)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _forkserver._stop()


def _serve(place: Place, coordinator: str, master_port: int, stages: int, log: str, pipe: Connection) -> None:
    """Life of one rank: join, then run the cases that come through the pipe until it closes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # The server's streams may be wherever its first user had them; a rank's go to its log.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=output)
    faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)
    rank = _answer(pipe, _join, place, coordinator, master_port, stages, keep_result=True)
    while rank is not None:
        try:
            case, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        except Exception:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue
        _answer(pipe, case, rank, *arguments)
    os._exit(0)  # without the destructors of process groups, which wait for their peers


def _answer(pipe: Connection, act: Callable[..., Any], *arguments: Any, keep_result: bool = False) -> Any:
    result = None
    try:
        result = act(*arguments)
        message = pickle.dumps((True, None if keep_result else result))
    except BaseException:
        message = pickle.dumps((False, traceback.format_exc()))
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(message)
    return result


def _join(place: Place, coordinator: str, master_port: int, stages: int) -> Rank:
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.size),
        LOCAL_SIZE=str(place.size),
        LOCAL_RANK=str(place.rank),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(master_port),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    import deepspeed
    import torch

    from moe_fragment.fabric import FabricConfig, connect
    from moe_fragment.train.world import release_shared_buffers

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    release_shared_buffers()
    topology = topology_of(place.sizes)
    config = FabricConfig(
        join_timeout="80 s", quorum_timeout="60 s", exchange_timeout="20 s", heartbeat_timeout="10 s"
    )
    fabric = connect(
        topology,
        config,
        cluster=NAMES[place.cluster],
        coordinator=coordinator,
        facts={"sizes": list(place.sizes), "stages": stages},
        side=True,
        stages=stages,
    )
    return Rank(place, topology, fabric, stages)

"""Groups of processes that run benchmark cases together, started once and driven in turns.

Two groups may be up at the same time, one per side of a comparison: while one works, the other waits in a pipe and
costs nothing, so the sides can take turns (A B A B ...) and a busy machine slows both alike. Every rank has one thread.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_fragment.fabric import Fabric
    from moe_fragment.topology import Topology

NAMES = ("ada", "bob", "cyd", "dan")
ANSWER_TIMEOUT_S = 600.0
_PRELOAD = ["torch", "deepspeed", "transformers.models.qwen3_moe.modeling_qwen3_moe", "torchft.manager"]


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """How the processes of a group are joined.

    `sizes` are ranks per cluster. Without `fabric` there must be one cluster: a plain torch.distributed world.
    `bandwidth` and `rtt` are emulated on the links between clusters; None leaves them as fast as the machine is. The
    ranks of a cluster may be a pipeline of `stages`.
    """

    sizes: tuple[int, ...]
    fabric: bool = True
    bandwidth: str | None = None
    rtt: str | None = None
    stages: int = 1


@dataclass
class Rank:
    """What a case gets: its place, the fabric if there is one, and a dict that lives as long as the process."""

    cluster: int
    local_rank: int
    wiring: Wiring
    topology: Topology | None
    fabric: Fabric | None
    keep: dict[str, Any]

    @property
    def place(self) -> int:
        """Position among all ranks of the group."""
        return sum(self.wiring.sizes[: self.cluster]) + self.local_rank


class Group:
    """Running processes; see `start`."""

    def __init__(self, wiring: Wiring) -> None:
        from moe_fragment.fabric import Coordinator
        from moe_fragment.train.world import free_port

        os.environ.update(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
        self._coordinator = Coordinator(len(wiring.sizes)) if wiring.fabric else None
        address = self._coordinator.address if self._coordinator else ""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self._pipes: list[Connection] = []
        self._processes = []
        for cluster, size in enumerate(wiring.sizes):
            port = free_port()
            for local_rank in range(size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(wiring, cluster, local_rank, port, address, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)

    def ready(self) -> None:
        """Wait until every rank has joined."""
        self._answers()

    def run(self, case: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run `case(rank, *arguments)` on every rank; returns the answers by place.

        Raises:
            RuntimeError: a rank raised, died or did not answer; the message has its traceback.
        """
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((case, arguments)))
        return self._answers()

    def _answers(self) -> list[Any]:
        answers = []
        for place, pipe in enumerate(self._pipes):
            if not pipe.poll(ANSWER_TIMEOUT_S):
                raise RuntimeError(f"rank {place} did not answer within {ANSWER_TIMEOUT_S:g} s")
            try:
                ok, answer = pickle.loads(pipe.recv_bytes())
            except EOFError:
                raise RuntimeError(f"rank {place} ended") from None
            if not ok:
                raise RuntimeError(f"rank {place}: {answer}")
            answers.append(answer)
        return answers

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._coordinator is not None:
            self._coordinator.close()


@contextmanager
def start(*wirings: Wiring) -> Iterator[list[Group]]:
    """Groups of processes for the time of a `with` block, one per wiring."""
    groups = [Group(wiring) for wiring in wirings]
    try:
        for group in groups:
            group.ready()
        yield groups
    finally:
        for group in groups:
            group.close()


def _serve(
    wiring: Wiring, cluster: int, local_rank: int, port: int, coordinator: str, pipe: Connection
) -> None:
    os.dup2(2, 1)  # standard output belongs to the benchmark's answer
    try:
        rank = _join(wiring, cluster, local_rank, port, coordinator)
        pipe.send_bytes(pickle.dumps((True, None)))
        while True:
            case, arguments = pickle.loads(pipe.recv_bytes())
            pipe.send_bytes(pickle.dumps((True, case(rank, *arguments))))
    except EOFError:
        pass
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    os._exit(0)  # without the destructors of process groups, which wait for their peers


def _join(wiring: Wiring, cluster: int, local_rank: int, port: int, coordinator: str) -> Rank:
    size = wiring.sizes[cluster]
    os.environ.update(
        RANK=str(local_rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(size),
        LOCAL_SIZE=str(size),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )
    import deepspeed
    import torch

    torch.set_num_threads(1)
    from moe_fragment.train.world import release_shared_buffers

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    release_shared_buffers()
    if not wiring.fabric:
        assert len(wiring.sizes) == 1, "clusters without a fabric cannot talk"
        return Rank(cluster, local_rank, wiring, None, None, {})
    from moe_fragment.fabric import FabricConfig, connect
    from moe_fragment.topology import Topology

    names = NAMES[: len(wiring.sizes)]
    topology = Topology.from_dict(
        {
            "clusters": [{"name": n, "processes": s} for n, s in zip(names, wiring.sizes, strict=True)],
            "links": [
                {"between": [a, b], "bandwidth": wiring.bandwidth or "1 Gbit/s", "rtt": wiring.rtt or "10 ms"}
                for i, a in enumerate(names)
                for b in names[i + 1 :]
            ],
        }
    )
    fabric = connect(
        topology,
        FabricConfig(emulate=wiring.bandwidth is not None),
        cluster=names[cluster],
        coordinator=coordinator,
        facts={"sizes": list(wiring.sizes)},
        stages=wiring.stages,
    )
    return Rank(cluster, local_rank, wiring, topology, fabric, {})


def forget_peak() -> None:
    """Start VmHWM anew at the memory this process has now."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_bytes(field: str) -> int:
    """A field of this process's status in bytes: VmRSS now, VmHWM the largest since `forget_peak`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """Median over turns of one side over the other, turn by turn."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def table(columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> str:
    """A markdown table.

    Args:
        columns: heading to format of the row's value, such as `"{time_s:.3f}"`.
        rows: what the formats refer to.
    """
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(text.format(**row) for text in columns.values()) + " |" for row in rows]
    return "\n".join(lines)


def command_line(name: str, about: str | None, columns: str = "") -> argparse.ArgumentParser:
    """The parser of one program, with `--json`.

    Args:
        name: of its module.
        about: its docstring.
        columns: what the columns of its table say, a line each.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=columns and f"what the columns say:\n{columns}",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    return parser


def answer(name: str, found: dict[str, Any], text: str, *, as_json: bool) -> None:
    """Print what a program has found, for programs or for people."""
    print(json.dumps({"benchmark": name} | found) if as_json else text)

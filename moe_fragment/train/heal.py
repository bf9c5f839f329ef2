"""A cluster without a checkpoint gets one from the others before a run goes on: it lost its disk, or is another one.

What it receives has the canonical form of any checkpoint, so the layouts of giver and receiver do not matter: weights,
moments and step counts of the trunk and of its experts, router biases, the sync's global copy, outer momentum and
schedule, a mean pseudo-gradient under way. It does not receive what the giver's codec still owes (error feedback): that
is about the giver's data. The receiver owes nothing, draws its own random numbers, and reads its data from where it
would be. What no other cluster holds, such as a pinned expert, nobody can give.

On the wire are JSON and safetensors, over the first rail, on the channel `heal`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import safetensors.torch
import torch
from tqdm import tqdm

from moe_fragment.fabric import Fabric, FleetError
from moe_fragment.fabric.rails import Rail
from moe_fragment.schema import ConfigError
from moe_fragment.sync.state import FEEDBACK, LOST, SERVED, SERVED_VELOCITY
from moe_fragment.train.checkpoint import Checkpoint, Manifest, adopt, checkpoint_path, partial_path
from moe_fragment.train.random_state import RANDOM_KINDS

_KEPT = {FEEDBACK, LOST, SERVED, SERVED_VELOCITY, *RANDOM_KINDS}
"""Kinds that are a cluster's own."""
_BUFFER = "buffer"
_PART_BYTES = 256 * 2**20
_CHUNK_BYTES = 4 * 2**20

Gifts = dict[tuple[int, int], list[str]]
"""Canonical names by (receiver, giver)."""


def gifts(holds: Sequence[Sequence[str]], receivers: Sequence[int], clusters: Sequence[str]) -> Gifts:
    """Who gives what; the first cluster after the receiver gives all it has, so that receivers spread over givers.

    Args:
        holds: canonical names that each cluster holds by the placement.
        receivers: indices of clusters without a checkpoint.
        clusters: names.

    Raises:
        FleetError: nobody else holds something a receiver needs.
    """
    found: Gifts = {}
    for receiver in receivers:
        missing = set(holds[receiver])
        for giver in ((receiver + step) % len(holds) for step in range(1, len(holds))):
            if giver in receivers:
                continue
            given = missing & set(holds[giver])
            if given:
                found[receiver, giver] = sorted(given)
            missing -= given
        if missing:
            raise FleetError(
                f"cluster {clusters[receiver]} has no checkpoint, and {len(missing)} of its parameters are on no other "
                f"cluster (the first is {min(missing)}): put its run directory back; experts survive the loss of a "
                f"cluster where placement.policy gives them more than one"
            )
    return found


class Healing:
    """One rank's part in bringing clusters without a checkpoint to the step of the others.

    Args:
        fabric: of this rank.
        directory: run directory of this cluster.
        step: that the others go on from.
        receivers: indices of the clusters without a checkpoint.
        first: whether this is the cluster's first rank, which reads, sends and writes.
    """

    def __init__(
        self, fabric: Fabric, directory: Path, step: int, receivers: Sequence[int], *, first: bool
    ) -> None:
        self._fabric = fabric
        self._directory = directory
        self._step = step
        self._receivers = receivers
        self._first = first
        self._checkpoint: Checkpoint | None = None

    @property
    def receives(self) -> bool:
        """Whether this cluster is one of those without a checkpoint."""
        return self._fabric.cluster in self._receivers

    def run(self, holds: Sequence[str], own: Mapping[str, Any], prepare: Callable[[], None]) -> str:
        """Collective over the fleet.

        Args:
            holds: canonical names of this cluster.
            own: fields of the manifest that are this cluster's and not the giver's.
            prepare: called on the first rank of a receiver before anything is written.

        Returns:
            a sentence for the log, empty on givers.

        Raises:
            FleetError: nobody can give what is needed, or it did not arrive.
        """
        names = self._fabric.names
        heard = self._fabric.gather(
            "heal", {"error": self._attempt(self._open, prepare), "holds": list(holds)}
        )
        self._check([row["error"] for row in heard])
        plan = gifts([row["holds"] for row in heard], self._receivers, names)
        self._fabric.begin_step(self._step)
        error = self._attempt(self._exchange, plan, own)
        self._check(self._fabric.gather("healed", error))
        self._fabric.commit(True)
        if not self.receives:
            return ""
        givers = " and ".join(names[giver] for receiver, giver in plan if receiver == self._fabric.cluster)
        return f"had no checkpoint and took step {self._step} from cluster {givers}"

    def _attempt(self, act: Callable[..., None], *arguments: Any) -> str | None:
        """What went wrong on the first rank; others would wait for one that raises."""
        if not self._first:
            return None
        try:
            act(*arguments)
        except (ConfigError, FleetError, OSError) as error:
            return str(error)
        return None

    def _check(self, errors: Sequence[str | None]) -> None:
        for name, error in zip(self._fabric.names, errors, strict=True):
            if error is not None:
                raise FleetError(f"cluster {name} cannot begin: {error}")

    def _open(self, prepare: Callable[[], None]) -> None:
        if self.receives:
            prepare()
        else:
            self._checkpoint = Checkpoint(checkpoint_path(self._directory, self._step))
            self._checkpoint.verify()

    def _exchange(self, plan: Gifts, own: Mapping[str, Any]) -> None:
        inboxes = []
        partial = partial_path(self._directory, self._step)
        if self.receives:
            shutil.rmtree(partial, ignore_errors=True)
        for (receiver, giver), names in plan.items():
            files, inbox = None, None
            if self._fabric.cluster == giver:
                assert self._checkpoint is not None
                files = _files(self._checkpoint, names)
            elif self._fabric.cluster == receiver:
                inboxes.append(inbox := _Inbox(partial, self._fabric.names[giver]))
            arrived, _ = self._fabric.collective(_hand_over, receiver, giver, files, inbox).wait()
            if inbox is not None:
                inbox.close()
            if not arrived:
                raise FleetError(
                    f"a transfer to {self._fabric.names[receiver]} failed: {self._fabric.failure}; start again"
                )
        if inboxes:
            adopt(self._directory, *_together(inboxes, own))


def _files(checkpoint: Checkpoint, names: Sequence[str]) -> Iterator[bytes]:
    """A manifest of what follows, and tensor files of about `_PART_BYTES`."""
    manifest, wanted = checkpoint.manifest, set(names)
    fields = manifest.to_json()
    for field in ("sizes", "steps", "shapes"):
        fields[field] = {name: value for name, value in fields[field].items() if name in wanted}
    kinds = sorted(checkpoint.kinds - _KEPT - {_BUFFER})
    held = [(kind, name) for kind in kinds for name in checkpoint.names(kind) if name in wanted]
    total = sum(4 * manifest.sizes[name] for _, name in held)
    yield json.dumps({"manifest": fields, "bytes": total}).encode()
    part = {
        f"{_BUFFER}|{name}|0": checkpoint.extra(f"{_BUFFER}|{name}|0") for name in checkpoint.names(_BUFFER)
    }
    for kind, name in held:
        if sum(4 * tensor.numel() for tensor in part.values()) >= _PART_BYTES:
            yield safetensors.torch.save(part)
            part = {}
        part[f"{kind}|{name}|0"] = checkpoint.read(kind, name, 0, manifest.sizes[name])
    yield safetensors.torch.save(part)


def _chunks(files: Iterator[bytes]) -> Iterator[torch.Tensor]:
    """Pieces of uint8; an empty one ends a file, another one the last."""
    for data in files:
        yield from torch.frombuffer(bytearray(data), dtype=torch.uint8).split(_CHUNK_BYTES)
        yield torch.empty(0, dtype=torch.uint8)
    yield torch.empty(0, dtype=torch.uint8)


def _hand_over(
    rail: Rail,
    cluster: int,
    clusters: int,
    receiver: int,
    giver: int,
    files: Iterator[bytes] | None,
    inbox: _Inbox | None,
) -> None:
    """Files from one cluster to another; the others hear how far they are, so that all stay in step."""
    chunks = _chunks(files) if files is not None else None
    ends = 0
    while ends < 2:
        if chunks is not None:
            chunk = next(chunks)
            parts = [chunk if peer == receiver else chunk[:1] for peer in range(clusters)]
            rail.exchange("heal", parts, "heal", source=())
        else:
            nothing = [torch.empty(0, dtype=torch.uint8)] * clusters
            chunk = rail.exchange("heal", nothing, "heal", to=(), source=(giver,))[giver]
        ends = 0 if chunk.numel() else ends + 1
        if inbox is not None:
            inbox.take(chunk)


class _Inbox:
    """What arrives from one cluster: its manifest, and tensor files in a directory; with a progress bar."""

    def __init__(self, directory: Path, giver: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.giver = giver
        self._head = b""
        self._ended = False
        self._file: BinaryIO | None = None
        self.paths: list[Path] = []
        self._bar = tqdm(desc=f"checkpoint from {giver}", unit="B", unit_scale=True, dynamic_ncols=True)

    def take(self, chunk: torch.Tensor) -> None:
        """The next piece; see `_chunks`."""
        data = chunk.numpy().tobytes()
        if not self._ended:
            self._head += data
            self._ended = not data
            if self._ended:
                self._bar.reset(total=self.head["bytes"])
            return
        self._bar.update(len(data))
        if not data and self._file is not None:
            self._file.close()
            self._file = None
        elif data:
            if self._file is None:
                self.paths.append(self._directory / f"{self.giver}-{len(self.paths):05d}.safetensors")
                self._file = self.paths[-1].open("wb")
            self._file.write(data)

    @property
    def head(self) -> dict[str, Any]:
        """What the first file says."""
        found: dict[str, Any] = json.loads(self._head)
        return found

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _together(inboxes: Sequence[_Inbox], own: Mapping[str, Any]) -> tuple[Manifest, list[Path]]:
    """One checkpoint of what several clusters gave; the first of them has given the trunk."""
    manifests = [Manifest.from_json(inbox.head["manifest"], f"from {inbox.giver}") for inbox in inboxes]
    merged = {
        field: {name: value for one in manifests for name, value in getattr(one, field).items()}
        for field in ("sizes", "steps", "shapes")
    }
    return replace(manifests[0], **merged, **own), [path for inbox in inboxes for path in inbox.paths]

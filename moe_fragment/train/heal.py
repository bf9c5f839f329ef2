"""A cluster without a checkpoint gets one from the others before a run goes on: it lost its disk, or is another one.

What it receives has the canonical form of any checkpoint, so the layouts of donor and receiver do not matter: weights,
moments and step counts of the trunk and of its experts, router biases, the sync's global copy, outer momentum and
schedule, a mean pseudo-gradient under way. Where clusters train apart it starts from the global copy, not from what the
donor has made of it since, with no tokens to its credit. It does not receive what the donor's codec still owes (error
feedback): that is about the donor's data. It owes nothing, draws its own random numbers, and reads its data from where
it would be. What no other cluster holds, such as a pinned expert, nobody can give.

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
from safetensors import SafetensorError
from tqdm import tqdm

from moe_fragment.fabric import Fabric, FleetError
from moe_fragment.fabric.rails import ExchangeError, Rail
from moe_fragment.schema import ConfigError
from moe_fragment.sync.state import FEEDBACK, LOST, OUTER, SERVED, SERVED_VELOCITY
from moe_fragment.train.checkpoint import Checkpoint, Manifest, adopt, checkpoint_path, partial_path
from moe_fragment.train.random_state import RANDOM_KINDS
from moe_fragment.train.state import WEIGHT
from moe_fragment.train.syncing import FleetSync

_KEPT = {FEEDBACK, LOST, SERVED, SERVED_VELOCITY, *RANDOM_KINDS}
"""Kinds that are a cluster's own."""
_BUFFER = "buffer"
_PART_ELEMENTS = 64 * 2**20
_CHUNK_BYTES = 4 * 2**20
_TROUBLE = (ConfigError, FleetError, OSError, ValueError, SafetensorError)

Plan = dict[tuple[int, int], list[str]]
"""Canonical names by (receiver, donor)."""


def transfer_plan(holds: Sequence[Sequence[str]], receivers: Sequence[int], clusters: Sequence[str]) -> Plan:
    """Who gives what; the first cluster after the receiver gives all it has, so that receivers spread over donors.

    Args:
        holds: canonical names that each cluster holds by the placement.
        receivers: indices of clusters without a checkpoint.
        clusters: names.

    Raises:
        FleetError: nobody else holds something a receiver needs.
    """
    plan: Plan = {}
    for receiver in receivers:
        missing = set(holds[receiver])
        for donor in ((receiver + step) % len(holds) for step in range(1, len(holds))):
            if donor in receivers:
                continue
            given = missing & set(holds[donor])
            if given:
                plan[receiver, donor] = sorted(given)
            missing -= given
        if missing:
            raise FleetError(
                f"cluster {clusters[receiver]} has no checkpoint, and {len(missing)} of its parameters are on no other "
                f"cluster (the first is {min(missing)}): put its run directory back or, if it never saved anything, "
                f"choose another name for the run; experts survive the loss of a cluster where placement.policy gives "
                f"them more than one"
            )
    return plan


class Healing:
    """One rank's part in bringing clusters without a checkpoint to the step of the others.

    Args:
        fabric: of this rank.
        directory: run directory of this cluster.
        step: that the others go on from.
        receivers: indices of the clusters without a checkpoint.
        batches: sequences per step of each cluster.
        first: whether this is the cluster's first rank, which reads, sends and writes.
    """

    def __init__(
        self,
        fabric: Fabric,
        directory: Path,
        step: int,
        receivers: Sequence[int],
        *,
        batches: Sequence[int],
        first: bool,
    ) -> None:
        self._fabric = fabric
        self._directory = directory
        self._partial = partial_path(directory, step)
        self._step = step
        self._receivers = receivers
        self._batches = batches
        self._first = first
        self._checkpoint: Checkpoint | None = None
        self._inboxes: list[_Inbox] = []

    @property
    def receives(self) -> bool:
        """Whether this cluster is one of those without a checkpoint."""
        return self._fabric.cluster in self._receivers

    def run(
        self,
        holds: Sequence[str],
        own: Mapping[str, Any],
        prepare: Callable[[], None],
        check: Callable[[Checkpoint], None],
    ) -> str:
        """Bring them there; collective over the fleet.

        Each file takes as long as it takes; reading what there is to give, and sealing what has arrived, at most
        `fabric.join_timeout`.

        Args:
            holds: canonical names of this cluster.
            own: fields of the manifest that are this cluster's and not the donor's.
            prepare: called on the first rank of a receiver before anything is written.
            check: refuses a donor's checkpoint that is not of this run.

        Returns:
            a sentence for the log, empty on donors.

        Raises:
            FleetError: nobody can give what is needed, or it did not arrive.
        """
        names = self._fabric.names
        error = self._attempt(self._open, prepare, check)
        heard = self._fabric.gather("heal", {"error": error, "holds": list(holds)})
        self._raise_worst([row["error"] for row in heard])
        plan = transfer_plan([row["holds"] for row in heard], self._receivers, names)
        self._fabric.begin_step(self._step)
        error = None
        served: set[int] = set()
        for (receiver, donor), given in plan.items():
            error = error or self._transfer(receiver, donor, given, buffers=receiver not in served)
            served.add(receiver)
        error = error or self._attempt(self._adopt, own)
        if error is not None:
            self._give_up()
        errors = self._fabric.gather("healed", error)
        self._fabric.commit(not any(errors))
        self._raise_worst(errors)
        if not self.receives:
            return ""
        donors = " and ".join(names[donor] for receiver, donor in plan if receiver == self._fabric.cluster)
        return f"had no checkpoint and took step {self._step} from cluster {donors}"

    def _attempt(self, act: Callable[..., None], *arguments: Any) -> str | None:
        """What went wrong on the first rank; others would wait for one that raises."""
        if not self._first:
            return None
        try:
            act(*arguments)
        except _TROUBLE as error:
            return str(error)
        return None

    def _raise_worst(self, errors: Sequence[str | None]) -> None:
        """The cause, if a cluster knows it; that a transfer broke off is what all others know."""
        found = [(name, error) for name, error in zip(self._fabric.names, errors, strict=True) if error]
        if found:
            name, error = min(found, key=lambda row: row[1].startswith(_BROKEN))
            raise FleetError(f"cluster {name} cannot begin: {error}")

    def _open(self, prepare: Callable[[], None], check: Callable[[Checkpoint], None]) -> None:
        if self.receives:
            prepare()
            shutil.rmtree(self._partial, ignore_errors=True)
            return
        self._checkpoint = Checkpoint(checkpoint_path(self._directory, self._step))
        check(self._checkpoint)
        self._checkpoint.verify()

    def _transfer(self, receiver: int, donor: int, names: Sequence[str], *, buffers: bool) -> str | None:
        """All files from one cluster to another; what went wrong. All ranks of a cluster count the files, as none can
        wait for hours.
        """
        files: Iterator[bytes] | None = None
        inbox: _Inbox | None = None
        if self._first and self._fabric.cluster == donor:
            assert self._checkpoint is not None
            files = _files(self._checkpoint, names, buffers=buffers)
        elif self._first and self._fabric.cluster == receiver:
            self._inboxes.append(inbox := _Inbox(self._partial, self._fabric.names[donor], donor))
        more = True
        while more:
            said: tuple[bool, str | None] = (False, None)
            if self._first:
                said = self._hand_over(receiver, donor, files, inbox)
            more, error = self._fabric.cluster_gather(said)[0]
        if inbox is not None:
            inbox.close()
        return error

    def _hand_over(
        self, receiver: int, donor: int, files: Iterator[bytes] | None, inbox: _Inbox | None
    ) -> tuple[bool, str | None]:
        """One file: whether another may follow, and what went wrong."""
        cause: list[str] = []

        def act(rail: Rail, cluster: int, clusters: int) -> bool:
            try:
                chunks = _chunks(next(files, b"")) if files is not None else None
                return _pass_on(rail, clusters, receiver, donor, chunks, inbox)
            except _TROUBLE as error:
                cause.append(str(error))
                raise ExchangeError(str(error)) from None  # closes the rail, so that nobody waits

        arrived, more = self._fabric.collective(act).wait()
        if arrived:
            return bool(more), None
        if cause:
            return False, cause[0]
        return (
            False,
            f"{_BROKEN} {self._fabric.names[receiver]} broke off: {self._fabric.failure}; start again",
        )

    def _adopt(self, own: Mapping[str, Any]) -> None:
        if self.receives:
            adopt(self._directory, *_together(self._inboxes, own, self._batches, self._fabric.cluster))

    def _give_up(self) -> None:
        for inbox in self._inboxes:
            inbox.close()
        if self._first and self.receives:
            shutil.rmtree(self._partial, ignore_errors=True)


_BROKEN = "the transfer to"


def _files(checkpoint: Checkpoint, names: Sequence[str], *, buffers: bool) -> Iterator[bytes]:
    """A manifest of what follows, and tensor files of about `_PART_ELEMENTS`."""
    manifest, wanted = checkpoint.manifest, set(names)
    fields = manifest.to_json()
    for field in ("sizes", "steps", "shapes"):
        fields[field] = {name: value for name, value in fields[field].items() if name in wanted}
    kinds = sorted(checkpoint.kinds - _KEPT - {_BUFFER})
    held = [(kind, name) for kind in kinds for name in checkpoint.names(kind) if name in wanted]
    yield json.dumps(
        {"manifest": fields, "bytes": sum(4 * manifest.sizes[name] for _, name in held)}
    ).encode()
    part: dict[str, torch.Tensor] = {}
    if buffers:
        for name in checkpoint.names(_BUFFER):
            key = f"{_BUFFER}|{name}|0"
            if (stored := checkpoint.extra(key)) is not None:
                part[key] = stored
    room = _PART_ELEMENTS
    for kind, name in held:
        source = OUTER if kind == WEIGHT and checkpoint.holds(OUTER, name) else kind
        at, size = 0, manifest.sizes[name]
        while at < size:
            count = min(room, size - at)
            part[f"{kind}|{name}|{at}"] = checkpoint.read(source, name, at, count)
            at, room = at + count, room - count
            if not room:
                yield safetensors.torch.save(part)
                part, room = {}, _PART_ELEMENTS
    if part:
        yield safetensors.torch.save(part)


def _chunks(data: bytes) -> Iterator[torch.Tensor]:
    """Pieces of a file, uint8, and an empty one at its end."""
    if data:
        yield from torch.frombuffer(bytearray(data), dtype=torch.uint8).split(_CHUNK_BYTES)
    yield torch.empty(0, dtype=torch.uint8)


def _pass_on(
    rail: Rail,
    clusters: int,
    receiver: int,
    donor: int,
    chunks: Iterator[torch.Tensor] | None,
    inbox: _Inbox | None,
) -> bool:
    """A file from one cluster to another; the others hear how far it is, so that all stay in step.

    Returns:
        whether there was one; after the last file comes an empty one.
    """
    nothing = torch.empty(0, dtype=torch.uint8)
    any_of_it = False
    while True:
        if chunks is not None:
            chunk = next(chunks)
            parts = [chunk if peer == receiver else chunk[:1] for peer in range(clusters)]
            rail.exchange("heal", parts, "heal", source=())
        else:
            chunk = rail.exchange("heal", [nothing] * clusters, "heal", to=(), source=(donor,))[donor]
        if inbox is not None:
            inbox.take(chunk)
        if not chunk.numel():
            return any_of_it
        any_of_it = True


class _Inbox:
    """What arrives from one cluster: its manifest, and tensor files in a directory; with a progress bar."""

    def __init__(self, directory: Path, name: str, donor: int) -> None:
        self._directory = directory
        self.name = name
        self.donor = donor
        self._head = b""
        self._file: BinaryIO | None = None
        self._begun = False
        self.paths: list[Path] = []
        self._bar = tqdm(desc=f"checkpoint from {name}", unit="B", unit_scale=True, dynamic_ncols=True)

    def take(self, chunk: torch.Tensor) -> None:
        """The next piece; an empty one ends a file.

        Raises:
            OSError: it cannot be written; the message names the file.
        """
        data = chunk.numpy().tobytes()
        if not self._begun:
            self._head += data
            if not data:
                self._begun = True
                self._bar.reset(total=self.head["bytes"])
            return
        self._bar.update(len(data))
        if not data:
            self._close_file()
            return
        try:
            if self._file is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                self.paths.append(self._directory / f"{self.name}-{len(self.paths):05d}.safetensors")
                self._file = self.paths[-1].open("wb")
            self._file.write(data)
        except OSError as error:
            raise OSError(f"{self.paths[-1] if self.paths else self._directory}: {error}") from None

    @property
    def head(self) -> dict[str, Any]:
        """What the first file says."""
        found: dict[str, Any] = json.loads(self._head)
        return found

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def close(self) -> None:
        """No more comes."""
        self._close_file()
        self._bar.close()


def _together(
    inboxes: Sequence[_Inbox], own: Mapping[str, Any], batches: Sequence[int], receiver: int
) -> tuple[Manifest, list[Path]]:
    """One checkpoint of what several clusters gave; the first of them has given the trunk."""
    manifests = [Manifest.from_json(inbox.head["manifest"], f"from {inbox.name}") for inbox in inboxes]

    def merged(field: str) -> dict[str, Any]:
        return {name: value for one in manifests for name, value in getattr(one, field).items()}

    first, donor = manifests[0], inboxes[0].donor
    # As far in its data as the donor is in its own.
    consumed = (
        first.consumed * batches[receiver] // batches[donor]
        if batches[donor]
        else first.step * batches[receiver]
    )
    manifest = replace(
        first,
        sizes=merged("sizes"),
        steps=merged("steps"),
        shapes=merged("shapes"),
        consumed=consumed,
        sync=FleetSync.afresh(first.sync),
        **own,
    )
    return manifest, [path for inbox in inboxes for path in inbox.paths]

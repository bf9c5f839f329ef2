"""Checkpoints: each cluster writes its own, in its own run directory, and all or nothing of it.

A checkpoint is a directory `step-00000120` with one safetensors file per rank and a manifest. Files are written to a
temporary directory, synced, and renamed into place by the first rank after every rank is done, so that a directory with
the final name is complete. The manifest carries each file's size and hash: a truncated or altered file is refused
by name.

A tensor `weight|model.norm.weight|0` holds the canonical parameter `model.norm.weight` from element 0 on. Ranks own
disjoint ranges, so any layout can be put together from them; see `state.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from moe_fragment.placement import Placement, PlacementError
from moe_fragment.schema import ConfigError

VERSION = 1
MANIFEST = "manifest.json"
_PREFIX = "step-"


class CheckpointError(ConfigError):
    """A checkpoint that cannot be used; the message names the file."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself."""

    step: int
    cluster: str
    consumed: int
    """Sequences this cluster had taken from its data."""
    data: str
    """Fingerprint of that data."""
    placement: Placement
    model: dict[str, Any]
    """The model's transformers configuration."""
    sizes: dict[str, int]
    """Elements of every canonical parameter this cluster holds."""
    steps: dict[str, float]
    """Adam's step counts by canonical parameter."""
    shapes: dict[str, list[int]]
    """Shape of each canonical parameter."""
    sync: dict[str, Any]
    """What the sync strategy has to remember besides tensors."""

    def to_json(self) -> dict[str, Any]:
        """For the manifest file."""
        return {**self.__dict__, "placement": self.placement.to_dict()}

    @staticmethod
    def from_json(data: dict[str, Any], where: str) -> Manifest:
        """Inverse of `to_json`."""
        try:
            fields = {name: data[name] for name in Manifest.__dataclass_fields__}
            return Manifest(**{**fields, "placement": Placement.from_dict(data["placement"])})
        except (KeyError, PlacementError) as error:
            raise CheckpointError(f"{where}: not a manifest of this version: {error}") from None


def checkpoint_path(run: Path, step: int) -> Path:
    """Directory of the checkpoint after `step` steps in a cluster's run directory."""
    return run / "checkpoints" / f"{_PREFIX}{step:08d}"


def partial_path(run: Path, step: int) -> Path:
    """Where the files of a checkpoint gather until it is complete."""
    final = checkpoint_path(run, step)
    return final.with_name(f"{final.name}.partial")


def saved_steps(run: Path) -> list[int]:
    """Steps of the complete checkpoints in a cluster's run directory, oldest first."""
    return sorted(
        int(path.name.removeprefix(_PREFIX))
        for path in (run / "checkpoints").glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdigit() and (path / MANIFEST).is_file()
    )


def is_merged(run: Path, step: int) -> bool:
    """Whether nothing is left to merge at the end of the run in a checkpoint; not if its manifest cannot be read."""
    try:
        return bool(json.loads((checkpoint_path(run, step) / MANIFEST).read_text())["sync"]["ended"])
    except (OSError, ValueError, KeyError):
        return False


def save(
    run: Path,
    manifest: Manifest,
    tensors: dict[str, torch.Tensor],
    *,
    rank: int,
    gather: Callable[[Any], list[Any]],
    keep: int | None,
    protect: int | None = None,
) -> Path:
    """Write this rank's part; collective in the cluster, whose ranks share the file system of `run`.

    Checkpoints of later steps belong to a life that the run has left behind (another cluster did not have them); they
    go, so that they never count among those to keep.

    Args:
        run: the cluster's run directory.
        manifest: the same on all ranks.
        tensors: this rank's, by key.
        rank: local rank.
        gather: collects one JSON-able object per rank of the cluster.
        keep: how many checkpoints stay; None removes none.
        protect: step of a checkpoint that stays in any case: the newest that all clusters are known to have.

    Returns:
        the finished checkpoint.

    Raises:
        CheckpointError: the disk is full or not writable for any rank (all raise); earlier ones are untouched.
    """
    final = checkpoint_path(run, manifest.step)
    partial = partial_path(run, manifest.step)
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    gather(None)
    files = gather(_attempt(_write_part, partial, f"rank-{rank:05d}.safetensors", tensors))
    failed = next((file["error"] for file in files if "error" in file), None)
    if rank == 0:
        outcome = (
            {"error": failed} if failed else _attempt(_finish, run, partial, manifest, files, keep, protect)
        )
        if "error" in outcome:
            shutil.rmtree(partial, ignore_errors=True)
    else:
        outcome = {}
    failed = gather(outcome)[0].get("error")
    if failed:
        raise CheckpointError(f"{final}: cannot be written ({failed}); earlier checkpoints are untouched")
    return final


def adopt(run: Path, manifest: Manifest, parts: Sequence[Path]) -> None:
    """Complete a checkpoint from tensor files that somebody else has written into its `partial_path`.

    Raises:
        CheckpointError: a file cannot be read, or the disk is full.
    """
    files = []
    for path in parts:
        try:
            with safe_open(path, framework="pt") as opened:
                files.append({"name": path.name, **_seal(path), "tensors": sorted(opened.keys())})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from None
    outcome = _attempt(_finish, run, partial_path(run, manifest.step), manifest, files, None, None)
    if "error" in outcome:
        raise CheckpointError(
            f"{checkpoint_path(run, manifest.step)}: cannot be written ({outcome['error']})"
        )


def _attempt(act: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `act` returns, or what went wrong: a rank that raised would leave the others waiting for it."""
    try:
        return act(*arguments)
    except (OSError, SafetensorError) as error:
        return {"error": str(error)}


def _write_part(partial: Path, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    partial.mkdir(parents=True, exist_ok=True)
    # Views of flat buffers share storage; safetensors stores each by itself.
    save_file({key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}, partial / name)
    return {"name": name, **_seal(partial / name), "tensors": sorted(tensors)}


def _finish(
    run: Path,
    partial: Path,
    manifest: Manifest,
    files: list[dict[str, Any]],
    keep: int | None,
    protect: int | None,
) -> dict[str, Any]:
    final = checkpoint_path(run, manifest.step)
    text = json.dumps({"version": VERSION, "files": files, **manifest.to_json()}, indent=1)
    (partial / MANIFEST).write_text(text, encoding="utf-8")
    _sync(partial / MANIFEST)
    _sync(partial)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(final.parent)
    if keep is None:
        return {}
    steps = saved_steps(run)
    kept = [step for step in steps if step <= manifest.step][-keep:]
    for step in set(steps) - {*kept, protect}:
        shutil.rmtree(checkpoint_path(run, step), ignore_errors=True)
    return {}


class Checkpoint:
    """An open checkpoint of one cluster.

    All files are checked for their size when it is opened, and for their hash when they are first read.

    Args:
        path: its directory.

    Raises:
        CheckpointError: not there, of another version, truncated or altered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no checkpoint there") from None
        except ValueError:
            raise CheckpointError(f"{path / MANIFEST}: damaged; use an earlier checkpoint") from None
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise CheckpointError(f"{path / MANIFEST}: version {version}, expected {VERSION}")
        self.manifest = Manifest.from_json(data, str(path / MANIFEST))
        self._pieces: dict[tuple[str, str], list[tuple[int, str, str]]] = {}
        self._files: dict[str, Any] = {}
        self._hashes: dict[str, str] = {}
        for file in data.get("files", []):
            self._check_size(file)
            self._hashes[file["name"]] = file["blake2b"]
            for key in file["tensors"]:
                kind, name, offset = key.split("|")
                self._pieces.setdefault((kind, name), []).append((int(offset), file["name"], key))

    def _check_size(self, file: dict[str, Any]) -> None:
        path = self.path / file["name"]
        if not path.is_file():
            raise CheckpointError(f"{path}: missing; use an earlier checkpoint")
        size = path.stat().st_size
        if size != file["bytes"]:
            raise CheckpointError(
                f"{path}: {size} bytes, expected {file['bytes']}; use an earlier checkpoint"
            )

    def verify(self) -> None:
        """Check the hash of every file now.

        Raises:
            CheckpointError: one is damaged.
        """
        for file in self._hashes:
            self._opened(file)

    def _opened(self, file: str) -> Any:
        if file not in self._files:
            path = self.path / file
            if _hash(path) != self._hashes[file]:
                raise CheckpointError(f"{path}: damaged since it was written; use an earlier checkpoint")
            try:
                self._files[file] = safe_open(path, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{path}: {error}") from None
        return self._files[file]

    def _tensor(self, file: str, key: str) -> torch.Tensor:
        tensor: torch.Tensor = self._opened(file).get_tensor(key)
        return tensor

    def read(self, kind: str, name: str, offset: int, size: int) -> torch.Tensor:
        """Elements [offset, offset + size) of a canonical parameter's weight or moment.

        Raises:
            CheckpointError: the checkpoint does not hold them all.
        """
        result = torch.empty(size)
        filled = 0
        for start, file, key in self._pieces.get((kind, name), []):
            tensor = self._tensor(file, key)
            low, high = max(start, offset), min(start + tensor.numel(), offset + size)
            if low < high:
                result[low - offset : high - offset] = tensor[low - start : high - start]
                filled += high - low
        if filled != size:
            raise CheckpointError(f"{self.path}: holds {filled} of {size} elements of {kind} of {name}")
        return result

    def extra(self, key: str) -> torch.Tensor | None:
        """A tensor stored under a key of its own, such as a rank's random state; None if it is not there."""
        kind, name, _ = key.split("|")
        for _, file, stored in self._pieces.get((kind, name), []):
            if stored == key:
                return self._tensor(file, stored)
        return None

    @property
    def kinds(self) -> set[str]:
        """Of everything that is stored."""
        return {kind for kind, _ in self._pieces}

    def holds(self, kind: str, name: str) -> bool:
        """Whether there is anything of this kind of a parameter."""
        return (kind, name) in self._pieces

    def names(self, kind: str) -> list[str]:
        """Names stored under `kind`."""
        return sorted(name for stored, name in self._pieces if stored == kind)


def _seal(path: Path) -> dict[str, Any]:
    _sync(path)
    return {"bytes": path.stat().st_size, "blake2b": _hash(path)}


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

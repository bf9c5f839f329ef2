"""One writer per run directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from moe_fragment.schema import ConfigError

_NAME = ".lock"


class RunLock:
    """Held by the first rank of a cluster while it writes its run directory; goes with the process, even a killed one.

    Raises:
        ConfigError: another process holds it, or the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        make_directory(directory)
        try:
            self._file = os.open(directory / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _unusable(directory, error) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._file, 32).decode() or "unknown"
            os.close(self._file)
            raise ConfigError(
                f"{directory}: another run is writing here (process {holder}); wait for it, or choose another name"
            ) from None
        os.ftruncate(self._file, 0)
        os.write(self._file, str(os.getpid()).encode())

    def release(self) -> None:
        """Let another process write."""
        os.close(self._file)


def make_directory(directory: Path) -> None:
    """Create a run directory and its parents, if they are not there.

    Raises:
        ConfigError: that is not possible.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(directory, error) from None


def _unusable(directory: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{directory}: cannot be a run directory ({error.strerror}); set `out` to a directory that can be written"
    )

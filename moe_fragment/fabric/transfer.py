"""A transfer under way, and the clock that tells waits the caller felt from those it did not."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass
class WaitClock:
    """Seconds since the last `reset`: waits for other clusters that the caller felt, and those it did not."""

    exposed_s: float = 0.0
    hidden_s: float = 0.0
    local_s: float = 0.0

    def reset(self) -> WaitClock:
        """Returns what was counted and starts at zero."""
        counted = WaitClock(self.exposed_s, self.hidden_s, self.local_s)
        self.exposed_s = self.hidden_s = self.local_s = 0.0
        return counted


class Transfer(Generic[T]):
    """A running transfer; `wait()` returns its result and books the time."""

    def __init__(self, future: Future[tuple[T, float]], clock: WaitClock) -> None:
        self._future = future
        self._clock = clock

    def wait(self) -> T:
        """Block until the transfer is through; only programming errors raise."""
        called = time.monotonic()
        result, took_s = self._future.result()
        exposed_s = time.monotonic() - called
        self._clock.exposed_s += exposed_s
        self._clock.hidden_s += max(0.0, took_s - exposed_s)
        return result

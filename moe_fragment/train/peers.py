"""Who died: names the ranks of this host that are gone when a rank has to end because of them.

The deepspeed launcher ends all ranks when one dies and names a process id at best. Every rank knows the process ids of
all, so the first one that is told to end can say which rank it was that died. A thread of its own acts on the signal
(through Python's wake-up descriptor), which works while the main thread is inside a collective, and whichever thread of
the process, native ones included, the signal is delivered to. The same thread ends the rank when the `moe-fragment
launch` that wanted it is gone, killed before it could say so.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass

import psutil

LAUNCH_PID = "MOE_FRAGMENT_LAUNCH_PID"
"""Environment variable: process id of the `moe-fragment launch` on this host that wants this rank."""
_LOOK_S = 2.0


@dataclass(frozen=True)
class Peer:
    """A rank of the fleet."""

    cluster: str
    rank: int
    host: str
    pid: int

    @staticmethod
    def this(cluster: str, rank: int) -> Peer:
        """The calling process."""
        return Peer(cluster, rank, socket.gethostname(), os.getpid())

    def is_dead(self) -> bool:
        """Whether it ran on this host and is gone; False for other hosts, whose processes cannot be seen."""
        if self.host != socket.gethostname():
            return False
        try:
            return psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def __str__(self) -> str:
        return f"rank {self.rank} of cluster {self.cluster} (pid {self.pid} on {self.host})"


class PeerWatch:
    """Ends this process on SIGTERM, with a word on who died, or when its launch is gone.

    Create it in the main thread.
    """

    def __init__(self, cluster: str, rank: int) -> None:
        self.this = Peer.this(cluster, rank)
        self.peers: list[Peer] = []
        self._read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, lambda *_: None)
        threading.Thread(target=self._wait_for_signal, name="sigterm", daemon=True).start()

    def dead(self) -> list[Peer]:
        """Ranks of this host that are gone."""
        return [peer for peer in self.peers if peer.is_dead()]

    def report(self, wait_s: float = 0.0) -> None:
        """Say on standard error who is dead, if anybody is before so long."""
        deadline = time.monotonic() + wait_s
        while not (dead := self.dead()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if dead:
            names = " and ".join(map(str, dead))
            sys.stderr.write(f"moe-fragment: {names} died; {self.this} ends because of it\n")
            sys.stderr.flush()

    def _wait_for_signal(self) -> None:
        launch = int(os.environ.get(LAUNCH_PID, "0"))
        while True:
            ready, _, _ = select.select([self._read_end], [], [], _LOOK_S)
            if ready and signal.SIGTERM in os.read(self._read_end, 16):
                self.report()
                os._exit(128 + signal.SIGTERM)
            if launch and not psutil.pid_exists(launch):
                sys.stderr.write(f"moe-fragment: the launch (pid {launch}) is gone; {self.this} ends\n")
                sys.stderr.flush()
                os._exit(1)

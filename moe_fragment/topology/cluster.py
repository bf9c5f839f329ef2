"""One cluster: the machines of one DeepSpeed job, with a fast network between them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, model_validator

from moe_fragment.schema import Count, FieldError, Section


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
        raise ValueError(f"expected letters, digits, '_', '.' and '-' only, got {name!r}")
    return name


def _check_host_name(host: str) -> str:
    if not re.fullmatch(r"[^\s,=-][^\s,=]*", host):  # ssh would read a leading dash as an option
        raise ValueError(f"expected a host name or address, got {host!r}")
    return host


Name = Annotated[str, AfterValidator(_check_name)]
"""Goes into file names, environment variables and command lines, so it is kept plain."""

HostName = Annotated[str, AfterValidator(_check_host_name)]
"""As ssh takes it, ``user@`` included."""


class Host(Section):
    """A machine and how many ranks it runs."""

    host: HostName
    """Name or address that ssh reaches it under."""
    slots: Count
    """Ranks on it, usually one per accelerator."""


class Cluster(Section):
    """Ranks that reach each other fast. Either ``processes`` on this machine or ``hosts``, never both."""

    name: Name
    """Unique in the fleet."""
    processes: Count | None = None
    """Ranks started on the machine that launches."""
    hosts: tuple[Host, ...] = ()
    """Machines reached by ssh, in rank order."""
    accelerator: str = "cpu"
    """What a rank computes on: ``cpu``, or the accelerator's name in the planner's table such as ``h100``."""
    bandwidth_bytes_per_s: float | None = None
    """Between two ranks of the cluster, each way; None where nobody said."""
    one_way_s: float | None = None
    """Latency between two ranks of the cluster, one way; None where nobody said."""
    address: str = ""
    """Where other clusters reach its gateways; left empty, it becomes localhost or the first host."""

    @model_validator(mode="after")
    def _check(self) -> Cluster:
        if self.processes is not None and self.hosts:
            raise FieldError("processes", "expected either processes or hosts, got both")
        if self.processes is None and not self.hosts:
            raise FieldError(
                "processes", "expected the number of local processes (or hosts instead), got neither"
            )
        check_hosts(self.hosts)
        if not self.accelerator.strip():
            raise FieldError("accelerator", "expected a name such as 'cpu' or 'h100', got ''")
        if self.bandwidth_bytes_per_s is not None and not self.bandwidth_bytes_per_s > 0:
            raise FieldError("bandwidth", "expected a rate above zero")
        if self.one_way_s is not None and not 0 <= self.one_way_s < math.inf:
            raise FieldError("latency", "expected a finite duration of zero or more")
        if not self.address:
            address = self.hosts[0].host.rpartition("@")[2] if self.hosts else "localhost"
            object.__setattr__(self, "address", address)  # frozen from here on
        return self

    @property
    def size(self) -> int:
        """Ranks in the cluster."""
        return self.processes or sum(host.slots for host in self.hosts)

    @property
    def is_local(self) -> bool:
        """Whether its ranks run on the machine that launches."""
        return self.processes is not None


def check_hosts(hosts: Sequence[Host]) -> None:
    """No host twice: DeepSpeed would start one launcher on it per entry, with the same ports."""
    seen: set[str] = set()
    for index, host in enumerate(hosts):
        if host.host in seen:
            message = f"'{host.host}' is listed twice, give one entry with all its slots"
            raise FieldError(f"hosts[{index}].host", message)
        seen.add(host.host)

"""The YAML form of a topology, with units, and its translation to and from bytes and seconds.

clusters:
  - name: alpha
    processes: 2                # or hosts: [{host: node1, slots: 8}], or hostfile: alpha.hosts
    accelerator: h100
    bandwidth: 400 Gbit/s       # between two ranks of the cluster
    latency: {rtt: 20 us}       # or {one_way: 10 us}
    address: alpha.example      # where other clusters reach it
links:
  - between: [alpha, beta]      # both ways alike; or from: alpha, to: beta for one way
    bandwidth: 5 Gbit/s         # each way
    rtt: 30 ms                  # or one_way: 15 ms, or distance: 3000 km
    jitter: 2 ms
    loss: 0.01 %
rails: 2
coordinator: alpha.example:29400
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator

from moe_fragment.schema import Count, Distance, Duration, FieldError, Fraction, Rate, Section
from moe_fragment.topology.cluster import Cluster, Host, HostName, Name, check_hosts
from moe_fragment.topology.hostfile import HostfileError, read_hostfile
from moe_fragment.topology.link import Link, check_pairs
from moe_fragment.units import exact_duration, exact_fraction, exact_rate, fibre_delay

_BASE = "folder for relative paths"


def read(data: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The arguments of ``Topology`` in ``data``; ValidationError or FieldError if it does not say them."""
    form = _Topology.model_validate(data, context={_BASE: base})
    names = tuple(cluster.name for cluster in form.clusters)
    entries = [
        (f"links[{index}]", source, target, entry)
        for index, entry in enumerate(form.links)
        for source, target in entry.directions
    ]
    check_pairs(names, ((field, source, target) for field, source, target, _ in entries))
    return {
        "clusters": tuple(cluster.resolve() for cluster in form.clusters),
        "links": tuple(entry.resolve(source, target) for _, source, target, entry in entries),
        "rails": form.rails,
        "coordinator": form.coordinator,
    }


def write(
    clusters: Sequence[Cluster], links: Sequence[Link], rails: int | None, coordinator: str | None
) -> dict[str, Any]:
    """The YAML form; two links that are alike both ways become one ``between``."""
    form: dict[str, Any] = {"clusters": [_write_cluster(cluster) for cluster in clusters]}
    waiting = {(link.source, link.target): link for link in links}
    entries = []
    for (source, target), link in list(waiting.items()):
        if waiting.pop((source, target), None) is None:
            continue
        back = waiting.get((target, source))
        if back == link.model_copy(update={"source": target, "target": source}):
            del waiting[target, source]
            entries.append({"between": [source, target], **_write_link(link)})
        else:
            entries.append({"from": source, "to": target, **_write_link(link)})
    if entries:
        form["links"] = entries
    if rails is not None:
        form["rails"] = rails
    if coordinator is not None:
        form["coordinator"] = coordinator
    return form


def _write_cluster(cluster: Cluster) -> dict[str, Any]:
    form: dict[str, Any] = {"name": cluster.name}
    if cluster.is_local:
        form["processes"] = cluster.processes
    else:
        form["hosts"] = [{"host": host.host, "slots": host.slots} for host in cluster.hosts]
    form["accelerator"] = cluster.accelerator
    if cluster.bandwidth_bytes_per_s is not None:
        form["bandwidth"] = exact_rate(cluster.bandwidth_bytes_per_s)
    if cluster.one_way_s is not None:
        form["latency"] = {"one_way": exact_duration(cluster.one_way_s)}
    form["address"] = cluster.address
    return form


def _write_link(link: Link) -> dict[str, str]:
    form = {"bandwidth": exact_rate(link.bandwidth_bytes_per_s), "one_way": exact_duration(link.one_way_s)}
    if link.jitter_s:
        form["jitter"] = exact_duration(link.jitter_s)
    if link.loss:
        form["loss"] = exact_fraction(link.loss)
    return form


class _Latency(Section):
    one_way: Duration | None = None
    rtt: Duration | None = None

    @model_validator(mode="before")
    @classmethod
    def _says_which(cls, data: Any) -> Any:
        if isinstance(data, (str, int, float)) and not isinstance(data, bool):
            raise ValueError(
                f"expected 'one_way:' or 'rtt:' before the duration, such as {{rtt: 20 us}}, got {data!r}"
            )
        return data

    @model_validator(mode="after")
    def _one_of_them(self) -> _Latency:
        if (self.one_way is None) == (self.rtt is None):
            raise ValueError(
                "expected either one_way or rtt, got " + ("neither" if self.rtt is None else "both")
            )
        return self


class _Cluster(Section):
    name: Name
    processes: Count | None = None
    hosts: tuple[Host, ...] | None = Field(default=None, min_length=1)
    hostfile: tuple[Host, ...] | None = None
    accelerator: str = Field(default="cpu", min_length=1)
    bandwidth: Rate | None = None
    latency: _Latency | None = None
    address: HostName | None = None

    @field_validator("hostfile", mode="before")
    @classmethod
    def _read_hostfile(cls, path: Any, info: ValidationInfo) -> Any:
        if path is None:
            return None
        if not isinstance(path, str) or not path:
            raise ValueError(f"expected the path of a hostfile, got {path!r}")
        base = (info.context or {}).get(_BASE, Path())
        try:
            return read_hostfile(base / Path(path).expanduser())
        except HostfileError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _check(self) -> _Cluster:
        given = [field for field in ("processes", "hosts", "hostfile") if getattr(self, field) is not None]
        if not given:
            raise FieldError(
                "processes", "expected a number of local processes (or hosts or hostfile), got nothing"
            )
        if len(given) > 1:
            raise FieldError(
                given[1], f"expected only one of processes, hosts, hostfile, got {' and '.join(given)}"
            )
        check_hosts(self.hosts or ())
        if self.bandwidth == 0:
            raise FieldError("bandwidth", "expected a rate above zero")
        return self

    def resolve(self) -> Cluster:
        latency = self.latency
        one_way_s = None
        if latency is not None:
            one_way_s = latency.one_way if latency.rtt is None else latency.rtt / 2
        return Cluster(
            name=self.name,
            processes=self.processes,
            hosts=self.hosts or self.hostfile or (),
            accelerator=self.accelerator,
            bandwidth_bytes_per_s=self.bandwidth,
            one_way_s=one_way_s,
            address=self.address or "",
        )


class _Link(Section):
    between: tuple[str, ...] | None = None
    source: str | None = Field(default=None, alias="from")
    target: str | None = Field(default=None, alias="to")
    bandwidth: Rate
    rtt: Duration | None = None
    one_way: Duration | None = None
    distance: Distance | None = None
    jitter: Duration = 0.0
    loss: Fraction = 0.0

    @model_validator(mode="before")
    @classmethod
    def _latency_says_which(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "latency" in data:
            raise FieldError(
                "latency", "does not say round trip or one way, expected rtt, one_way or distance instead"
            )
        return data

    @model_validator(mode="after")
    def _check(self) -> _Link:
        if self.between is not None and (self.source is not None or self.target is not None):
            raise FieldError("between", "expected either between, or from and to, got both")
        if self.between is None and (self.source is None or self.target is None):
            missing = "from" if self.source is None else "to"
            if self.source is None and self.target is None:
                raise FieldError(
                    "between", "expected two clusters, such as [alpha, beta] (or from and to), got nothing"
                )
            raise FieldError(missing, "required, but not given")
        if self.between is not None and len(self.between) != 2:
            raise FieldError(
                "between", f"expected two clusters, such as [alpha, beta], got {len(self.between)}"
            )
        source, target = self.directions[0]
        if source == target:
            field = "to" if self.between is None else "between"
            raise FieldError(field, f"expected two different clusters, got '{source}' twice")
        delays = [field for field in ("rtt", "one_way", "distance") if getattr(self, field) is not None]
        if not delays:
            raise FieldError(
                "rtt", "expected a round trip such as '30 ms' (or one_way or distance), got nothing"
            )
        if len(delays) > 1:
            raise FieldError(
                delays[1], f"expected only one of rtt, one_way, distance, got {' and '.join(delays)}"
            )
        if self.bandwidth == 0:
            raise FieldError("bandwidth", "expected a rate above zero (or 'unlimited')")
        if self.loss == 1:
            raise FieldError("loss", "expected less than 100 %")
        return self

    @property
    def directions(self) -> tuple[tuple[str, str], ...]:
        """(source, target) of each direction that the entry describes."""
        if self.between is not None:
            one, other = self.between
            return (one, other), (other, one)
        assert self.source is not None
        assert self.target is not None
        return ((self.source, self.target),)

    def resolve(self, source: str, target: str) -> Link:
        if self.rtt is not None:
            one_way_s = self.rtt / 2
        elif self.one_way is not None:
            one_way_s = self.one_way
        else:
            assert self.distance is not None
            one_way_s = fibre_delay(self.distance)
        return Link(
            source=source,
            target=target,
            bandwidth_bytes_per_s=self.bandwidth,
            one_way_s=one_way_s,
            jitter_s=self.jitter,
            loss=self.loss,
        )


class _Topology(Section):
    clusters: tuple[_Cluster, ...] = Field(min_length=1)
    links: tuple[_Link, ...] = ()
    rails: Count | None = None
    coordinator: str | None = None

    @model_validator(mode="after")
    def _check(self) -> _Topology:
        seen: set[str] = set()
        for index, cluster in enumerate(self.clusters):
            if cluster.name in seen:
                raise FieldError(f"clusters[{index}].name", f"'{cluster.name}' is used twice")
            seen.add(cluster.name)
        return self

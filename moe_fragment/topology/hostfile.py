"""DeepSpeed's hostfile: one ``host slots=8`` a line, ``#`` starts a comment.

Read here and not by DeepSpeed's own reader, which takes a missing file for "this machine only".
"""

from __future__ import annotations

import re
from pathlib import Path

from moe_fragment.topology.cluster import Host

_LINE = re.compile(r"(?P<host>[^\s,=-][^\s,=]*)\s+slots=(?P<slots>0*[1-9]\d{0,5})")


class HostfileError(ValueError):
    """A hostfile that cannot be used; the message names file, line number and text."""


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a hostfile, in its order."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise HostfileError(f"{path}: no such hostfile") from None
    except (OSError, UnicodeDecodeError) as error:
        raise HostfileError(f"{path}: cannot be read ({error})") from None
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), start=1):
        entry = line.split("#", maxsplit=1)[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise HostfileError(f"{path}, line {number}: expected 'host slots=8', got '{line.strip()}'")
        if any(host.host == match["host"] for host in hosts):
            raise HostfileError(f"{path}, line {number}: host '{match['host']}' is listed twice")
        hosts.append(Host(host=match["host"], slots=int(match["slots"])))
    if not hosts:
        raise HostfileError(f"{path}: expected lines such as 'host slots=8', got none")
    return tuple(hosts)

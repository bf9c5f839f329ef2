"""What a cluster did in one step: its ranks' counters and clocks brought together for the run log."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy.typing as npt
import torch

from moe_fragment.experts import ExpertStatistics
from moe_fragment.fabric import Fabric
from moe_fragment.observe import CHANNELS
from moe_fragment.planning.bubble import bubble_fraction
from moe_fragment.sync import SyncReport
from moe_fragment.train.step import StepReport

WanBytes = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class Measurements:
    """Sums over the cluster's ranks; times are means."""

    scalars: dict[str, float]
    wan_bytes: WanBytes
    traffic_LC: npt.NDArray
    load_LE: npt.NDArray

    @property
    def remote_fraction(self) -> float:
        """Part of the (token, expert) pairs that were computed elsewhere."""
        remote, local = self.scalars["remote_pairs"], self.scalars["local_pairs"]
        return remote / (remote + local) if remote + local else 0.0

    @property
    def sent_bytes(self) -> int:
        """Payload bytes this cluster sent."""
        return sum(both["sent"] for channels in self.wan_bytes.values() for both in channels.values())


def measure(
    fabric: Fabric,
    statistics: ExpertStatistics,
    report: StepReport,
    syncs: Sequence[SyncReport],
    names: Sequence[str],
    codec_loss: tuple[float, float] = (0.0, 0.0),
    *,
    stages: int = 1,
    micro_batches: int = 1,
) -> Measurements:
    """Bring together what was measured in a step and in the syncs after it; collective over the cluster.

    Args:
        fabric, statistics, report: of this rank.
        syncs: what was merged after the step.
        names: of all clusters.
        codec_loss: of a gradient codec on this rank, see `FleetSync.codec_loss`.
        stages: of the cluster's pipeline; 1 for none.
        micro_batches: of a step.
    """
    waits = [report.step_s, report.wan_wait_s, report.wan_hidden_s, report.local_wait_s, report.sync_s]
    pairs = [
        statistics.local_pairs,
        statistics.remote_pairs,
        statistics.dropped_pairs,
        statistics.remote_rows,
    ]
    wan = torch.zeros(len(names), len(CHANNELS), 2, dtype=torch.float64)
    framing = 0
    for (peer, channel), traffic in fabric.meter.drain().items():
        framing += traffic.sent_framing
        if channel in CHANNELS:
            wan[peer, CHANNELS.index(channel)] = torch.tensor([traffic.sent, traffic.received])
        else:
            framing += traffic.sent
    own = torch.tensor([1.0, *waits, *pairs, framing, *codec_loss], dtype=torch.float64)
    times_R = _stage_times(fabric, report)
    parts = [own, wan, statistics.traffic_LC, statistics.load_LE, times_R]
    total = fabric.cluster_sum(torch.cat([part.double().reshape(-1) for part in parts]))
    sums, wan_sum, traffic, load, times = total.split([part.numel() for part in parts])
    ranks, step_s, wan_wait_s, hidden_s, local_s, sync_s, *pair_sums, rows, framing_sum, lost, given = (
        sums.tolist()
    )
    local_pairs, remote_pairs, dropped_pairs = pair_sums
    scalars = {
        "step_s": step_s / ranks,
        "compute_s": max(0.0, (step_s - wan_wait_s - local_s) / ranks),
        "local_wait_s": local_s / ranks,
        "wan_wait_s": wan_wait_s / ranks,
        "wan_hidden_s": hidden_s / ranks,
        "sync_s": sync_s / ranks,
        "remote_rows": rows,
        "local_pairs": local_pairs,
        "remote_pairs": remote_pairs,
        "dropped_pairs": dropped_pairs,
        "rows_without_dedup": remote_pairs,
        "framing_bytes": framing_sum,
        **({"codec_error": math.sqrt(lost / given)} if given else {}),
        **_of_stages(times.view(times_R.shape), stages, micro_batches),
        **_of_merges([sync for sync in syncs if sync.outcome in ("merged", "refused") and not sync.experts]),
    }
    counted = wan_sum.view(wan.shape).long().tolist()
    wan_bytes: WanBytes = {
        peer: {
            channel: {"sent": counted[index][number][0], "received": counted[index][number][1]}
            for number, channel in enumerate(CHANNELS)
        }
        for index, peer in enumerate(names)
        if index != fabric.cluster
    }
    return Measurements(
        scalars,
        wan_bytes,
        traffic.view(statistics.traffic_LC.shape).long().numpy(),
        load.view(statistics.load_LE.shape).long().numpy(),
    )


def _stage_times(fabric: Fabric, report: StepReport) -> torch.Tensor:
    """[R, 3]: busy, WAN wait and end of each rank's part of the pipeline; what is not this rank's is 0."""
    times_R = torch.zeros(fabric.local_ranks, 3, dtype=torch.float64)
    if report.stage is not None:
        own = [report.stage.busy_s, report.wan_wait_s, report.stage.until_s]
        times_R[fabric.local_rank] = torch.tensor(own, dtype=torch.float64)
    return times_R


def _of_stages(times_R: torch.Tensor, stages: int, micro_batches: int) -> dict[str, float]:
    """Bubble of a step, and what each stage waited; nothing without a pipeline.

    All ranks begin together. What a stage does not compute, or wait for tokens, until the last of them has run its last
    backward, it is idle.
    """
    if stages == 1:
        return {}
    busy_S, wan_S = (times_R[:, column].view(stages, -1).mean(1) for column in (0, 1))
    until_s = float(times_R[:, 2].max())
    return {
        "bubble": 1 - float(busy_S.mean()) / until_s if until_s else 0.0,
        "bubble_expected": bubble_fraction(stages, micro_batches),
        **{f"stage_{stage}_idle_s": until_s - float(busy) for stage, busy in enumerate(busy_S)},
        **{f"stage_{stage}_wan_wait_s": float(wan) for stage, wan in enumerate(wan_S)},
    }


def _of_merges(syncs: Sequence[SyncReport]) -> dict[str, float]:
    """Means over the trunk's merges of a step; nothing if there was none."""
    if not syncs:
        return {}
    errors = [sync.codec_error for sync in syncs if sync.codec_error is not None]
    return {
        "trunk_distance": sum(sync.distance for sync in syncs) / len(syncs),
        "trunk_cosine": sum(sync.cosine for sync in syncs) / len(syncs),
        **({"codec_error": sum(errors) / len(errors)} if errors else {}),
    }

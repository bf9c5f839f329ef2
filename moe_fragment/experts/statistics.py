"""What the expert path did in one step, by layer: counted once, in training forwards only (never in a recompute)."""

from __future__ import annotations

import torch


def in_recompute() -> bool:
    """Whether autograd is running a backward now, which is when checkpointed layers run forward again."""
    return torch._C._current_graph_task_id() != -1


class ExpertStatistics:
    """Counters of one rank for all MoE layers of a model.

    Attributes:
        traffic_LC: int64 [L, C], rows sent to each cluster; the own column counts tokens that use a local expert.
        load_LE: int64 [L, E], (token, expert) pairs of this rank's tokens by expert.
        local_pairs, remote_pairs: (token, expert) pairs computed here and elsewhere.
        dropped_pairs: pairs whose expert is elsewhere, under `exchange: local`.
        remote_rows: rows sent, one per (token, remote cluster).
    """

    def __init__(self, layers: int, clusters: int, experts: int) -> None:
        self.traffic_LC = torch.zeros(layers, clusters, dtype=torch.int64)
        self.load_LE = torch.zeros(layers, experts, dtype=torch.int64)
        self.local_pairs = 0
        self.remote_pairs = 0
        self.remote_rows = 0
        self.dropped_pairs = 0
        self.paused = False
        """Whether what runs now is not to be counted."""
        self.micro_batch = 0
        """Which of a step's micro-batches runs now."""

    def count(
        self, layer: int, *, owner_TK: torch.Tensor, ids_TK: torch.Tensor, sent_C: list[int], cluster: int
    ) -> None:
        """Count one forward of MoE layer `layer` (position among the MoE layers)."""
        if self.paused:
            return
        pairs = ids_TK.numel()
        here_TK = owner_TK == cluster
        local = int(here_TK.sum())
        self.local_pairs += local
        self.remote_pairs += pairs - local
        self.remote_rows += sum(sent_C)
        self.traffic_LC[layer] += torch.tensor(sent_C)
        self.traffic_LC[layer, cluster] += int(here_TK.any(dim=-1).sum())
        self.load_LE[layer] += torch.bincount(ids_TK.reshape(-1).cpu(), minlength=self.load_LE.shape[1])

    def count_local(self, layer: int, *, ids_TK: torch.Tensor, here_TK: torch.Tensor, cluster: int) -> None:
        """Count one forward that computes only the pairs that are `here`."""
        if self.paused:
            return
        self.local_pairs += int(here_TK.sum())
        self.dropped_pairs += int((~here_TK).sum())
        self.traffic_LC[layer, cluster] += int(here_TK.any(dim=-1).sum())
        self.load_LE[layer] += torch.bincount(ids_TK[here_TK].cpu(), minlength=self.load_LE.shape[1])

    def drain(self) -> ExpertStatistics:
        """Hand over what was counted and start at zero."""
        counted = ExpertStatistics(len(self.traffic_LC), self.traffic_LC.shape[1], self.load_LE.shape[1])
        for name in ("traffic_LC", "load_LE"):
            getattr(counted, name).copy_(getattr(self, name))
            getattr(self, name).zero_()
        for name in ("local_pairs", "remote_pairs", "remote_rows", "dropped_pairs"):
            setattr(counted, name, getattr(self, name))
            setattr(self, name, 0)
        return counted

"""What a DeepSpeed ZeRO optimizer holds on this rank, as runs of canonical parameters.

Three optimizers, three layouts: ZeRO-1 and ZeRO-2 flatten each parameter group and give every rank one slice of it; the
bf16 variant of ZeRO-1 does the same with an fp32 gradient buffer; ZeRO-3 slices every parameter by itself.
`ZeroShards` says for each of them which elements of which parameter lie where in the rank's flat fp32 buffers, and
gives access to gradients (after the boundary's backward, before `engine.step`), master weights and Adam moments. No
collective is involved; the reference it is tested against is `deepspeed.utils.safe_get_full_grad`.

A stacked expert parameter counts as one canonical parameter per expert, named `<parameter>#<global expert id>`. Experts
that are spread over the cluster's ranks are in a last flat buffer of their own, which DeepSpeed does not know of. A
rank of a pipeline sees its stage's parameters; of what two stages hold (a tied embedding) the first stage's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from moe_fragment.models.fragment import Fragmented
from moe_fragment.train.cluster_engine import ClusterEngine
from moe_fragment.train.local_experts import LocalExperts

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """A range of one canonical parameter in one flat buffer."""

    name: str
    offset: int
    """First element within the canonical parameter."""
    size: int
    flat: int
    position: int


def expert_name(parameter: str, expert: int) -> str:
    """Canonical name of one expert's part of a stacked parameter."""
    return f"{parameter}#{expert}"


def is_expert(name: str) -> bool:
    """Whether a canonical name is an expert's."""
    return "#" in name


class ZeroShards:
    """View of a DeepSpeed engine's optimizer; see the module docstring.

    Args:
        engine: from `build_engine`, ZeRO stage 1, 2 or 3, a torch Adam optimizer.
        fragmented: tells trunk from experts.
        gather: collects one object per rank of the cluster.

    Raises:
        ValueError: a trainable parameter is in no optimizer group (it would never be trained).
    """

    def __init__(
        self, engine: ClusterEngine, fragmented: Fragmented, gather: Callable[[Any], list[Any]]
    ) -> None:
        self.engine = engine
        self._local = engine.local_experts
        self.zero = engine.deepspeed.optimizer
        self._fragmented = fragmented
        self._names = {id(parameter): name for name, parameter in engine.module.named_parameters()}
        self._kind = _kind_of(engine.deepspeed)
        self.canonical_sizes: dict[str, int] = {}
        """Elements of every canonical parameter of the cluster, on whatever rank."""
        self.shards: list[Shard] = []
        self.mirrors: list[Shard] = []
        """Copies of what another stage's shards are about."""
        seen: set[int] = set()
        for flat, (parameter, offset, size, position) in self._layout():
            seen.add(id(parameter))
            self._add(self._names[id(parameter)], _numel(parameter), flat, offset, size, position, parameter)
        if self._local is not None:
            self._add_local(self._local)
        missing = [
            name
            for name, parameter in engine.module.named_parameters()
            if parameter.requires_grad and id(parameter) not in seen
        ]
        if missing:
            raise ValueError(
                f"{missing[0]} is trainable but in no optimizer group; it would never be updated"
            )
        everywhere = {name: size for sizes in gather(self.canonical_sizes) for name, size in sizes.items()}
        self.canonical_sizes = dict(sorted(everywhere.items()))

    def _layout(self) -> Iterator[tuple[int, tuple[Any, int, int, int]]]:
        """(flat index, (parameter, offset in parameter, elements held, position in flat buffer))."""
        zero = self.zero
        if self._kind == "zero3":
            for flat, group in enumerate(zero.fp16_groups):
                position = 0
                for parameter in group:
                    held = parameter.partition_numel()
                    offset = min(held * zero._get_param_partition_rank(parameter), parameter.ds_numel)
                    size = min(held, parameter.ds_numel - offset)
                    yield flat, (parameter, offset, size, position)
                    position += held
            return
        groups = zero.bf16_groups if self._kind == "bf16" else zero.round_robin_bit16_groups
        for flat, group in enumerate(groups):
            rank = torch.distributed.get_rank(zero.real_dp_process_group[flat])
            held = self._zero_masters()[flat].numel()
            low, high = rank * held, (rank + 1) * held
            starts = _starts(group) if self._kind == "bf16" else zero.round_robin_bit16_offsets[flat]
            for parameter, start in zip(group, starts, strict=True):
                first, last = max(low, start), min(high, start + parameter.numel())
                size = max(0, last - first)
                yield flat, (parameter, first - start if size else 0, size, first - low if size else 0)

    def _add(
        self, name: str, numel: int, flat: int, offset: int, size: int, position: int, parameter: Any
    ) -> None:
        experts = self._fragmented.expert_ids(name)
        if experts is None:
            self.canonical_sizes[name] = numel
            if size:
                shards = self.mirrors if name in self.engine.mirrored else self.shards
                shards.append(Shard(name, offset, size, flat, position))
            return
        per_expert = numel // len(experts)
        for slot, expert in enumerate(experts):
            canonical = expert_name(name, expert)
            self.canonical_sizes[canonical] = per_expert
            first = max(offset, slot * per_expert)
            last = min(offset + size, (slot + 1) * per_expert)
            if first < last:
                at = position + first - offset
                self.shards.append(Shard(canonical, first - slot * per_expert, last - first, flat, at))

    def _add_local(self, local: LocalExperts) -> None:
        placement, cluster = self._fragmented.placement, self._fragmented.cluster
        for name, layer, parameter in self._fragmented.stacked():
            if parameter.requires_grad:
                for expert in placement.experts_of(layer.index, cluster):
                    self.canonical_sizes[expert_name(name, expert)] = parameter.shape[1:].numel()
        flat = self.num_zero_flats
        for name, experts, size, start in local.layout():
            for slot, expert in enumerate(experts):
                self.shards.append(Shard(expert_name(name, expert), 0, size, flat, start + slot * size))

    @property
    def num_zero_flats(self) -> int:
        """How many flat buffers, the first ones, are DeepSpeed's, with gradients that are averages over the cluster."""
        return len(self._zero_masters())

    def sizes(self, *, experts: bool) -> dict[str, int]:
        """Elements of each canonical parameter, experts' or the trunk's."""
        return {name: size for name, size in self.canonical_sizes.items() if is_expert(name) == experts}

    def masters(self) -> list[torch.Tensor]:
        """Flat fp32 master weights of this rank."""
        return [*self._zero_masters(), *([self._local.master] if self._local is not None else [])]

    def _zero_masters(self) -> list[torch.Tensor]:
        held: list[torch.Tensor] = {
            "flat": lambda: self.zero.single_partition_of_fp32_groups,
            "bf16": lambda: self.zero.fp32_groups_flat_partition,
            "zero3": lambda: self.zero.fp32_partitioned_groups_flat,
        }[self._kind]()
        return held

    def gradients(self) -> list[torch.Tensor]:
        """Flat fp32 gradients; valid after the boundary's backward. See `num_zero_flats`."""
        return [*self._zero_gradients(), *([self._local.gradient] if self._local is not None else [])]

    def _zero_gradients(self) -> list[torch.Tensor]:
        if self._kind == "bf16":
            return list(self.zero.fp32_groups_gradient_flat_partition)
        averaged = self.zero.averaged_gradients
        flats = []
        for flat, master in enumerate(self._zero_masters()):
            parts = [part.reshape(-1).to(master.dtype) for part in averaged[flat]]
            gradient = torch.cat(parts)
            if gradient.numel() != master.numel():
                raise RuntimeError(
                    f"gradient buffer {flat} has {gradient.numel()} elements of {master.numel()}"
                )
            flats.append(gradient)
        return flats

    def set_gradients(self, flats: list[torch.Tensor]) -> None:
        """Give the optimizers these flat gradients for their next step."""
        if self._local is not None:
            *flats, own = flats
            if own is not self._local.gradient:
                self._local.gradient.copy_(own)
        if self._kind == "bf16":
            for held, flat in zip(self.zero.fp32_groups_gradient_flat_partition, flats, strict=True):
                if held is not flat:
                    held.copy_(flat)
            return
        for index, flat in enumerate(flats):
            self.zero.averaged_gradients[index] = [flat]

    def discard_step(self) -> None:
        """Forget the gradients of all micro-batches since the last step, as if they had not been run."""
        engine = self.engine.deepspeed
        self.zero.zero_grad()
        if self._local is not None:
            self._local.gradient.zero_()
        if self._kind == "bf16":
            self.zero.clear_hp_grads()
        else:
            for index in range(self.num_zero_flats):
                self.zero.averaged_gradients[index] = None
        if self._kind == "flat":
            for index in range(self.num_zero_flats):
                self.zero.all_grad_tensors[index] = None
        engine.micro_steps -= engine.micro_steps % self.engine.accumulation

    def set_learning_rate(self, rate: float) -> None:
        """For the next step, on all groups."""
        for optimizer in (self.zero.optimizer, *([self._local.optimizer] if self._local is not None else [])):
            for group in optimizer.param_groups:
                group["lr"] = rate

    def step(self) -> None:
        """Update all weights by the gradients that are set."""
        self.engine.step()
        if self._local is not None:
            self._local.step()

    def moments(self, flat: int) -> Mapping[str, torch.Tensor]:
        """Adam's flat moments and step count of one buffer; empty before the first step."""
        found: Mapping[str, torch.Tensor] = self._optimizer(flat).state.get(self._state_key(flat), {})
        return found

    def set_moments(self, flat: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Replace Adam's state of one buffer."""
        self._optimizer(flat).state[self._state_key(flat)] = dict(moments)

    def _optimizer(self, flat: int) -> Any:
        return (
            self._local.optimizer
            if self._local is not None and flat == self.num_zero_flats
            else self.zero.optimizer
        )

    def _state_key(self, flat: int) -> torch.Tensor:
        return self.masters()[flat]

    @torch.no_grad()
    def publish_masters(self) -> None:
        """Make the model's (working precision) parameters follow the master weights; collective in the cluster."""
        if self._local is not None:
            self._local.publish()
        if self._kind != "zero3":
            self.zero.update_lp_params()
            return
        for index in range(self.num_zero_flats):
            self.zero._reassign_or_swap_out_partitioned_parameters(index)
        if self.zero.persistent_parameters:  # those that are not partitioned between steps: small ones
            self.zero.persistent_parameters[0].partition(self.zero.persistent_parameters)
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)


def _kind_of(engine: Any) -> str:
    stage = engine.zero_optimization_stage()
    if stage == 3:
        return "zero3"
    if stage not in (1, 2):
        raise ValueError(f"ZeRO stage {stage} is not supported here, use 1, 2 or 3")
    return "bf16" if hasattr(engine.optimizer, "fp32_groups_gradient_flat_partition") else "flat"


def _numel(parameter: Any) -> int:
    return getattr(parameter, "ds_numel", None) or parameter.numel()


def _starts(group: list[torch.Tensor]) -> list[int]:
    starts, at = [], 0
    for parameter in group:
        starts.append(at)
        at += parameter.numel()
    return starts

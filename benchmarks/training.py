"""Fragmented training against plain DeepSpeed data parallel: same ranks, batch, stock model, optimizer and loss.

Plain data parallel is stock `deepspeed.initialize` over all ranks, every expert on every rank, transformers' grouped
matmul. Fragmented is this package with even placement, links as fast as the machine (nothing emulated). The two sides
are separate groups of processes that take turns of a few steps; figures are medians over turns. The first turn is
dropped. Both sides see the same batches from the same weights, and the largest difference of their losses is printed:
they do the same training.

CPU only: all ranks share this machine's cores, so a ratio compares work per step, not what a cluster would do.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import fleet
from benchmarks.fleet import Rank, Wiring, say

VOCABULARY = 256
LEARNING_RATE = 1e-3
CLIP_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table. `sequences` is per rank and step."""

    sizes: tuple[int, ...]
    stage: int
    hidden: int
    experts: int
    top_k: int
    layers: int = 2
    sequence: int = 256
    sequences: int = 2

    @property
    def ranks(self) -> int:
        """Of the whole fleet."""
        return sum(self.sizes)

    @property
    def tokens(self) -> int:
        """Per step, of the whole fleet."""
        return self.ranks * self.sequences * self.sequence


FLEETS = {"2x1": (1, 1), "2x2": (2, 2)}
MODELS = {"64/8": (64, 8, 2), "64/32": (64, 32, 8), "256/8": (256, 8, 2), "256/32": (256, 32, 8)}
"""Hidden size / experts to hidden size, experts, experts per token."""


def cases(fleets: list[str], stages: list[int], models: list[str]) -> list[Case]:
    """All combinations, without ZeRO-3 where a cluster has one rank (nothing to partition)."""
    return [
        Case(sizes=FLEETS[name], stage=stage, hidden=hidden, experts=experts, top_k=top_k)
        for name in fleets
        for stage in stages
        for hidden, experts, top_k in (MODELS[model] for model in models)
        if stage != 3 or max(FLEETS[name]) > 1
    ]


# -- what runs on the ranks ------------------------------------------------------------------------------------------


def stock_model(case: Case) -> Any:
    """A stock Qwen3-MoE with all its experts, the same on every rank."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=case.hidden,
        intermediate_size=2 * case.hidden,
        moe_intermediate_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.hidden // 32,
        num_key_value_heads=case.hidden // 32,
        head_dim=32,
        num_experts=case.experts,
        num_experts_per_tok=case.top_k,
        norm_topk_prob=True,
        router_aux_loss_coef=0.001,
    )
    config._experts_implementation = "grouped_mm"
    return Qwen3MoeForCausalLM(config)


def batch_of(case: Case, step: int, place: int) -> Any:
    """Random tokens of rank `place` (among all ranks of the fleet) in `step`."""
    import torch

    from moe_fragment.train.loss import Batch

    generator = torch.Generator().manual_seed(1000 * step + place)
    shape = (case.sequences, case.sequence + 1)
    return Batch.of(torch.randint(0, VOCABULARY, shape, generator=generator), 0)


def build_fragmented(
    rank: Rank,
    case: Case,
    *,
    expert_parallel: bool = False,
    stages: int = 1,
    micro_batches: int = 1,
    partition: str | list[int] = "parameters",
) -> int:
    """Model, engine and stepper of this package; returns the parameters of the whole model.

    Args:
        rank: this one.
        case: what is trained.
        expert_parallel: each rank holds some of its cluster's experts, not all of them.
        stages: of each cluster's pipeline.
        micro_batches: of a step.
        partition: how many layers each stage has, or how they are cut.
    """
    from moe_fragment.placement import place_experts
    from moe_fragment.train.deepspeed_config import load_deepspeed_config
    from moe_fragment.train.engine import build_engine
    from moe_fragment.train.step import Stepper

    rank.keep |= {"before": fleet.memory_bytes("VmRSS"), "stages": stages, "micro_batches": micro_batches}
    model = stock_model(case)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    placement = place_experts(
        rank.topology, num_experts=case.experts, layers=range(case.layers), policy="even"
    )
    config = load_deepspeed_config(Path(f"ds_configs/zero{case.stage}-fp32.json"))
    engine = build_engine(
        model,
        placement,
        rank.fabric,
        {**config, "pipeline": {"stages": stages, "partition": partition}},
        shares=[1.0] * case.sizes[rank.cluster] if expert_parallel else None,
        accumulation=micro_batches,
        learning_rate=LEARNING_RATE,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.1,
    )
    rank.keep["stepper"] = Stepper(engine, rank.fabric, expected_tokens=case.tokens, clip_norm=CLIP_NORM)
    fleet.forget_peak()
    return parameters


def batches_of(rank: Rank, case: Case, step: int) -> list[Any]:
    """Micro-batches of a rank: its own sequences, or all of the cluster's, which a pipeline's stages run together."""
    import torch

    from moe_fragment.train.loss import Batch

    first = rank.place - rank.local_rank
    places = range(first, first + case.sizes[rank.cluster]) if rank.keep["stages"] > 1 else [rank.place]
    whole = [batch_of(case, step, place) for place in places]
    inputs, labels = (
        [sequence for batch in whole for sequence in getattr(batch, name)] for name in ("input_ids", "labels")
    )
    size = len(inputs) // rank.keep["micro_batches"]
    return [
        Batch(torch.stack(inputs[at : at + size]), torch.stack(labels[at : at + size]))
        for at in range(0, len(inputs), size)
    ]


def build_plain(rank: Rank, case: Case) -> int:
    """Stock DeepSpeed data parallel over all ranks; returns the parameters of the model."""
    import deepspeed
    import torch

    rank.keep["before"] = fleet.memory_bytes("VmRSS")
    model = stock_model(case)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    named = sorted(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]
    config = {
        "zero_optimization": {"stage": case.stage},
        "steps_per_print": 10**9,
        "train_micro_batch_size_per_gpu": case.sequences,
        "gradient_clipping": CLIP_NORM,
    }
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.99), eps=1e-8)
    rank.keep["engine"], *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    fleet.forget_peak()
    return parameters


def turn_fragmented(rank: Rank, case: Case, first: int, steps: int) -> dict[str, Any]:
    """Some steps of this package."""
    from moe_fragment.fabric import OK

    rank.fabric.meter.drain()
    reports = []
    clock = Clock()
    for step in range(first, first + steps):
        batches = batches_of(rank, case, step)
        reports.append(rank.keep["stepper"].step(step, batches, learning_rate=LEARNING_RATE))
    answer = clock.read(steps)
    assert all(report.outcome == OK for report in reports), reports[-1].reason
    rank.keep["stepper"].statistics.drain()
    sent = {}
    for (_, channel), traffic in rank.fabric.meter.drain().items():
        total = traffic.sent + traffic.sent_framing
        sent[channel] = sent.get(channel, 0) + total / steps
    return answer | {
        "losses": [report.loss for report in reports],
        "sent_bytes": sent,
        "wan_wait_s": sum(report.wan_wait_s for report in reports) / steps,
        "peak_bytes": fleet.memory_bytes("VmHWM") - rank.keep["before"],
    }


def turn_plain(rank: Rank, case: Case, first: int, steps: int) -> dict[str, Any]:
    """Some steps of plain data parallel."""
    import torch.distributed as dist

    from moe_fragment.train.loss import micro_batch_losses

    engine = rank.keep["engine"]
    engine.train()
    losses = []
    clock = Clock()
    for step in range(first, first + steps):
        found = micro_batch_losses(engine, batch_of(case, step, rank.place))
        engine.backward(found.total / found.tokens)
        engine.step()
        losses.append(found.cross_entropy / found.tokens)
        dist.all_reduce(losses[-1])
    answer = clock.read(steps)
    return answer | {
        "losses": [float(loss) / dist.get_world_size() for loss in losses],
        "peak_bytes": fleet.memory_bytes("VmHWM") - rank.keep["before"],
    }


class Clock:
    """Wall and CPU seconds per step of this process since construction."""

    def __init__(self) -> None:
        self.wall_s, self.cpu_s = time.perf_counter(), time.process_time()

    def read(self, steps: int) -> dict[str, float]:
        """Seconds per step."""
        return {
            "wall_s": (time.perf_counter() - self.wall_s) / steps,
            "cpu_s": (time.process_time() - self.cpu_s) / steps,
        }


# -- driving and reporting -------------------------------------------------------------------------------------------


def measure(case: Case, turns: int, steps: int) -> dict[str, Any]:
    """One row: start both sides, let them take turns, compare."""
    wirings = Wiring(sizes=case.sizes), Wiring(sizes=(case.ranks,), fabric=False)
    with fleet.start(*wirings) as (fragmented, plain):
        parameters = fragmented.run(build_fragmented, case)[0]
        plain.run(build_plain, case)
        ours, theirs = [], []
        for turn in range(turns + 1):
            ours.append(fragmented.run(turn_fragmented, case, turn * steps, steps))
            theirs.append(plain.run(turn_plain, case, turn * steps, steps))
    gap = max(
        abs(a - b)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one[0]["losses"], other[0]["losses"], strict=True)
    )
    row: dict[str, Any] = asdict(case) | {
        "fleet": "x".join(map(str, (len(case.sizes), case.sizes[0]))),
        "parameters": parameters,
        "loss_gap": gap,
    }
    ours, theirs = ours[1:], theirs[1:]
    wall = {side: [max(r["wall_s"] for r in turn) for turn in got] for side, got in sides(ours, theirs)}
    cpu = {side: [sum(r["cpu_s"] for r in turn) for turn in got] for side, got in sides(ours, theirs)}
    for side, got in sides(ours, theirs):
        row[f"{side}_step_s"] = statistics.median(wall[side])
        row[f"{side}_tokens_per_s"] = case.tokens / row[f"{side}_step_s"]
        row[f"{side}_peak_bytes"] = max(answer["peak_bytes"] for answer in got[-1])
    row["speed_ratio"] = fleet.median_ratio(wall["plain"], wall["fragmented"])
    row["cpu_ratio"] = fleet.median_ratio(cpu["fragmented"], cpu["plain"])
    row["memory_ratio"] = row["fragmented_peak_bytes"] / row["plain_peak_bytes"]
    row["wan_wait_s"] = statistics.median(max(r["wan_wait_s"] for r in turn) for turn in ours)
    row["wan_bytes"] = wan_bytes(case, ours)
    row["fragmented_bytes"] = sum(row["wan_bytes"].values())
    row["plain_bytes"] = plain_bytes(case, parameters)
    row["bytes_ratio"] = row["fragmented_bytes"] / row["plain_bytes"]
    return row


def sides(ours: list[Any], theirs: list[Any]) -> list[tuple[str, list[Any]]]:
    """Both sides by name."""
    return [("fragmented", ours), ("plain", theirs)]


def wan_bytes(case: Case, turns: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Bytes per step by channel that leave the cluster which sends most: measured, frames and counts included."""
    clusters = [c for c, size in enumerate(case.sizes) for _ in range(size)]
    per_cluster: list[dict[str, float]] = [{} for _ in case.sizes]
    for turn in turns:
        for cluster, answer in zip(clusters, turn, strict=True):
            for channel, sent in answer["sent_bytes"].items():
                counts = per_cluster[cluster]
                counts[channel] = counts.get(channel, 0.0) + sent / len(turns)
    return max(per_cluster, key=lambda counts: sum(counts.values()))


def plain_bytes(case: Case, parameters: int) -> float:
    """Bytes per step that must leave each cluster under plain data parallel, at best (hierarchical collectives).

    ZeRO-1 reduce-scatters fp32 gradients and all-gathers parameters, ZeRO-3 gathers parameters twice. Each of these
    sends (C - 1) / C of the model out of a cluster.
    """
    collectives = 3 if case.stage == 3 else 2
    return collectives * (len(case.sizes) - 1) / len(case.sizes) * parameters * 4


COLUMNS = {
    "fleet": "{fleet}",
    "ZeRO": "{stage}",
    "hidden / experts / top-k": "{hidden} / {experts} / {top_k}",
    "parameters": "{parameters:,}",
    "tokens/s fragmented": "{fragmented_tokens_per_s:,.0f}",
    "tokens/s plain": "{plain_tokens_per_s:,.0f}",
    "**speed ratio**": "**{speed_ratio:.2f}**",
    "CPU time ratio": "{cpu_ratio:.2f}",
    "peak MB per rank": "{fragmented_mb:,.0f} / {plain_mb:,.0f}",
    "**memory ratio**": "**{memory_ratio:.2f}**",
    "WAN MB per step": "{fragmented_wan_mb:.2f} / {plain_wan_mb:.2f}",
    "**bytes ratio**": "**{bytes_ratio:.2f}**",
    "loss gap": "{loss_gap:.0e}",
}


def render(rows: list[dict[str, Any]]) -> str:
    """The table for people; pairs are fragmented / plain."""
    scaled = [
        row
        | {f"{side}_mb": row[f"{side}_peak_bytes"] / 1e6 for side in ("fragmented", "plain")}
        | {f"{side}_wan_mb": row[f"{side}_bytes"] / 1e6 for side in ("fragmented", "plain")}
        for row in rows
    ]
    return fleet.table(COLUMNS, scaled)


def main() -> None:
    """Command line."""
    parser = fleet.command_line(
        "training",
        __doc__,
        """  speed ratio   tokens per second, fragmented over plain (above 1: fragmented is faster)
  CPU ratio     CPU seconds of all ranks per step, fragmented over plain; hardly disturbed by other jobs
  peak MB       largest resident memory of a rank above what it had before the model was built
  WAN MB        bytes that leave a cluster per step: measured for fragmented, for plain data parallel the least
                possible (every collective hierarchical), from the number of parameters
  loss gap      largest difference between the two sides' losses of a step, in nats""",
    )
    parser.add_argument("--fleets", nargs="+", choices=FLEETS, default=list(FLEETS), help="clusters x ranks")
    parser.add_argument("--stages", nargs="+", type=int, choices=(1, 3), default=[1, 3], help="ZeRO stages")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="hidden size / experts (top-2 or 8)"
    )
    parser.add_argument("--turns", type=int, default=6, help="turns per side and row that count (6)")
    parser.add_argument("--steps", type=int, default=2, help="steps per turn (2)")
    options = parser.parse_args()
    rows = []
    for case in cases(options.fleets, options.stages, options.models):
        say(f"training: {case}")
        rows.append(measure(case, options.turns, options.steps))
        say(f"  speed {rows[-1]['speed_ratio']:.2f}, memory {rows[-1]['memory_ratio']:.2f}")
    fleet.answer("training", {"rows": rows}, render(rows), as_json=options.json)


if __name__ == "__main__":
    main()

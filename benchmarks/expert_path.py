"""One MoE layer, forward and backward, three ways on two clusters of one rank each.

* `cross_cluster`: this package. One row per (token, remote cluster) goes out, one weighted sum per row comes back.
* `pairs`: one row per (token, expert) goes out and comes back, weights applied by the sender, as most expert-parallel
  systems do it. Built here from the same fabric, with the same overlap (`benchmarks/pairs.py`).
* `local`: transformers' grouped matmul with all experts on the rank; nothing crosses. Same tokens, same arithmetic
  altogether: each rank computes about as many (token, expert) pairs in all three ways.

The three take turns in the same processes; figures are medians over turns. Outputs and gradients are compared before
anything is timed. A second pair of processes repeats it over emulated links and says how much of the exchange was
hidden behind computation.

CPU only: both ranks share this machine's cores, so a ratio compares work, not what a GPU would do.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import fleet, pairs
from benchmarks.fleet import Rank, Wiring, say

WAYS = ("cross_cluster", "pairs", "local")
TOLERANCE = 1e-5
"""Largest relative L2 distance between the ways' outputs and gradients, fp32."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    experts: int
    top_k: int
    tokens: int
    hidden: int
    width: int
    dtype: str


# -- what runs on the ranks ------------------------------------------------------------------------------------------


def build(rank: Rank, case: Case) -> dict[str, float]:
    """The layer three times over equal weights, and one batch of tokens; returns how far the ways are apart."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from moe_fragment.experts import LayerPlacement
    from moe_fragment.models.fragment import expert_layers, fragment
    from moe_fragment.placement import place_experts

    assert rank.fabric is not None
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        hidden_size=case.hidden,
        moe_intermediate_size=case.width,
        num_experts=case.experts,
        num_experts_per_tok=case.top_k,
    )
    model = Qwen3MoeForCausalLM(config).to(dtype)
    whole = copy.deepcopy(expert_layers(model)[0].module)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=case.hidden**-0.5)
    expert_layers(model)[0].module.load_state_dict(whole.state_dict())
    placement = place_experts(rank.topology, num_experts=case.experts, layers=[0], policy="even")
    part = fragment(model, placement, rank.fabric).fragmented.layers[0].module

    generator = torch.Generator().manual_seed(rank.place)
    scores = torch.rand(case.tokens, case.experts, generator=generator)
    weights, ids = scores.topk(case.top_k)
    rank.keep.update(
        whole=whole.train(),
        part=part.train(),
        tables=LayerPlacement.of(placement, 0, rank.cluster, rank.fabric.near),
        hidden=torch.randn(case.tokens, case.hidden, generator=generator).to(dtype).requires_grad_(),
        ids=ids,
        weights=(weights / weights.sum(1, keepdim=True)).to(dtype).requires_grad_(),
        gradient=torch.randn(case.tokens, case.hidden, generator=generator).to(dtype),
    )
    rank.keep["step"] = rank.keep.get("step", -1) + 1
    rank.fabric.begin_step(rank.keep["step"])
    owned = list(placement.experts_of(0, rank.cluster))
    found = {}
    for way in WAYS[:2]:
        found[way] = results(rank, way) + [parameter.grad.float() for parameter in part.parameters()]
    found["local"] = results(rank, "local")
    for parameter in whole.parameters():
        found["local"].append(rank.fabric.fleet_sum(parameter.grad.float())[owned])
    return {way: apart(found[way], found["local"]) for way in WAYS[:2]}


def results(rank: Rank, way: str) -> list[Any]:
    """Output and gradients of tokens and routing weights, one way."""
    output = forward_backward(rank, way)
    return [output.detach(), rank.keep["hidden"].grad, rank.keep["weights"].grad]


def forward_backward(rank: Rank, way: str) -> Any:
    """One way, from cleared gradients; returns the output."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from moe_fragment.experts.interface import LOCAL_IMPLEMENTATION, cross_cluster_experts_forward

    keep = rank.keep
    for module in (keep["whole"], keep["part"]):
        module.zero_grad()
    keep["hidden"].grad = keep["weights"].grad = None
    inputs = keep["hidden"], keep["ids"], keep["weights"]
    if way == "local":
        output = ALL_EXPERTS_FUNCTIONS[LOCAL_IMPLEMENTATION](keep["whole"], *inputs)
    elif way == "pairs":
        output = pairs.experts_forward(keep["part"], rank.fabric, keep["tables"], *inputs)
    else:
        output = cross_cluster_experts_forward(keep["part"], *inputs)
    output.backward(keep["gradient"])
    return output


def apart(found: list[Any], expected: list[Any]) -> float:
    """Largest relative L2 distance."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


def time_once(rank: Rank, way: str) -> dict[str, Any]:
    """One forward and backward: seconds, waits and bytes sent by channel."""
    import torch

    assert rank.fabric is not None
    rank.fabric.fleet_sum(torch.zeros(1))  # start together
    rank.fabric.meter.drain()
    rank.fabric.clock.reset()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    forward_backward(rank, way)
    answer = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}
    clock = rank.fabric.clock.reset()
    sent = {key[1]: value for key, value in rank.fabric.meter.drain().items() if key[1] != "control"}
    return answer | {
        "exposed_s": clock.exposed_s,
        "hidden_s": clock.hidden_s,
        "payload_bytes": sum(traffic.sent for traffic in sent.values()),
        "framing_bytes": sum(traffic.sent_framing for traffic in sent.values()),
    }


# -- driving and reporting -------------------------------------------------------------------------------------------


def measure(group: fleet.Group, case: Case, turns: int) -> dict[str, Any]:
    """One row."""
    distances = group.run(build, case)
    worst = max(max(found.values()) for found in distances)
    if case.dtype == "float32" and worst > TOLERANCE:
        raise RuntimeError(f"the three ways do not agree: {distances}")
    got: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    for turn in range(turns + 1):
        for way in WAYS:
            answers = group.run(time_once, way)
            if turn:
                got[way].append(answers)
    row: dict[str, Any] = asdict(case) | {"distance": worst, "ways": {}}
    wall = {way: [max(r["wall_s"] for r in turn) for turn in got[way]] for way in WAYS}
    cpu = {way: [sum(r["cpu_s"] for r in turn) for turn in got[way]] for way in WAYS}
    for way in WAYS:
        middle = {
            name: statistics.median(max(r[name] for r in turn) for turn in got[way])
            for name in ("wall_s", "exposed_s", "hidden_s", "payload_bytes", "framing_bytes")
        }
        transfer_s = middle["exposed_s"] + middle["hidden_s"]
        middle["hidden_fraction"] = middle["hidden_s"] / transfer_s if transfer_s else 0.0
        row["ways"][way] = middle
    for other in ("local", "pairs"):
        row[f"time_over_{other}"] = fleet.median_ratio(wall["cross_cluster"], wall[other])
        row[f"cpu_over_{other}"] = fleet.median_ratio(cpu["cross_cluster"], cpu[other])
    row["bytes_over_pairs"] = (
        row["ways"]["cross_cluster"]["payload_bytes"] / row["ways"]["pairs"]["payload_bytes"]
    )
    return row


PLAIN_COLUMNS = {
    "E / K / T": "{experts} / {top_k} / {tokens}",
    "ms cross_cluster": "{cross_ms:.0f}",
    "ms pairs": "{pairs_ms:.0f}",
    "ms local": "{local_ms:.0f}",
    "**time / pairs**": "**{time_over_pairs:.2f}**",
    "**time / local**": "**{time_over_local:.2f}**",
    "CPU / pairs": "{cpu_over_pairs:.2f}",
    "CPU / local": "{cpu_over_local:.2f}",
    "MB cross_cluster": "{cross_mb:.2f}",
    "MB pairs": "{pairs_mb:.2f}",
    "**bytes / pairs**": "**{bytes_over_pairs:.2f}**",
    "framing": "{framing:.1e}",
}
EMULATED_COLUMNS = {
    "E / K / T": "{experts} / {top_k} / {tokens}",
    "ms cross_cluster": "{cross_ms:.0f}",
    "exposed / hidden ms": "{cross_exposed:.0f} / {cross_hidden:.0f}",
    "hidden": "{cross_fraction:.0%}",
    "ms pairs": "{pairs_ms:.0f}",
    "exposed / hidden ms ": "{pairs_exposed:.0f} / {pairs_hidden:.0f}",
    "hidden ": "{pairs_fraction:.0%}",
    "ms local": "{local_ms:.0f}",
    "**time / pairs**": "**{time_over_pairs:.2f}**",
    "**time / local**": "**{time_over_local:.2f}**",
}


def render(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """One table for people; times are of one forward and backward, bytes are sent by one rank."""
    flat = []
    for row in rows:
        values = dict(row)
        for short, way in (("cross", "cross_cluster"), ("pairs", "pairs"), ("local", "local")):
            found = row["ways"][way]
            values |= {
                f"{short}_ms": found["wall_s"] * 1e3,
                f"{short}_mb": found["payload_bytes"] / 1e6,
                f"{short}_exposed": found["exposed_s"] * 1e3,
                f"{short}_hidden": found["hidden_s"] * 1e3,
                f"{short}_fraction": found["hidden_fraction"],
            }
        cross = row["ways"]["cross_cluster"]
        values["framing"] = cross["framing_bytes"] / cross["payload_bytes"]
        flat.append(values)
    return fleet.table(columns, flat)


def main() -> None:
    """Command line."""
    parser = fleet.command_line(
        "expert_path",
        __doc__,
        """  E / K / T       experts of the layer, experts per token, tokens per rank
  time / pairs    seconds of cross_cluster over those of the other way, turn by turn (below 1: faster)
  CPU / pairs     the same for CPU seconds of both ranks; hardly disturbed by other jobs
  MB, bytes       payload one rank sends in forward and backward, as the fabric counts it
  framing         frames and row counts over payload
  hidden          share of the transfers' time during which the caller computed""",
    )
    parser.add_argument(
        "--experts", nargs="+", default=["8:2", "64:8", "128:8"], metavar="E:K", help="(8:2 64:8 128:8)"
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048], help="per rank (512 2048)")
    parser.add_argument("--hidden", type=int, default=256, help="model width (256)")
    parser.add_argument("--width", type=int, default=256, help="expert width (256)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(float32)")
    parser.add_argument("--bandwidth", default="1 Gbit/s", help="of the emulated links (1 Gbit/s)")
    parser.add_argument("--rtt", default="10 ms", help="round trip of the emulated links (10 ms)")
    parser.add_argument("--turns", type=int, default=9, help="turns that count (9)")
    options = parser.parse_args()
    pairs_of_counts = [tuple(map(int, text.split(":"))) for text in options.experts]
    cases = [
        Case(
            experts=experts,
            top_k=top_k,
            tokens=tokens,
            hidden=options.hidden,
            width=options.width,
            dtype=options.dtype,
        )
        for experts, top_k in pairs_of_counts
        for tokens in options.tokens
    ]
    tables = {}
    for name, link in (("plain", {}), ("emulated", {"bandwidth": options.bandwidth, "rtt": options.rtt})):
        with fleet.start(Wiring(sizes=(1, 1), **link)) as (group,):
            tables[name] = []
            for case in cases:
                say(f"expert_path: {name} links, {case}")
                tables[name].append(measure(group, case, options.turns))
    text = (
        f"Links as fast as the machine:\n\n{render(tables['plain'], PLAIN_COLUMNS)}\n\n"
        f"Emulated links of {options.bandwidth}, {options.rtt} round trip:\n\n"
        f"{render(tables['emulated'], EMULATED_COLUMNS)}"
    )
    link = {"bandwidth": options.bandwidth, "rtt": options.rtt}
    fleet.answer("expert_path", {"link": link} | tables, text, as_json=options.json)


if __name__ == "__main__":
    main()

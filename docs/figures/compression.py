"""Draws the figures of docs/compression.md from docs/data/compression*.csv.

    python docs/figures/compression.py [--data DIRECTORY] [--out DIRECTORY]

The data are the table.csv, curves.csv and merges.csv that `moe-fragment sweep recipes/sweeps/compression.yaml` writes,
copied to docs/data under the names compression.csv, compression-curves.csv and compression-merges.csv.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
# Okabe and Ito's colours, which people who cannot tell red from green can tell apart.
BLACK, BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = (
    "#000000",
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#888888",
)
STRATEGIES = {
    "allreduce": ("all-reduce", BLACK, "s"),
    "butterfly": ("butterfly", GREY, "D"),
    "local_sgd": ("local SGD", BLUE, "o"),
    "diloco": ("DiLoCo", ORANGE, "^"),
    "streaming_diloco": ("streaming DiLoCo", GREEN, "v"),
    "teleport": ("teleport (guarded)", PURPLE, "X"),
}
LOSS = "evaluation loss (nats per byte)"


class Data:
    """The three files, and what the figures ask of them."""

    def __init__(self, folder: Path) -> None:
        self.table = pd.read_csv(folder / "compression.csv")
        self.curves = pd.read_csv(folder / "compression-curves.csv")
        self.merges = pd.read_csv(folder / "compression-merges.csv")
        complete = self.table[self.table["status"] == "complete"]
        first = complete.groupby("run", sort=False).first()
        losses = complete.groupby("run", sort=False)["eval_loss"]
        self.runs = first.assign(
            loss=losses.mean(), low=losses.min(), high=losses.max(), seeds=losses.count()
        )
        """One row per run: `loss` is the mean over seeds, `low` and `high` their range."""

    def pick(self, **equal: object) -> pd.DataFrame:
        """Runs whose columns are these; dots are written as two underscores."""
        runs = self.runs
        for name, value in equal.items():
            runs = runs[runs[name.replace("__", ".")] == value]
        return runs


NAMED = (
    "sparseloco",
    "sparseloco-15",
    "streaming_fp4",
    "local_sgd-300",
    "local-top1.6",
    "local-top1.6-ef",
    "allreduce-sign-ef",
    "diloco-4",
    "sign-ef",
)


def by_ratio(data: Data, figure: Figure) -> None:
    """Loss against how many times fewer trunk bytes, all runs where tokens stay and experts are replicated."""
    axes = figure.subplots()
    local = data.runs[(data.runs["placement.policy"] == "replicated") & ~data.runs.index.str.startswith("lr")]
    _reference(axes, data)
    for name, (label, colour, marker) in STRATEGIES.items():
        for coded, face in ((False, colour), (True, "white")):
            chosen = local[(local["sync.strategy"] == name) & (local["sync.codec"].notna() == coded)]
            if len(chosen):
                said = f"{label}, with a codec" if coded else label
                _points(axes, chosen, "compression", colour=colour, marker=marker, label=said, face=face)
    for run in NAMED:
        side = "right" if run == "sign-ef" else "left"  # its neighbour's name is on its other side
        _name(axes, run, local.loc[run, "compression"], local.loc[run, "loss"], side)
    _logarithmic(axes)
    axes.set_xlabel("times fewer trunk bytes than a plain fp32 all-reduce of every step")
    axes.set_ylabel(LOSS)
    axes.legend(fontsize=8, loc="upper left")


def by_round(data: Data, figure: Figure) -> None:
    """Loss against H, and how far apart the copies were before a merge."""
    loss, apart = figure.subplots(1, 2)
    _reference(loss, data)
    plain = data.runs[data.runs["sync.codec"].isna() & ~data.runs.index.str.contains("^lr|-lr|-m0|tokens")]
    for name in ("local_sgd", "diloco", "streaming_diloco"):
        label, colour, marker = STRATEGIES[name]
        for where, style in (("replicated", "-"), ("even", "--")):
            chosen = plain[(plain["sync.strategy"] == name) & (plain["placement.policy"] == where)]
            if not len(chosen):
                continue
            said = label if where == "replicated" else f"{label}, experts pinned"
            _by_h(loss, chosen, "loss", colour=colour, marker=marker, label=said, style=style)
            merges = data.merges[data.merges["run"].isin(chosen.index) & (data.merges["seed"] == 0)]
            largest = merges.groupby("run")["trunk_distance"].max().reindex(chosen.index)
            _by_h(
                apart,
                chosen.assign(largest=largest),
                "largest",
                colour=colour,
                marker=marker,
                label=said,
                style=style,
            )
    loss.set_ylabel(LOSS)
    apart.set_ylabel("largest distance of the copies before a merge,\nrelative to their norm")
    for axes in (loss, apart):
        axes.legend(fontsize=8)


def _by_h(
    axes: Axes, runs: pd.DataFrame, y: str, *, colour: str, marker: str, label: str, style: str
) -> None:
    runs = runs.sort_values("sync.every")
    spread = [runs["loss"] - runs["low"], runs["high"] - runs["loss"]] if y == "loss" else None
    axes.errorbar(
        runs["sync.every"],
        runs[y],
        yerr=spread,
        color=colour,
        marker=marker,
        linestyle=style,
        label=label,
        capsize=3,
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks([4, 16, 64, 150, 300], ["4", "16", "64", "150", "300"])
    axes.minorticks_off()
    axes.set_xlabel("H, steps between two merges")


CODECS = {
    "int8": "int8",
    "int4": "int4",
    "fp4": "fp4",
    "int2": "int2",
    "sigma2": "sigma, 2 bits",
    "sign": "sign",
    "top25": "top 25 %",
    "top6": "top 6.2 %",
    "top1.6": "top 1.6 %",
}


def codecs(data: Data, figure: Figure) -> None:
    """H = 16: what each codec loses in a merge, and what that costs in loss under two strategies."""
    error, *losses = figure.subplots(1, 3, sharey=True, width_ratios=(1, 1.2, 1.2))
    base = data.runs.loc["local_sgd-16"]
    names = []
    for row, (codec, said) in enumerate(CODECS.items()):
        runs = {f"{codec}{end}": FEEDBACK[has] for end, has in ENDS.items()}
        sent = [
            data.runs.loc[f"local-{run}", "trunk_bytes"] for run in runs if f"local-{run}" in data.runs.index
        ]
        names.append(f"{said}  ({base['trunk_bytes'] / sent[0]:.0f}x)")
        for run, (colour, marker, _, shift) in runs.items():
            if f"local-{run}" in data.runs.index:
                lost = data.runs.loc[f"local-{run}", "codec_error"]
                error.scatter(lost, row + shift, color=colour, marker=marker, s=22)
            for axes, start in zip(losses, ("local-", ""), strict=True):
                seeds = data.table.loc[data.table["run"] == start + run, "eval_loss"]
                axes.scatter(seeds, [row + shift] * len(seeds), color=colour, marker=marker, s=22)
    for axes, plain, title in zip(
        losses, ("local_sgd-16", "diloco-16"), ("local SGD", "DiLoCo"), strict=True
    ):
        own = data.runs.loc[plain]
        axes.axvspan(own["low"], own["high"], color=GREY, alpha=0.25, linewidth=0, label="no codec, 3 seeds")
        axes.axvline(first_seed(data, plain), color=GREY, label="no codec, seed 0")
        axes.set_title(f"{title}, H 16", fontsize=9)
        axes.set_xlabel(LOSS)
    far = first_seed(data, "local-top1.6")
    losses[0].set_xlim(2.03, 2.36)
    losses[0].annotate(
        f"{far:.2f} \N{RIGHTWARDS ARROW}",
        (2.355, len(names) - 1 + FEEDBACK[False][3]),
        color=BLUE,
        ha="right",
        va="center",
    )
    for colour, marker, said, _ in FEEDBACK.values():
        error.scatter([], [], color=colour, marker=marker, label=said)
    for axes in (error, *losses):
        axes.grid(axis="y", alpha=0.3)
    error.set_yticks(range(len(names)), names)
    error.invert_yaxis()
    error.set_xlabel("relative error of what is sent")
    error.legend(fontsize=8)
    losses[0].legend(fontsize=8)


ENDS = {"": False, "-ef0": False, "-ef": True}
"""Of a run's name, to whether it has error feedback."""
FEEDBACK = {
    False: (BLUE, "o", "without error feedback", -0.12),
    True: (RED, "D", "with (decay .95)", 0.12),
}
"""Colour, marker, legend and place beside the row."""


def first_seed(data: Data, run: str) -> float:
    """Loss of a run's seed 0, which runs with one seed compare with: same weights, same samples."""
    rows = data.table[(data.table["run"] == run) & (data.table["seed"] == 0)]
    return float(rows["eval_loss"].iloc[0])


CURVES = {
    "allreduce": ("all-reduce fp32", BLACK, "-"),
    "allreduce-int8": ("all-reduce int8", GREY, "-"),
    "local_sgd-16": ("local SGD, H 16", BLUE, "-"),
    "diloco-16": ("DiLoCo, H 16", ORANGE, "-"),
    "local-int4": ("local SGD, H 16, int4", BLUE, "--"),
    "streaming-16": ("streaming DiLoCo, H 16", GREEN, "-"),
    "local-sign-ef0": ("local SGD, H 16, sign", RED, "--"),
}


def curves(data: Data, figure: Figure) -> None:
    """Loss against bytes sent, and against measured seconds over the emulated link."""
    sent, seconds = figure.subplots(1, 2, sharey=True)
    for run, (label, colour, style) in CURVES.items():
        curve = data.curves[(data.curves["run"] == run) & (data.curves["seed"] == 0)]
        for axes, column, scale in ((sent, "wan_bytes", 1e6), (seconds, "seconds", 1)):
            axes.plot(
                curve[column] / scale,
                curve["eval_loss"],
                color=colour,
                linestyle=style,
                marker=".",
                label=label,
            )
    _logarithmic(sent)
    sent.set_xlabel("MB sent over the WAN so far (both clusters)")
    seconds.set_xlabel("seconds of training so far (emulated link, two cores)")
    sent.set_ylabel(LOSS)
    seconds.legend(fontsize=8)


def teleport(data: Data, figure: Figure) -> None:
    """Distance of the trunk copies at every attempt to merge, what the guard made of it, and what it was worth."""
    apart, loss = figure.subplots(1, 2, width_ratios=(1.3, 1))
    for every, colour in {"16": SKY, "64": BLUE, "150": PURPLE, "300": RED}.items():
        rows = data.merges[data.merges["run"] == f"pinned-teleport-{every}"]
        apart.plot(rows["step"], rows["trunk_distance"], color=colour, label=f"H {every} at first")
        for refused, marker, size in ((False, "o", 18), (True, "X", 60)):
            chosen = rows[rows["refused"] == refused]
            apart.scatter(chosen["step"], chosen["trunk_distance"], color=colour, marker=marker, s=size)
    for bound, said in ((0.1, "warn"), (0.45, "refuse")):
        apart.axhline(bound, color=GREY, linestyle=":", linewidth=1)
        where = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
        apart.annotate(said, (0.02, bound), xytext=(0, 3), fontsize=8, color=GREY, **where)
    apart.set_xlabel("step")
    apart.set_ylabel("distance of the trunk copies before the merge")
    apart.set_title("experts pinned: the trunk alone (cross: refused)", fontsize=9)
    apart.legend(fontsize=8)
    _reference(loss, data)
    for start, style, where in (("", "-", "replicated"), ("pinned-", "--", "pinned")):
        for name in ("local_sgd", "teleport"):
            label, colour, marker = STRATEGIES[name]
            own = data.runs[data.runs.index.str.fullmatch(rf"{start}{name}-\d+")]
            _by_h(
                loss,
                own,
                "loss",
                colour=colour,
                marker=marker,
                label=f"{label}, {where} experts",
                style=style,
            )
    loss.set_ylabel(LOSS)
    loss.legend(fontsize=8)


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")


def _reference(axes: Axes, data: Data) -> None:
    base = data.runs.loc["allreduce"]
    axes.axhspan(base["low"], base["high"], color=BLACK, alpha=0.15, linewidth=0)
    axes.axhline(base["loss"], color=BLACK, linewidth=0.8, linestyle="--")


def _points(
    axes: Axes,
    runs: pd.DataFrame,
    x: str,
    *,
    colour: str,
    marker: str,
    label: str,
    face: str | None = None,
) -> None:
    spread = [runs["loss"] - runs["low"], runs["high"] - runs["loss"]]
    axes.errorbar(
        runs[x],
        runs["loss"],
        yerr=spread,
        color=colour,
        marker=marker,
        linestyle="",
        label=label,
        markerfacecolor=face or colour,
        capsize=3,
    )


def _name(axes: Axes, text: str, x: float, y: float, side: str) -> None:
    offset = (6 if side == "left" else -6, 4)
    axes.annotate(text, (x, y), xytext=offset, ha=side, textcoords="offset points", fontsize=8)


FIGURES: dict[str, tuple[Callable[[Data, Figure], None], tuple[float, float]]] = {
    "loss-by-ratio": (by_ratio, (8, 4.8)),
    "loss-by-round": (by_round, (9.5, 4)),
    "codecs": (codecs, (9.5, 4.4)),
    "curves": (curves, (9.5, 4.2)),
    "teleport": (teleport, (9.5, 4.2)),
}


def draw(data_folder: Path, out: Path) -> list[Path]:
    """Draw all figures; returns their files."""
    mpl.use("agg")
    mpl.rcParams.update(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.size": 9,
            "legend.handlelength": 3,
            "svg.hashsalt": "moe",
        }
    )
    data = Data(data_folder)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (plot, size) in FIGURES.items():
        figure = Figure(figsize=size, layout="constrained", dpi=110)
        plot(data, figure)
        written.append(out / f"{name}.png")
        figure.savefig(written[-1], metadata={"Software": None})
    return written


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=HERE.parent / "data", help="where the three CSV files are"
    )
    parser.add_argument("--out", type=Path, default=HERE, help="where the figures go")
    options = parser.parse_args()
    draw(options.data, options.out)


if __name__ == "__main__":
    main()

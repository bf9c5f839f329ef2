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


def by_ratio(data: Data, figure: Figure) -> None:
    """Loss against how many times fewer trunk bytes, all runs where tokens stay and experts are replicated."""
    axes = figure.subplots()
    local = data.runs[(data.runs["placement.policy"] == "replicated") & (data.runs["compression"] < 1e5)]
    _reference(axes, data)
    for name, (label, colour, marker) in STRATEGIES.items():
        for coded, face in ((False, colour), (True, "white")):
            chosen = local[(local["sync.strategy"] == name) & (local["sync.codec"].notna() == coded)]
            if len(chosen):
                said = f"{label}, with a codec" if coded else label
                _points(axes, chosen, "compression", colour=colour, marker=marker, label=said, face=face)
    for run in (
        "sparseloco",
        "streaming_fp4",
        "int2-ef0",
        "top1.6",
        "top1.6-ef",
        "int4",
        "allreduce-sign-ef",
    ):
        if run in local.index:
            _name(axes, run, local.loc[run, "compression"], local.loc[run, "loss"])
    _logarithmic(axes)
    axes.set_xlabel("times fewer trunk bytes than a plain fp32 all-reduce of every step")
    axes.set_ylabel(LOSS)
    axes.legend(fontsize=8, loc="upper left")


def by_round(data: Data, figure: Figure) -> None:
    """Loss against H, and how far apart the copies were before a merge."""
    loss, apart = figure.subplots(1, 2)
    _reference(loss, data)
    plain = data.runs[data.runs["sync.codec"].isna() & (data.runs["placement.policy"] == "replicated")]
    plain = plain[~plain.index.str.contains("-lr|-m0|-0")]
    for name in ("local_sgd", "diloco", "streaming_diloco", "teleport"):
        label, colour, marker = STRATEGIES[name]
        chosen = plain[plain["sync.strategy"] == name].sort_values("sync.every")
        _points(loss, chosen, "sync.every", colour=colour, marker=marker, label=label, line=True)
        if name != "teleport":
            merges = data.merges[data.merges["run"].isin(chosen.index) & (data.merges["seed"] == 0)]
            largest = merges.groupby("run")["trunk_distance"].max().reindex(chosen.index)
            apart.plot(chosen["sync.every"], largest, color=colour, marker=marker, label=label)
    for bound, said in ((0.1, "guard.warn"), (0.5, "guard.refuse")):
        apart.axhline(bound, color=GREY, linestyle=":", linewidth=1)
        apart.annotate(
            said, (300, bound), xytext=(0, 3), textcoords="offset points", fontsize=8, color=GREY, ha="right"
        )
    for axes in (loss, apart):
        axes.set_xscale("log", base=2)
        axes.set_xticks([4, 16, 64, 150, 300], ["4", "16", "64", "150", "300"])
        axes.minorticks_off()
        axes.set_xlabel("H, steps between two merges")
        axes.legend(fontsize=8)
    loss.set_ylabel(LOSS)
    apart.set_ylabel("largest distance of the copies before a merge,\nrelative to the trunk's norm")


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
    for codec, said in CODECS.items():
        own = data.runs[data.runs.index.isin([f"local-{codec}{end}" for end in ENDS])].iloc[0]
        names.append(f"{said}  ({base['trunk_bytes'] / own['trunk_bytes']:.0f}x)")
    for axes, start, title in zip(losses, ("local-", ""), ("local SGD, H 16", "DiLoCo, H 16"), strict=True):
        plain = data.runs.loc["local_sgd-16" if start else "diloco-16"]
        axes.axvspan(
            plain["low"], plain["high"], color=GREY, alpha=0.25, linewidth=0, label="no codec, 3 seeds"
        )
        axes.axvline(
            first_seed(data, "local_sgd-16" if start else "diloco-16"), color=GREY, label="no codec, seed 0"
        )
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(LOSS)
        for feedback, (colour, marker, said) in FEEDBACK.items():
            for row, codec in enumerate(CODECS):
                for run in (f"{start}{codec}{end}" for end, has in ENDS.items() if has == feedback):
                    if run in data.runs.index:
                        seeds = data.table.loc[data.table["run"] == run, "eval_loss"]
                        axes.scatter(
                            seeds,
                            [row + 0.12 - 0.24 * (not feedback)] * len(seeds),
                            color=colour,
                            marker=marker,
                            s=22,
                        )
                        if start:
                            sent = data.runs.loc[run, "codec_error"]
                            error.scatter(
                                [sent],
                                [row + 0.12 - 0.24 * (not feedback)],
                                color=colour,
                                marker=marker,
                                s=22,
                            )
            error.scatter([], [], color=colour, marker=marker, label=said)
    for axes in (error, *losses):
        axes.grid(axis="y", alpha=0.3)
    error.set_yticks(range(len(names)), names)
    error.invert_yaxis()
    error.set_xlabel("relative error of what is sent")
    handles, labels = error.get_legend_handles_labels()
    error.legend(handles[:2], labels[:2], fontsize=8)
    losses[0].legend(fontsize=8)


ENDS = {"": False, "-ef0": False, "-ef": True}
"""Of a run's name, to whether it has error feedback."""
FEEDBACK = {False: (BLUE, "o", "without error feedback"), True: (RED, "D", "with (decay .95)")}


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
    "sparseloco": ("SparseLoCo preset, H 30", RED, "-"),
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
    _logarithmic(seconds)
    seconds.set_xlabel("seconds of training so far (emulated link, two cores)")
    sent.set_ylabel(LOSS)
    seconds.legend(fontsize=8)


def teleport(data: Data, figure: Figure) -> None:
    """Distance of the copies before every attempt to merge, and what the guard made of it."""
    axes = figure.subplots()
    colours = {"16": SKY, "64": BLUE, "150": PURPLE, "300": RED}
    for at, bound in enumerate(("", "-0.2")):
        for every, colour in colours.items():
            rows = data.merges[data.merges["run"] == f"teleport-{every}{bound}"]
            if not len(rows):
                continue
            said = f"H {every}, refuses above {'0.2' if bound else '0.5'}"
            axes.plot(
                rows["step"], rows["trunk_distance"], color=colour, linestyle=("-", "--")[at], label=said
            )
            for refused, marker, face in ((False, "o", colour), (True, "X", "white")):
                part = rows[rows["refused"] == refused]
                axes.scatter(
                    part["step"],
                    part["trunk_distance"],
                    marker=marker,
                    color=face,
                    edgecolors=colour,
                    zorder=3,
                    s=45,
                )
    for bound, said in ((0.1, "warn .1"), (0.2, "refuse .2"), (0.5, "refuse .5")):
        axes.axhline(bound, color=GREY, linestyle=":", linewidth=1)
        axes.annotate(said, (302, bound), fontsize=8, color=GREY, va="center", annotation_clip=False)
    axes.set_xlabel("step")
    axes.set_ylabel("distance of the copies before the merge")
    axes.set_title("filled: merged; crossed: refused", fontsize=9)
    axes.legend(fontsize=8)


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
    line: bool = False,
    face: str | None = None,
) -> None:
    spread = [runs["loss"] - runs["low"], runs["high"] - runs["loss"]]
    axes.errorbar(
        runs[x],
        runs["loss"],
        yerr=spread,
        color=colour,
        marker=marker,
        linestyle="-" if line else "",
        label=label,
        markerfacecolor=face or colour,
        capsize=3,
    )


def _name(axes: Axes, text: str, x: float, y: float) -> None:
    axes.annotate(text, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8)


FIGURES: dict[str, tuple[Callable[[Data, Figure], None], tuple[float, float]]] = {
    "loss-by-ratio": (by_ratio, (8, 4.8)),
    "loss-by-round": (by_round, (9.5, 4)),
    "codecs": (codecs, (9.5, 4.4)),
    "curves": (curves, (9.5, 4.2)),
    "teleport": (teleport, (8, 4.2)),
}


def draw(data_folder: Path, out: Path) -> list[Path]:
    """Draw all figures; returns their files."""
    mpl.use("agg")
    mpl.rcParams.update(
        {"axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "svg.hashsalt": "moe"}
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

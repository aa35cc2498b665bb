"""The picture of a training."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

INK, QUIET, TRAIN, HELD_OUT = "#222222", "#8a8a8a", "#9db8d9", "#c2410c"


def save(path: Path, train: list[tuple[int, float]], held_out: list[tuple[int, float]], bigram: float) -> None:
    """Losses in nats per byte by step, and the line that no network without mixing over time gets below."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*train, strict=True), color=TRAIN, linewidth=0.8, label="training batch")
    axes.plot(*zip(*held_out, strict=True), color=HELD_OUT, marker="o", markersize=4, label="held-out text")
    axes.axhline(bigram, color=QUIET, linestyle="--", linewidth=1)
    axes.annotate(f"bigram model {bigram:.2f}", (1, bigram), xycoords=("axes fraction", "data"), xytext=(-4, 4),
                  textcoords="offset points", ha="right", color=QUIET)
    step, loss = held_out[-1]
    axes.annotate(f"{loss:.2f}", (step, loss), xytext=(0, -16), textcoords="offset points", ha="center", color=HELD_OUT,
                  bbox=dict(facecolor="white", edgecolor="none", alpha=0.8, pad=1))
    axes.set(xlabel="step", ylabel="loss (nats per byte)", xlim=(0, 1.03 * step), ylim=(0.8, 4))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Byte-level language model of KDA layers", loc="left", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)

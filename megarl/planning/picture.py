"""The simulator's answers as a picture."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megarl.planning.studies import NODES, Row

_NAMES = {"phases": "barrier per phase", "dataflow": "dataflow per agent", "shared": "shared GPUs, in turn"}
_COLORS = {"phases": "#b5452c", "dataflow": "#1f6f8b", "shared": "#8a8a8a"}


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Three panels: seconds per step and idle share by nodes, seconds per step by checkpoint interval."""
    figure = Figure(figsize=(12.5, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, middle, right = figure.subplots(1, 3)
    for schedule, name in _NAMES.items():
        mine = [row for row in rows if row.get("schedule") == schedule]
        for panel, key in ((left, "seconds_per_step"), (middle, "idle_share")):
            panel.plot(
                [float(row["nodes"]) for row in mine],
                [float(row[key]) for row in mine],
                color=_COLORS[schedule],
                marker="o",
                markersize=3.5,
                label=name,
            )
    for panel, label in ((left, "seconds per step"), (middle, "share of GPU time idle")):
        panel.set_xscale("log", base=4)
        panel.set_xticks(NODES, [str(count) for count in NODES])
        panel.set_xlabel("nodes of 8 GPUs (work grows with them)")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
    left.legend(loc="lower left")
    studied = [row for row in rows if row["question"] == "checkpoints"]
    for count, style in zip(sorted({float(row["nodes"]) for row in studied}), (":", "--", "-"), strict=False):
        mine = [row for row in studied if row["nodes"] == count]
        right.plot(
            [float(row["interval"]) for row in mine],
            [float(row["seconds_per_step"]) for row in mine],
            style,
            color="#b5452c",
            marker="o",
            markersize=3.5,
            label=f"{count:.0f} nodes",
        )
    right.set_xscale("log")
    right.set_xlabel("steps between checkpoints")
    right.set_ylabel("seconds per step, failures included")
    right.set_ylim(bottom=0)
    right.grid(alpha=0.25, which="both")
    right.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=130)

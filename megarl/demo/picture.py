"""The demo's picture: how each agent fares under each method."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# the last is drawn over the others, and dashed: supervised and label-free learning may run together
_STYLES = (("#b5452c", "-"), ("#1f6f8b", "-"), ("#d9a441", "--"))


def draw(
    curves: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]], titles: Mapping[str, str], path: Path
) -> None:
    """Write a PNG with one panel per agent; ``curves[method][agent]`` is (steps done, accuracy)."""
    agents = list(next(iter(curves.values())))
    figure = Figure(figsize=(4.6 * len(agents), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(agents), sharey=True, squeeze=False)[0]
    for panel, agent in zip(panels, agents, strict=True):
        for (method, title), (colour, line) in zip(titles.items(), _STYLES, strict=True):
            steps, accuracy = zip(*curves[method][agent], strict=True)
            panel.set_xticks(steps)
            panel.plot(steps, accuracy, color=colour, linestyle=line, marker="o", markersize=3.5, label=title)
        start = curves[next(iter(titles))][agent][0][1]
        panel.axhline(start, color="black", linewidth=0.8, linestyle=":", label="start")
        panel.set_title(agent)
        panel.set_xlabel("step")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("sampled accuracy")
    panels[-1].legend(loc="center right")
    figure.savefig(path, dpi=140)

"""Two possible answers, two agents that are each one number: where labels without truth lead, against the theory.

Agent n answers right with probability p_n = sigmoid(theta_n). It is trained by this project's own parts (a method's
label and reward, ``spread``, ``pg_loss``) with plain gradient steps. For an odd number of votes the expected motion is
the flow of ``megarl.flow`` (Co-RL, arXiv 2608.17253, theorem 1): a Co-RL pair ends right where p_A + p_B > 1 and wrong
below, and TTRL ends right where p > 1/2. The deviation in that flow is the population's (ddof=0), and so it is here.

    python -m megarl.demo.flow OUT.png
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from megarl.advantages import spread
from megarl.algos import Algorithm
from megarl.algos.corl import CoRL
from megarl.algos.ttrl import TTRL
from megarl.flow import settle, velocity
from megarl.loss import TokenBatch, pg_loss
from megarl.packing import num_sequences, pack, response_tokens
from megarl.settings import AdvantageConfig, LossConfig
from megarl.types import Message, Prompt, Rollout, Sample, TokenStats

AGENTS = ("a", "b")
STARTS = ((0.2, 0.9), (0.3, 0.6), (0.8, 0.35), (0.1, 0.75), (0.55, 0.6), (0.4, 0.45))

# method -> (itself, who teaches agent a and agent b)
METHODS: dict[str, tuple[Algorithm, tuple[int, int]]] = {"Co-RL": (CoRL(ring=AGENTS), (1, 0)), "TTRL": (TTRL(), (0, 1))}

_ADVANTAGE = AdvantageConfig(ddof=0, eps=0.0)
_LOSS = LossConfig(tis_cap=None)
_COLOURS = ("#b5452c", "#8a6bbd", "#1f6f8b")  # by how many of the two end right

Point = tuple[float, float]  # probability of the right answer, of agent a and of agent b
Path2 = NDArray[np.float64]  # [steps + 1, 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a pair is trained. One step advances the flow's time by ``lr``."""

    votes: int = 7  # odd
    prompts: int = 64  # asked per step; the expectation is taken over them
    lr: float = 0.5
    steps: int = 60
    seed: int = 0


def predicted(start: Point, run: Run, teachers: Sequence[int]) -> Path2:
    """The flow from ``start``, at the times of the run's steps; agent n is taught by ``teachers[n]``."""
    points = [np.array(start, np.float64)[:, None]]
    for _ in range(run.steps):
        points.append(settle(points[-1], teachers, run.votes, step=run.lr / 8, steps=8))
    return np.stack(points)[..., 0]


def simulated(algo: Algorithm, start: Point, run: Run) -> Path2:
    """The pair trained by a method, from ``start``."""
    random = np.random.default_rng(run.seed)
    thetas = {name: torch.logit(torch.tensor(p, dtype=torch.float64)) for name, p in zip(AGENTS, start, strict=True)}
    points = [list(start)]
    for step in range(run.steps):
        seen = [r for name, theta in thetas.items() for r in _answers(name, theta, run, step, random)]
        stats = {r.key: TokenStats(logprobs=r.logprobs) for r in seen}
        groups = algo.reward(seen, algo.label(seen, None), stats)
        samples = spread(groups, seen, stats, _ADVANTAGE)
        thetas = {
            name: theta - run.lr * _gradient(theta, [s for s in samples if s.key.agent == name])
            for name, theta in thetas.items()
        }
        points.append([float(torch.sigmoid(theta)) for theta in thetas.values()])
    return np.array(points)


def _answers(agent: str, theta: torch.Tensor, run: Run, step: int, random: np.random.Generator) -> list[Rollout]:
    """``votes`` answers of one agent to each prompt: one token each, 1 (right) or 0 (wrong)."""
    logprobs = _log_softmax(theta).to(torch.float32).numpy()
    tokens = random.random((run.prompts, run.votes)) < float(torch.sigmoid(theta))
    question = np.zeros(1, np.int32)
    return [
        Rollout(
            prompt=Prompt(agent=agent, uid=f"{i}", role="solve", messages=(Message("user", "?"),), n=run.votes),
            index=k,
            prompt_ids=question,
            token_ids=np.array([token], np.int32),
            logprobs=logprobs[[token]],
            text=str(token),
            stop="end",
            version=step,
            answer=str(token),
            well_formed=True,
        )
        for i, row in enumerate(tokens.astype(int).tolist())
        for k, token in enumerate(row)
    ]


def _log_softmax(theta: torch.Tensor) -> torch.Tensor:
    """Logprobs[2] of the tokens 0 (wrong) and 1 (right)."""
    return torch.nn.functional.logsigmoid(torch.stack([-theta, theta]))


def _gradient(theta: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """d loss / d theta over all samples of one agent."""
    theta = theta.detach().requires_grad_()
    [[microbatch]] = pack(samples, dp=1, tokens_per_microbatch=2 * len(samples))
    batch = TokenBatch.of(microbatch)
    logprobs = _log_softmax(theta)[batch.labels].to(torch.float32)
    loss, _ = pg_loss(
        torch.where(batch.mask, logprobs, 0.0),
        batch,
        _LOSS,
        num_tokens=response_tokens(samples),
        num_sequences=num_sequences(samples),
        kl_coef=0.0,
    )
    loss.backward()
    assert theta.grad is not None
    return theta.grad


def draw(paths: Mapping[str, Sequence[tuple[Path2, Path2]]], run: Run, file: Path) -> None:
    """Write a PNG, a panel per method: the predicted field and, over it, (simulated, predicted) paths."""
    figure = Figure(figsize=(5.2 * len(paths), 5.7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(paths), sharey=True, squeeze=False)[0]
    for panel, (method, pairs) in zip(panels, paths.items(), strict=True):
        _draw_field(panel, run.votes, METHODS[method][1])
        for number, (found, expected) in enumerate(pairs):
            labels = ("trained", "predicted") if number == 0 else (None, None)
            panel.plot(*expected.T, color="black", linewidth=1.0, linestyle="--", label=labels[1])
            panel.plot(*found.T, color=_COLOURS[int((found[-1] > 0.5).sum())], linewidth=1.6, label=labels[0])
            panel.plot(*found[0], color="black", marker="o", markersize=4)
        panel.set_title(f"{method}, K={run.votes}")
        panel.set_xlabel("agent a: P(right)")
        panel.set_aspect("equal")
    panels[0].set_ylabel("agent b: P(right)")
    panels[0].legend(loc="lower right")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=140)


def _draw_field(panel: Axes, votes: int, teachers: Sequence[int]) -> None:
    grid = np.linspace(0.02, 0.98, 25)
    a, b = np.meshgrid(grid, grid)
    along_a, along_b = velocity(np.stack([a.ravel(), b.ravel()]), teachers, votes).reshape(2, *a.shape)
    panel.streamplot(grid, grid, along_a, along_b, color="#bbbbbb", linewidth=0.6, arrowsize=0.7)
    mutual = tuple(teachers) != (0, 1)
    borders = [([0, 1], [1, 0])] if mutual else [([0.5, 0.5], [0, 1]), ([0, 1], [0.5, 0.5])]
    for x, y in borders:
        panel.plot(x, y, color="black", linewidth=0.8, linestyle=":")
    panel.set_xlim(0, 1)
    panel.set_ylim(0, 1)


def main(args: Sequence[str] | None = None) -> None:
    """Train pairs from several starts by both methods; print where they end, and draw them."""
    parser = argparse.ArgumentParser(prog="python -m megarl.demo.flow", description=main.__doc__)
    parser.add_argument("out", type=Path, help="the picture, a PNG")
    for name, default in (("prompts", 64), ("steps", 60), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(args)
    run = Run(prompts=options.prompts, steps=options.steps, seed=options.seed)
    paths: dict[str, list[tuple[Path2, Path2]]] = {}
    print("method  start        trained      predicted    largest distance on the way")
    for method, (algo, teachers) in METHODS.items():
        for start in STARTS:
            found, expected = simulated(algo, start, run), predicted(start, run, teachers)
            paths.setdefault(method, []).append((found, expected))
            ends = "  ".join(f"{a:.2f}, {b:.2f} " for a, b in (start, found[-1], expected[-1]))
            print(f"{method:6}  {ends}  {np.abs(found - expected).max():.3f}")
    draw(paths, run, options.out)
    print(options.out)


if __name__ == "__main__":
    main()

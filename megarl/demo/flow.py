"""Two possible answers, two agents that are each one number: where labels without truth lead, against the theory.

Agent n answers right with probability p_n = sigmoid(theta_n). It is trained by this project's own parts (a method's
label and reward, ``spread``, ``pg_loss``) with plain gradient steps. For an odd number K of votes the expected motion
is a replicator flow (Co-RL, arXiv 2608.17253, theorem 1 and appendix B):

    dp_n/dt = q_K(p_n) phi_K(p_m),  phi_K(p) = 2 P(Bin(K, p) > K/2) - 1,  q_K(p) = p (1 - p) E[sqrt(C (K - C))] / K

with m the teacher of n: the other agent under Co-RL, n itself under TTRL. So a Co-RL pair ends right where
p_A + p_B > 1 and wrong below, and TTRL ends right where p > 1/2. The standard deviation of the flow is the
population's (ddof=0), and so is that of the simulation here.

    python -m megarl.demo.flow OUT.png
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import comb, sqrt
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
from megarl.loss import TokenBatch, pg_loss
from megarl.packing import num_sequences, pack, response_tokens
from megarl.settings import AdvantageConfig, LossConfig
from megarl.types import Message, Prompt, Rollout, Sample, TokenStats

AGENTS = ("a", "b")
WRONG, RIGHT = 0, 1  # token ids, and answers when spelt out
STARTS = ((0.2, 0.9), (0.3, 0.6), (0.8, 0.35), (0.1, 0.75), (0.55, 0.6), (0.4, 0.45))

_ADVANTAGE = AdvantageConfig(ddof=0, eps=0.0)
_LOSS = LossConfig(tis_cap=None)
_COLOURS = ("#b5452c", "#8a6bbd", "#1f6f8b")  # by how many of the two end right

Point = tuple[float, float]  # probability of the right answer, of agent a and of agent b
Path2 = NDArray[np.float64]  # [steps + 1, 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a pair is trained. One step advances the flow's time by ``lr``."""

    votes: int = 7  # K, odd
    prompts: int = 64  # asked per step; the expectation is taken over them
    lr: float = 0.5
    steps: int = 60
    seed: int = 0

    def __post_init__(self) -> None:
        if self.votes % 2 == 0:
            raise ValueError(f"votes={self.votes}: the flow is that of an odd number of votes, without ties")


def phi(p: float, votes: int) -> float:
    """Mean sign of a label made of so many votes: +1 always right, -1 always wrong."""
    return 2 * sum(_binomial(votes, c, p) for c in range(votes // 2 + 1, votes + 1)) - 1


def speed(p: float, votes: int) -> float:
    """q_K(p): how fast p grows under a label that is always right."""
    return p * (1 - p) * sum(_binomial(votes, c, p) * sqrt(c * (votes - c)) for c in range(votes + 1)) / votes


def _binomial(n: int, c: int, p: float) -> float:
    return comb(n, c) * p**c * (1 - p) ** (n - c)


def velocity(point: Sequence[float], votes: int, *, mutual: bool) -> tuple[float, float]:
    """(dp_A/dt, dp_B/dt); ``mutual``: each is taught by the other (Co-RL), else by itself (TTRL)."""
    a, b = point
    teachers = (b, a) if mutual else (a, b)
    return speed(a, votes) * phi(teachers[0], votes), speed(b, votes) * phi(teachers[1], votes)


def predicted(start: Point, run: Run, *, mutual: bool) -> Path2:
    """The flow from ``start``, at the times of the run's steps (classical Runge-Kutta, four substeps each)."""

    def field(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.array(velocity(x.tolist(), run.votes, mutual=mutual))

    points = [np.array(start, np.float64)]
    h = run.lr / 4
    for _ in range(run.steps):
        x = points[-1]
        for _ in range(4):
            k1 = field(x)
            k2 = field(x + h / 2 * k1)
            k3 = field(x + h / 2 * k2)
            k4 = field(x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        points.append(x)
    return np.stack(points)


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
    """``votes`` answers of one agent to each prompt: one token each."""
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
    """Logprobs[2] of (WRONG, RIGHT)."""
    return torch.nn.functional.logsigmoid(torch.stack([-theta, theta]))


def _gradient(theta: torch.Tensor, samples: Sequence[Sample]) -> torch.Tensor:
    """d loss / d theta over all samples of one agent."""
    theta = theta.detach().requires_grad_()
    [[microbatch]] = pack(samples, dp=1, tokens_per_microbatch=2 * len(samples))
    batch = TokenBatch.of(microbatch)
    logprobs = _log_softmax(theta)[batch.labels].to(torch.float32)
    counts = {"num_tokens": response_tokens(samples), "num_sequences": num_sequences(samples)}
    loss, _ = pg_loss(torch.where(batch.mask, logprobs, 0.0), batch, _LOSS, **counts, kl_coef=0.0)
    loss.backward()
    assert theta.grad is not None
    return theta.grad


METHODS: dict[str, Callable[[], Algorithm]] = {"Co-RL": lambda: CoRL(ring=AGENTS), "TTRL": TTRL}


def draw(paths: dict[str, list[tuple[Path2, Path2]]], run: Run, file: Path) -> None:
    """Write a PNG, a panel per method: the predicted field and, over it, (simulated, predicted) paths."""
    figure = Figure(figsize=(5.2 * len(paths), 5.7), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(paths), sharey=True, squeeze=False)[0]
    for panel, (method, pairs) in zip(panels, paths.items(), strict=True):
        mutual = method == "Co-RL"
        _draw_field(panel, run.votes, mutual=mutual)
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


def _draw_field(panel: Axes, votes: int, *, mutual: bool) -> None:
    grid = np.linspace(0.02, 0.98, 25)
    field = np.array([[velocity((a, b), votes, mutual=mutual) for a in grid] for b in grid])
    panel.streamplot(grid, grid, field[..., 0], field[..., 1], color="#bbbbbb", linewidth=0.6, arrowsize=0.7)
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
    for method, make in METHODS.items():
        for start in STARTS:
            found = simulated(make(), start, run)
            expected = predicted(start, run, mutual=method == "Co-RL")
            paths.setdefault(method, []).append((found, expected))
            ends = "  ".join(f"{a:.2f}, {b:.2f} " for a, b in (start, found[-1], expected[-1]))
            print(f"{method:6}  {ends}  {np.abs(found - expected).max():.3f}")
    draw(paths, run, options.out)
    print(options.out)


if __name__ == "__main__":
    main()

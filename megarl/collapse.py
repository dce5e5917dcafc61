"""Signs that a cohort collapses, seen without true answers: metrics that rise and then fall, or leave their bounds.

Rewards made of an agent's own opinion sharpen whatever it believes; accuracy rises at first and falls later, and the
vote, the entropy, the lengths and the rewards' spread turn with it (arXiv 2603.08660). None of these is a proof: the
spread also falls where everybody has become right.

What is judged is a pure function of the rows of metrics.jsonl, so a run that is taken up again judges as one that was
never interrupted.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from megarl.guard_settings import GuardConfig, TurnConfig

Row = Mapping[str, float]  # one step's metrics, under their full names


def signs(rows: Sequence[Row], agents: Sequence[str], cfg: GuardConfig) -> dict[str, str]:
    """agent/<name>/<metric> -> what it shows now, over the last ``cfg.window`` rows that have it; none for most.

    ``rows`` are in the order of steps; the last one is the present step. Where fewer than ``cfg.smooth`` + 2 of them
    have a metric nothing is said of it.
    """
    watched = {
        "label/vote_margin": cfg.vote_margin,
        "policy/entropy": cfg.entropy,
        "engine/response_tokens": cfg.response_tokens,
        "reward/reward_spread": cfg.reward_spread,
    }
    found: dict[str, str] = {}
    for key, turn in ((f"agent/{agent}/{metric}", turn) for agent in agents for metric, turn in watched.items()):
        text = None if turn is None else sign([row[key] for row in rows if key in row][-cfg.window :], turn, cfg.smooth)
        if text is not None:
            found[key] = text
    return found


def new_signs(rows: Sequence[Row], agents: Sequence[str], cfg: GuardConfig) -> list[str]:
    """The signs of the present step, of metrics that showed none at the step before: each turn is told once."""
    before = signs(rows[:-1], agents, cfg)
    return [f"{key} {text}" for key, text in signs(rows, agents, cfg).items() if key not in before]


def sign(series: Sequence[float], turn: TurnConfig, smooth: int) -> str | None:
    """What a metric's course says, in words; None: nothing.

    The running mean over ``smooth`` values is judged. A turn is a peak that lies above the lowest value before it by
    at least ``turn.rise`` of itself and above the present value by at least ``turn.fall`` of itself. Bounds hold for
    the present value.

    Example: ``sign([1, 2, 3, 2, 1], TurnConfig(rise=0.5, fall=0.5), 1)`` is "rose from 1 to 3 and fell to 1".
    """
    values = np.asarray([value for value in series if np.isfinite(value)], np.float64)
    if len(values) < smooth + 2:
        return None
    means = np.convolve(values, np.full(smooth, 1 / smooth), mode="valid")
    now = float(means[-1])
    if turn.least is not None and now < turn.least:
        return f"is {now:.3g}, below {turn.least:g}"
    if turn.most is not None and now > turn.most:
        return f"is {now:.3g}, above {turn.most:g}"
    top = int(means.argmax())
    peak, start = float(means[top]), float(means[: top + 1].min())
    if peak > 0 and peak - start >= turn.rise * peak and peak - now >= turn.fall * peak:
        return f"rose from {start:.3g} to {peak:.3g} and fell to {now:.3g}"
    return None

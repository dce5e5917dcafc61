"""Learning rate as a pure function of the number of a step or update: nothing to save, nothing to restore."""

import math

from megarl.settings import OptimizerConfig, ScheduleConfig


def learning_rate(cfg: OptimizerConfig, index: int, total: int) -> float:
    """Rate after ``index`` of ``total`` steps: linear from 0 during warmup, then from ``cfg.lr`` down to
    ``min_ratio * cfg.lr`` at ``total`` and beyond. Under warmup the rate at index 0 is 0.

    Example: decay=linear, lr=1e-6, total=20 gives 5e-7 at 10 and 4.5e-7 at 11.
    """
    if total < 1 or index < 0:
        raise ValueError(f"index={index} of total={total}: an index from 0 on, and at least one step")
    schedule = cfg.schedule
    warmup = warmup_steps(schedule, total)
    if index < warmup:
        return cfg.lr * index / warmup
    progress = min((index - warmup) / max(total - warmup, 1), 1.0)
    if schedule.decay == "constant":
        left = 1.0
    elif schedule.decay == "linear":
        left = 1.0 - progress
    else:
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    floor = 1.0 if schedule.decay == "constant" else schedule.min_ratio
    return cfg.lr * (floor + (1.0 - floor) * left)


def warmup_steps(schedule: ScheduleConfig, total: int) -> int:
    """Warmup in steps: an integer is that, a share of the run is rounded."""
    if isinstance(schedule.warmup, int):
        return schedule.warmup
    return round(schedule.warmup * total)

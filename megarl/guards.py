"""When a run stops rather than train on: engine and policy disagree, weights are no numbers, a cohort collapses."""

import math
from collections.abc import Mapping

from megarl.collapse import new_signs, signs
from megarl.config import RunConfig
from megarl.log import RunLog, recent
from megarl.types import Metrics


class GuardStop(RuntimeError):
    """The run is unhealthy and was told to stop rather than to train on."""


def check_drift(cfg: RunConfig, log: RunLog, drifts: Mapping[str, tuple[float, float]]) -> None:
    """Stop (or warn) where engine and policy disagree about the tokens that were sampled."""
    for name, (mean, largest) in drifts.items():
        dtype = cfg.agent_at(name).dtype
        limit = cfg.guard.drift_float32 if dtype == "float32" else cfg.guard.drift_bfloat16
        if math.isnan(mean):  # no setting makes sense of it
            raise GuardStop(f"agent {name}: its policy gives logprobs that are no numbers: its weights are spoilt")
        if mean <= limit:
            continue
        text = (
            f"agent {name}: engine and policy differ by {mean:.2g} (mean; at most {largest:.2g}) in the logprobs of "
            f"sampled tokens; the limit for {dtype} is {limit:g}"
        )
        if cfg.guard.on_drift == "stop":
            raise GuardStop(text)
        log.say(f"warning: {text}")


def check_updates(cfg: RunConfig, log: RunLog, updated: Mapping[str, Metrics]) -> None:
    """Warn of updates that were skipped because their gradient was not finite; stop where that goes on."""
    for name, metrics in updated.items():
        skipped = metrics.get("skipped_steps", 0.0)
        if not skipped:
            continue
        key, most = f"agent/{name}/policy/skipped_steps", cfg.guard.skipped_in_a_row
        rows = recent(log.run_dir, most - 1) if most > 1 else []
        text = f"agent {name}: {skipped:.0f} optimizer steps were skipped, the gradient was not finite"
        if len(rows) == most - 1 and all(row.get(key, 0.0) > 0 for row in rows):
            raise GuardStop(f"{text}, for the {most}. step in a row (guard.skipped_in_a_row)")
        log.say(f"warning: {text}")


def check_collapse(cfg: RunConfig, log: RunLog) -> None:
    """Stop (or warn) where the metrics of the steps so far show signs of collapse."""
    if cfg.guard.on_collapse == "off":
        return
    # a step's metrics are those of the weights before its update, so a stop comes before more is spoilt
    rows = [*recent(log.run_dir, cfg.guard.window), log.row]
    log.metrics({"cohort/collapse_signs": float(len(signs(rows, cfg.seats, cfg.guard)))})
    for text in new_signs(rows, cfg.seats, cfg.guard):
        if cfg.guard.on_collapse == "stop":
            raise GuardStop(f"sign of collapse: {text} (guard.on_collapse=warn goes on)")
        log.say(f"warning: sign of collapse: {text}")

"""`megarl train`. Read this first: one step of a cohort, in the order in which it happens."""

from collections.abc import Mapping
from pathlib import Path

from megarl import checkpoint
from megarl.advantages import overlong, spread
from megarl.agents import Agents, learning, measure, open_agents, readers, reshard_all, rolling, update
from megarl.collapse import new_signs, signs
from megarl.config import RunConfig
from megarl.deck import Cursor, Deck, open_deck
from megarl.diagnostics import diagnose, drift, twins
from megarl.evaluation.ask import evaluate, open_evaluation
from megarl.log import RunLog, recent
from megarl.refill import roll_out, trained
from megarl.types import Need


class GuardStop(RuntimeError):
    """The run is unhealthy and was told to stop rather than to train on."""


def train(cfg: RunConfig, *, resume: Path | None = None) -> Path:
    """Run ``cfg.steps`` of label -> reward -> update over every agent; returns the run directory."""
    run_dir, start = prepare(cfg, resume)
    log = RunLog(cfg, run_dir, start)
    try:
        with open_agents(cfg, run_dir) as agents:
            _train(cfg, agents, log, start)
        log.console.print(log.summary(tuple(dict.fromkeys((*cfg.agents, *cfg.seats)))))
    finally:
        log.close()
    return run_dir


def _train(cfg: RunConfig, agents: Agents, log: RunLog, start: int) -> None:
    deck = open_deck(cfg.data, readers(agents), cfg.seed)
    exam = open_evaluation(cfg, agents)
    algo, limits = cfg.algo, {seat: a.sampling.max_tokens for a in agents.values() for seat in a.seats}
    needs = (algo.needs | frozenset[Need](("entropy",))) - {"gold"}
    greet(log, agents, deck)
    cursor = Cursor()
    if start:
        cursor = checkpoint.load(log.run_dir / "checkpoints" / f"step_{start}", agents, deck)
    reshard_all(agents, start, cfg.reshard.bucket_bytes, {})

    for step in range(start, cfg.steps):
        with log.step(step):
            # prompts -> rollouts (every turn under the same weights)
            with rolling(agents):
                if exam and cfg.evaluation.due(step):
                    with log.phase("evaluate"):
                        log.agents("eval", evaluate(cfg, agents, exam, step))
                seen, cursor = roll_out(cfg, agents, deck, cursor, step, log)

            with learning(agents):
                # votes -> pseudo-labels -> rewards -> advantages
                with log.phase("measure"):
                    stats = measure(agents, seen, needs, log.seconds)
                guard(cfg, log, drift(seen, stats))
                labels = algo.label(seen, deck.gold if "gold" in algo.needs else None)
                groups = algo.reward(seen, labels, stats)
                log.metrics(diagnose(seen, labels, groups, deck.gold, stats))
                watch(cfg, log)
                training, teaching = trained(cfg, groups)
                log.agents("reward", teaching)
                training = overlong(training, seen, limits, cfg.reward)
                samples = spread(training, seen, stats, cfg.advantage, cfg.batch.train_samples_per_prompt)
                for text in twins(seen):
                    log.say(f"warning: {text}")
                # loss -> update
                with log.phase("update"):
                    log.agents("policy", update(agents, samples, cfg, step, log.seconds))

                # new weights -> engines
                with log.phase("reshard"):
                    log.agents("reshard", reshard_all(agents, step + 1, cfg.reshard.bucket_bytes, log.seconds))

            log.samples(step, seen, labels, training, samples, stats)
            if due(cfg, step + 1):
                with log.phase("save"):
                    checkpoint.save(log.run_dir, step + 1, agents, deck, cursor, cfg.checkpoint.keep)

    if exam:
        with log.step(cfg.steps), rolling(agents):
            log.agents("eval", evaluate(cfg, agents, exam, cfg.steps))


def prepare(cfg: RunConfig, resume: Path | None) -> tuple[Path, int]:
    """The run directory and the number of steps already done in it."""
    if resume is None:
        if cfg.run_dir.exists():
            raise ValueError(
                f"{cfg.run_dir} exists already: choose another name=..., or go on with --resume {cfg.run_dir}"
            )
        return cfg.run_dir, 0
    found = checkpoint.find(resume)
    for name in found.skipped:
        print(f"{resume}/checkpoints/{name}: incomplete, passed over")
    if found.step > cfg.steps:
        raise ValueError(f"{found.path} is past the end of the run: steps={cfg.steps}")
    print(f"{resume}: resuming after step {found.step} of {cfg.steps}")
    return resume, found.step


def due(cfg: RunConfig, done: int) -> bool:
    """Is a checkpoint to be written once ``done`` steps are done?"""
    every = cfg.checkpoint.every_steps
    return every is not None and (done % every == 0 or done == cfg.steps)


def greet(log: RunLog, agents: Agents, deck: Deck) -> None:
    """Tell the user what was derived rather than asked for."""
    log.say(f"{len(deck)} prompts; {deck.filtered} left out as too long for data.max_prompt_tokens")
    for name, agent in agents.items():
        engine = f"{agent.config.replicas} x {agent.config.engine.backend} TP{agent.config.engine.tp}"
        log.say(
            f"{name}: {agent.config.model}, {agent.config.backend} {agent.config.layout}, {engine}, "
            f"stop ids {list(agent.chat.stop_ids)}"
        )


def watch(cfg: RunConfig, log: RunLog) -> None:
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


def guard(cfg: RunConfig, log: RunLog, drifts: Mapping[str, tuple[float, float]]) -> None:
    """Stop (or warn) where engine and policy disagree about the tokens that were sampled."""
    for name, (mean, largest) in drifts.items():
        dtype = cfg.agent_at(name).dtype
        limit = cfg.guard.drift_float32 if dtype == "float32" else cfg.guard.drift_bfloat16
        if mean <= limit:  # false for NaN too
            continue
        text = (
            f"agent {name}: engine and policy differ by {mean:.2g} (mean; at most {largest:.2g}) in the logprobs of "
            f"sampled tokens; the limit for {dtype} is {limit:g}"
        )
        if cfg.guard.on_drift == "stop":
            raise GuardStop(text)
        log.say(f"warning: {text}")

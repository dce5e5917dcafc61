"""`megarl train`. Read this first: one step of a cohort, in the order in which it happens."""

from contextlib import closing
from functools import partial
from pathlib import Path

from megarl import checkpoint
from megarl.advantages import overlong, spread
from megarl.agents import Agents, learning, measure, open_agents, open_chats, readers, reshard_all, rolling, update
from megarl.config import RunConfig
from megarl.deck import Cursor, Deck, open_deck
from megarl.diagnostics import diagnose, drift, twins
from megarl.evaluation.ask import evaluate, open_evaluation
from megarl.guards import check_collapse, check_drift, check_updates
from megarl.leaving import Left, reason_to_leave
from megarl.log import RunLog
from megarl.refill import roll_out, say_idle, trained
from megarl.run_dir import claim
from megarl.types import Need


def train(cfg: RunConfig, *, resume: Path | None = None) -> Path:
    """Run ``cfg.steps`` of label -> reward -> update over every agent; returns the run directory."""
    chats = open_chats(cfg)
    deck = open_deck(cfg.data, readers(cfg, chats), cfg.seed, gold_needed="gold" in cfg.algo.needs)
    exam = open_evaluation(cfg, chats)
    deck.check_size(cfg.batch.prompts_per_step)
    with (
        claim(cfg, resume, deck) as claimed,
        closing(RunLog(cfg, claimed.path, claimed.start, claimed.check)) as log,
    ):
        with open_agents(cfg, claimed.path, chats) as agents:
            begin = partial(checkpoint.begin, log.run_dir, agents, deck, cfg.checkpoint.keep, log.still_ours)
            with checkpoint.Saver(begin, background=cfg.checkpoint.background) as saver:
                _train(cfg, agents, log, deck, exam, saver, claimed.start)
        log.console.print(log.summary(tuple(dict.fromkeys((*cfg.agents, *cfg.seats)))))
    return claimed.path


def _train(
    cfg: RunConfig, agents: Agents, log: RunLog, deck: Deck, exam: Deck | None, saver: checkpoint.Saver, start: int
) -> None:
    algo, limits = cfg.algo, {seat: a.sampling.max_tokens for a in agents.values() for seat in a.seats}
    needs = (algo.needs | frozenset[Need](("entropy",))) - {"gold"}
    greet(cfg, log, agents, deck)
    cursor = checkpoint.load(log.run_dir / "checkpoints" / f"step_{start}", agents) if start else Cursor()
    log.begin(cfg, start)
    reshard_all(agents, start, {})

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
                check_drift(cfg, log, drift(seen, stats))
                labels = algo.label(seen, deck.gold if "gold" in algo.needs else None)
                groups = algo.reward(seen, labels, stats)
                log.metrics(diagnose(seen, labels, groups, deck.gold, stats))
                check_collapse(cfg, log)
                training, teaching = trained(cfg, groups)
                log.agents("reward", teaching)
                say_idle(cfg, log, training)
                training = overlong(training, seen, limits, cfg.reward)
                samples = spread(training, seen, stats, cfg.advantage, cfg.batch.train_samples_per_prompt)
                for text in twins(seen):
                    log.warn(text)
                saver.settle()  # what the last step saved had this step's rollouts to be written
                # loss -> update
                with log.phase("update"):
                    updated = update(agents, samples, cfg, step, log.seconds)
                log.agents("policy", updated)
                check_updates(cfg, log, updated)

                # new weights -> engines
                with log.phase("reshard"):
                    log.agents("reshard", reshard_all(agents, step + 1, log.seconds))

            log.samples(step, seen, labels, training, samples, stats)
            leave = None if step + 1 == cfg.steps else reason_to_leave(log.elapsed, log.longest)
            if due(cfg, step + 1) or leave:
                with log.phase("save"):
                    saver.save(step + 1, cursor, now=leave is not None or step + 1 == cfg.steps)
        if leave:
            raise Left(f"{leave}: checkpointed after step {step + 1} of {cfg.steps}")

    if exam:
        with log.step(cfg.steps), rolling(agents):
            log.agents("eval", evaluate(cfg, agents, exam, cfg.steps))


def due(cfg: RunConfig, done: int) -> bool:
    """Is a checkpoint to be written once ``done`` steps are done?"""
    every = cfg.checkpoint.every_steps
    return every is not None and (done % every == 0 or done == cfg.steps)


def greet(cfg: RunConfig, log: RunLog, agents: Agents, deck: Deck) -> None:
    """Tell the user what was derived rather than asked for."""
    unanswered = f", {deck.unanswered} as they have no true answer" if deck.unanswered else ""
    log.say(f"{len(deck)} prompts; {deck.filtered} left out as too long for data.max_prompt_tokens{unanswered}")
    if not deck.shuffle and (rest := len(deck) % cfg.batch.prompts_per_step):
        log.say(f"warning: with data.shuffle=false the last {rest} prompts are never dealt: no step takes half a batch")
    for name, agent in agents.items():
        engine = f"{agent.config.replicas} x {agent.config.engine.backend} TP{agent.config.engine.tp}"
        log.say(
            f"{name}: {agent.config.model}, {agent.config.backend} {agent.config.layout}, {engine}, on {agent.device}, "
            f"stop ids {list(agent.chat.stop_ids)}"
        )

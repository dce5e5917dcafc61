"""One step's rollouts. With batch.refill_rounds, more of them until enough prompts teach (DAPO's dynamic sampling).

A prompt whose rewards are all equal has no gradient. Others are dealt in its place, to all agents alike, because an
agent's label may be another one's vote; the deck's cursor moves on by what was dealt. The rounds are bounded and end
with the epoch, and what is missing then is said and counted: such a step trains on fewer prompts, or on none (no
update; step, learning rate and deck go on).
"""

from collections.abc import Mapping, Sequence

from megarl.advantages import differing, only
from megarl.agents import Agents, fitting, generate, seats
from megarl.answers.read import read_answers
from megarl.config import RunConfig
from megarl.deck import Cursor, Deck
from megarl.log import RunLog
from megarl.types import Group, Metrics, Prompt, Rollout, RolloutKey, Seed

TooLong = set[tuple[str, RolloutKey | None]]  # (agent, parent) of follow-ups that were not asked


def roll_out(
    cfg: RunConfig, agents: Agents, deck: Deck, cursor: Cursor, step: int, log: RunLog
) -> tuple[list[Rollout], Cursor]:
    """All rollouts of a step, every turn of every round, and the deck's cursor behind them."""
    too_long: TooLong = set()
    asks, cursor = deck.deal(cursor, cfg.batch.prompts_per_step, seats(agents))
    seen = converse(cfg, agents, asks, step, log, too_long)
    if cfg.batch.refill_rounds is not None:
        cursor = _refill(cfg, agents, deck, cursor, step, log, seen, too_long)
    for name in agents:
        if count := sum(agent == name for agent, _ in too_long):
            log.agents("engine", {name: {"prompts_too_long": float(count)}})
    return seen, cursor


def converse(
    cfg: RunConfig, agents: Agents, asks: Sequence[Prompt], step: int, log: RunLog, too_long: TooLong
) -> list[Rollout]:
    """Ask, read the answers, and ask again for as long as the method has follow-ups; all under the same weights."""
    seen: list[Rollout] = []
    while asks:
        with log.phase("generate"):
            answered = generate(agents, asks, Seed(run=cfg.seed, step=step), log.seconds)
        seen += read_answers(answered, cfg.answers)
        asks = fitting(agents, cfg.algo.follow_up(seen), too_long)
    return seen


def trained(cfg: RunConfig, groups: Sequence[Group]) -> tuple[list[Group], dict[str, Metrics]]:
    """The groups that train: all, or (dynamic sampling) those of each agent's first prompts whose rewards differ.

    Beside them, by agent, ``prompts_teaching``: how many prompts have rewards that differ among the members that train.
    """
    found = differing(groups, cfg.batch.train_samples_per_prompt)
    counts: dict[str, Metrics] = {name: {"prompts_teaching": float(len(found.get(name, ())))} for name in cfg.seats}
    if cfg.batch.refill_rounds is None:
        return list(groups), counts
    return only(groups, {agent: uids[: cfg.batch.prompts_per_step] for agent, uids in found.items()}), counts


def say_idle(cfg: RunConfig, log: RunLog, groups: Sequence[Group]) -> None:
    """Say which agents train on nothing in this step: every prompt of theirs was dropped by the method's filter."""
    busy = {key.agent for g in groups for key in g.rollouts}
    for name in cfg.seats:
        if name not in busy and cfg.batch.refill_rounds is None:  # a refill has said so, with what it tried
            log.say(f"warning: agent {name}: algo.name={cfg.algo.name} dropped every prompt of this step: no update")


def _refill(
    cfg: RunConfig,
    agents: Agents,
    deck: Deck,
    cursor: Cursor,
    step: int,
    log: RunLog,
    seen: list[Rollout],
    too_long: TooLong,
) -> Cursor:
    """Add further prompts' rollouts to ``seen`` while any agent lacks prompts that teach; the cursor behind them."""
    rounds, dealt, ended = 0, cfg.batch.prompts_per_step, False
    missing = _missing(cfg, seen, deck)
    while max(missing.values()) and rounds < (cfg.batch.refill_rounds or 0) and not ended:
        asks, cursor = deck.deal_more(cursor, max(missing.values()), seats(agents))
        ended = not asks
        if asks:
            rounds, dealt = rounds + 1, dealt + len(asks) // len(cfg.seats)
            seen += converse(cfg, agents, asks, step, log, too_long)
            missing = _missing(cfg, seen, deck)
    log.metrics({"cohort/refill_rounds": float(rounds), "cohort/prompts_dealt": float(dealt)})
    log.agents("reward", {name: {"prompts_missing": float(count)} for name, count in missing.items()})
    wanted = cfg.batch.prompts_per_step
    why = "the epoch has no more" if ended else f"batch.refill_rounds={cfg.batch.refill_rounds}"
    for name, count in missing.items():
        if count:
            log.say(
                f"warning: agent {name} lacks {count} of {wanted} prompts whose rewards differ after {rounds} refills "
                f"and {dealt} prompts ({why}): " + (f"it trains on {wanted - count}" if count < wanted else "no update")
            )
    return cursor


def _missing(cfg: RunConfig, seen: Sequence[Rollout], deck: Deck) -> Mapping[str, int]:
    """Agent -> how many prompts it lacks whose rewards differ."""
    labels = cfg.algo.label(seen, deck.gold if "gold" in cfg.algo.needs else None)
    found = differing(cfg.algo.reward(seen, labels, {}), cfg.batch.train_samples_per_prompt)
    return {name: max(cfg.batch.prompts_per_step - len(found.get(name, ())), 0) for name in cfg.seats}

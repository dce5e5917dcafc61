"""One step's rollouts. With batch.refill_rounds, more of them until enough prompts teach (DAPO's dynamic sampling).

A prompt whose rewards are all equal has no gradient. Others are dealt in its place, to all agents alike, because an
agent's label may be another one's vote; the deck's cursor moves on by what was dealt. The rounds are bounded and end
with the epoch, and what is missing then is said and counted: such a step trains on fewer prompts, or on none (no
update; step, learning rate and deck go on).
"""

from collections.abc import Mapping, Sequence

from megarl.advantages import differing, only
from megarl.agents import Agents, generate
from megarl.answers.read import read_answers
from megarl.config import RunConfig
from megarl.deck import Cursor, Deck
from megarl.log import RunLog
from megarl.types import Group, Metrics, Prompt, Rollout, Seed


def roll_out(
    cfg: RunConfig, agents: Agents, deck: Deck, cursor: Cursor, step: int, log: RunLog
) -> tuple[list[Rollout], Cursor]:
    """All rollouts of a step, every turn of every round, and the deck's cursor behind them."""
    seats = {name: agent.seat for name, agent in agents.items()}
    asks, cursor = deck.deal(cursor, cfg.batch.prompts_per_step, seats)
    seen = converse(cfg, agents, asks, step, log)
    if cfg.batch.refill_rounds is None:
        return seen, cursor
    rounds, dealt = 0, cfg.batch.prompts_per_step
    missing = shortfall(cfg, seen, deck, agents)
    while rounds < cfg.batch.refill_rounds and max(missing.values()):
        asks, cursor = deck.deal_more(cursor, max(missing.values()), seats)
        if not asks:
            break
        rounds, dealt = rounds + 1, dealt + len(asks) // len(agents)
        seen += converse(cfg, agents, asks, step, log)
        missing = shortfall(cfg, seen, deck, agents)
    log.metrics({"cohort/refill_rounds": rounds, "cohort/prompts_dealt": dealt})
    log.agents("reward", {name: {"prompts_missing": count} for name, count in missing.items()})
    for name, count in missing.items():
        if count:
            log.say(_short(cfg, name, count, rounds, dealt, ended=not asks))
    return seen, cursor


def converse(cfg: RunConfig, agents: Agents, asks: Sequence[Prompt], step: int, log: RunLog) -> list[Rollout]:
    """Ask, read the answers, and ask again for as long as the method has follow-ups; all under the same weights."""
    seen: list[Rollout] = []
    while asks:
        with log.phase("generate"):
            answered = generate(agents, asks, Seed(run=cfg.seed, step=step), log.seconds)
        seen += read_answers(answered, cfg.answers)
        asks = cfg.algo.follow_up(seen)
    return seen


def shortfall(cfg: RunConfig, seen: Sequence[Rollout], deck: Deck, agents: Agents) -> Mapping[str, int]:
    """agent -> how many prompts it lacks whose rewards differ."""
    labels = cfg.algo.label(seen, deck.gold if "gold" in cfg.algo.needs else None)
    found = differing(cfg.algo.reward(seen, labels, {}), cfg.batch.train_samples_per_prompt)
    return {name: max(cfg.batch.prompts_per_step - len(found.get(name, ())), 0) for name in agents}


def trained(cfg: RunConfig, groups: Sequence[Group]) -> tuple[list[Group], dict[str, Metrics]]:
    """The groups that train: all, or (dynamic sampling) those of each agent's first prompts whose rewards differ.

    Beside them, by agent, ``prompts_teaching``: how many prompts have rewards that differ among the members that train.
    """
    found = differing(groups, cfg.batch.train_samples_per_prompt)
    counts: dict[str, Metrics] = {name: {"prompts_teaching": float(len(found.get(name, ())))} for name in cfg.agents}
    if cfg.batch.refill_rounds is None:
        return list(groups), counts
    return only(groups, {agent: uids[: cfg.batch.prompts_per_step] for agent, uids in found.items()}), counts


def _short(cfg: RunConfig, agent: str, missing: int, rounds: int, dealt: int, *, ended: bool) -> str:
    wanted = cfg.batch.prompts_per_step
    why = "the epoch has no more" if ended else f"batch.refill_rounds={cfg.batch.refill_rounds}"
    rest = f"the step trains on {wanted - missing}" if missing < wanted else "no update"
    return (
        f"warning: agent {agent} lacks {missing} of {wanted} prompts whose rewards differ after {rounds} refills and "
        f"{dealt} prompts ({why}): {rest}"
    )

"""Asking the cohort's engines: no learning, and nothing here reaches a reward."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megarl.agents import Agents, generate
from megarl.config import RunConfig
from megarl.deck import Deck, Seat, open_deck
from megarl.evaluation.protocol import revisions, verifications
from megarl.evaluation.score import VERIFICATION, Rules, score
from megarl.settings import DataConfig, EvaluationConfig
from megarl.types import Metrics, Prompt, Rollout, Seed

_STEP = -1  # of the seeds: no step of training


@dataclass(frozen=True, slots=True)
class Asked:
    """What came back, and how many follow-up turns were too long to be asked."""

    rollouts: list[Rollout]
    too_long: int


def ask(agents: Agents, prompts: Sequence[Prompt], settings: EvaluationConfig, seed: int, longest_prompt: int) -> Asked:
    """Rollouts of the prompts, with ``settings.revise`` those of the turns that follow from them.

    A follow-up of more than ``longest_prompt`` tokens is left out: its answer stands as it is.
    """
    sampled = {name: replace(agent, sampling=settings.sampling) for name, agent in agents.items()}

    def go(asked: Sequence[Prompt]) -> list[Rollout]:
        return generate(sampled, asked, Seed(run=seed, step=_STEP), {}) if asked else []

    def fitting(wanted: list[Prompt]) -> list[Prompt]:
        return [p for p in wanted if len(agents[p.agent].chat.render(p.messages)) <= longest_prompt]

    out = go(prompts)
    if not settings.revise:
        return Asked(out, 0)
    wanted = verifications(out)
    checked = go(fitting(wanted))
    again = revisions(checked, settings.verdict)
    revised = go(fitting(again))
    return Asked([*out, *checked, *revised], len(wanted) + len(again) - len(checked) - len(revised))


def seats(agents: Agents, data: DataConfig, samples: int) -> dict[str, Seat]:
    """Every agent's seat at a problem set: in its own view where the set has that, else in the view "original"."""
    out = {}
    for name, agent in agents.items():
        view = agent.config.view if agent.config.view in data.views else "original"
        if view not in data.views:
            raise ValueError(
                f"agents.{name}.view={agent.config.view}: {data.path} has neither this view nor one named original; "
                f"its views: {', '.join(data.views)}"
            )
        out[name] = Seat(view=view, n=samples)
    return out


def deck_of(agents: Agents, data: DataConfig, seed: int) -> Deck:
    """The problems that fit every agent, each in its own wording."""
    views = {name: seat.view for name, seat in seats(agents, data, 1).items()}
    return open_deck(data, {name: (views[name], agent.chat) for name, agent in agents.items()}, seed)


def open_evaluation(cfg: RunConfig, agents: Agents) -> Deck | None:
    """The deck of a run's own evaluation, if it has one."""
    data = cfg.evaluation.data
    return None if data is None else deck_of(agents, data, cfg.seed)


def evaluate(cfg: RunConfig, agents: Agents, deck: Deck, step: int) -> dict[str, Metrics]:
    """A run's own evaluation, per agent: ``accuracy`` (mean over prompts and samples), ``answered`` (share with a
    readable answer), and what ``score`` knows of verifications where evaluation.revise asks for them.

    The seeds do not depend on the step, so that two evaluations differ by the weights alone.
    """
    settings = cfg.evaluation
    assert deck.gold is not None and settings.data is not None
    prompts = deck.everything(seats(agents, settings.data, settings.samples_per_prompt))
    engines_take = cfg.data.max_prompt_tokens + min(cfg.sampling_of(name).max_tokens for name in agents)
    asked = ask(agents, prompts, settings, cfg.seed, engines_take - settings.sampling.max_tokens)
    rules = replace(Rules.of(settings, cfg.answers, cfg.seed), pass_at=(1,), resamples=1)
    scores = score(asked.rollouts, deck.gold, rules)
    names = {f"avg@{settings.samples_per_prompt}": "accuracy", "answered": "answered"}
    names |= {name: name for name in VERIFICATION if name != "acc_first"}
    return {
        agent: {names[metric]: found.value for metric, found in scores[agent].items() if metric in names}
        for agent in agents
    }

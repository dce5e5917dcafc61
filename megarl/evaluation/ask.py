"""Asking the cohort's engines: no learning, and nothing here reaches a reward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megarl.agents import Agents, fitting, generate
from megarl.algos.coverrl import CoVerRL, Requests, revise_prompt, verify_prompt
from megarl.answers.read import read_answers
from megarl.chat import Chat
from megarl.config import RunConfig
from megarl.deck import Deck, Seat, open_deck
from megarl.evaluation.score import VERIFICATION, Rules, score
from megarl.settings import AgentConfig, AnswersConfig, DataConfig, EvaluationConfig
from megarl.types import Metrics, Prompt, Rollout, RolloutKey, Seed

_STEP = -1  # of the seeds: no step of training


@dataclass(frozen=True, slots=True)
class Asked:
    """What came back, and how many follow-up turns were too long to be asked."""

    rollouts: list[Rollout]
    too_long: int


def ask(
    agents: Agents,
    prompts: Sequence[Prompt],
    settings: EvaluationConfig,
    seed: int,
    *,
    answers: AnswersConfig,
    requests: Requests,
) -> Asked:
    """Rollouts of the prompts; with ``settings.revise`` those of one verification of each answer, and of one revision
    where it says "wrong".

    A follow-up that is too long for its agent is not asked: the answer stands as it is.
    """
    sampled = {name: replace(agent, sampling=settings.sampling) for name, agent in agents.items()}
    too_long: set[tuple[str, RolloutKey | None]] = set()

    def go(asked: Sequence[Prompt]) -> list[Rollout]:
        rollouts = generate(sampled, asked, Seed(run=seed, step=_STEP), {}) if asked else []
        return read_answers(rollouts, answers)

    out = go(prompts)
    if settings.revise:
        checked = go(fitting(agents, [verify_prompt(r, 1, requests) for r in out], too_long))
        wrong = [r for r in checked if r.answer == "wrong"]
        out += checked + go(fitting(agents, [revise_prompt(r, 1, requests) for r in wrong], too_long))
    return Asked(out, len(too_long))


def seats(agents: Mapping[str, AgentConfig], data: DataConfig, samples: int) -> dict[str, Seat]:
    """Every agent's seat at a problem set: in its own view where the set has that, else in the view "original"."""
    out = {}
    for name, agent in agents.items():
        view = agent.view if agent.view in data.views else "original"
        if view not in data.views:
            raise ValueError(
                f"agents.{name}.view={agent.view}: {data.path} has neither this view nor one named original; "
                f"its views: {', '.join(data.views)}"
            )
        out[name] = Seat(view=view, n=samples)
    return out


def deck_of(cfg: RunConfig, chats: Mapping[str, Chat], data: DataConfig) -> Deck:
    """The problems that fit every agent, each in its own wording."""
    seated = seats(cfg.agents, data, 1)
    readers = {name: (seated[name].view, chat) for name, chat in chats.items()}
    return open_deck(data, readers, cfg.seed, gold_needed=True)


def open_evaluation(cfg: RunConfig, chats: Mapping[str, Chat]) -> Deck | None:
    """The deck of a run's own evaluation, if it has one."""
    data = cfg.evaluation.data
    return None if data is None else deck_of(cfg, chats, data)


def evaluate(cfg: RunConfig, agents: Agents, deck: Deck, step: int) -> dict[str, Metrics]:
    """A run's own evaluation, per agent: ``accuracy`` (mean over prompts and samples), ``answered`` (share with a
    readable answer), and what ``score`` knows of verifications where evaluation.revise asks for them.

    The seeds do not depend on the step, so that two evaluations differ by the weights alone.
    """
    settings = cfg.evaluation
    assert deck.gold is not None and settings.data is not None
    prompts = deck.everything(seats(cfg.agents, settings.data, settings.samples_per_prompt))
    requests = cfg.algo.requests if isinstance(cfg.algo, CoVerRL) else Requests()
    # later turns must leave room for a response in engines that were built for training
    room = {name: cfg.max_prompt_tokens + cfg.sampling_of(name).max_tokens for name in agents}
    seated = {n: replace(a, max_prompt_tokens=room[n] - settings.sampling.max_tokens) for n, a in agents.items()}
    asked = ask(seated, prompts, settings, cfg.seed, answers=cfg.answers, requests=requests)
    rules = replace(Rules.of(settings, cfg.answers, cfg.seed), pass_at=(1,), resamples=1)
    scores = score(asked.rollouts, deck.gold, rules)
    names = {f"avg@{settings.samples_per_prompt}": "accuracy", "answered": "answered"}
    names |= {name: name for name in VERIFICATION if name != "acc_first"}
    return {
        agent: {names[metric]: found.value for metric, found in scores[agent].items() if metric in names}
        for agent in agents
    }

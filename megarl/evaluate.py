"""Sampled accuracy against true answers: the cohort's engines, no learning, nothing that reaches a reward."""

from dataclasses import replace

from megarl.agents import Agents, generate
from megarl.answers.equal import equal
from megarl.answers.read import read_answers
from megarl.config import RunConfig
from megarl.deck import Deck, open_deck
from megarl.types import Metrics, Seed


def open_evaluation(cfg: RunConfig, agents: Agents) -> Deck | None:
    """The evaluation's own deck, if the run has one."""
    if cfg.evaluation.data is None:
        return None
    return open_deck(cfg.evaluation.data, {name: (a.config.view, a.chat) for name, a in agents.items()}, cfg.seed)


def evaluate(cfg: RunConfig, agents: Agents, deck: Deck, step: int) -> dict[str, Metrics]:
    """Per agent: ``accuracy`` (mean over prompts and samples) and ``answered`` (share with a readable answer).

    The seeds do not depend on the step, so that two evaluations differ by the weights alone.
    """
    assert deck.gold is not None
    settings = cfg.evaluation
    seats = {name: replace(a.seat, n=settings.samples_per_prompt) for name, a in agents.items()}
    asked = {name: replace(a, sampling=settings.sampling) for name, a in agents.items()}
    prompts = deck.everything(seats)
    rollouts = read_answers(generate(asked, prompts, Seed(run=cfg.seed, step=-1), {}), cfg.answers)
    results: dict[str, Metrics] = {}
    for name in agents:
        own = [r for r in rollouts if r.prompt.agent == name]
        right = sum(r.answer is not None and equal(r.answer, deck.gold[r.prompt.uid]) for r in own)
        answered = sum(r.answer is not None for r in own)
        results[name] = {"accuracy": right / len(own), "answered": answered / len(own)}
    return results

"""CoVerRL on data-parallel ranks: counts, filter, anchors, rewards and weights do not know how many there are.

Two recorded steps are served again to a policy of 1, 2 and 4 data-parallel ranks: every turn, the vote, the filter, the
groups, the update. The number of samples is no multiple of 4 or 2, so that a rule which cuts would cut.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from megarl import rollouts
from megarl.advantages import spread
from megarl.algos.coverrl import SOLVE, CoVerRL, Requests
from megarl.answers.read import read_answers
from megarl.answers.verdict import CORRECT, WRONG
from megarl.backends.megatron.policy import MegatronPolicy
from megarl.backends.replay import ReplayEngine
from megarl.chat import Chat, open_chat
from megarl.diagnostics import diagnose
from megarl.settings import AdvantageConfig, AnswersConfig, BatchConfig, LayoutConfig, LossConfig, SamplingConfig
from megarl.types import Group, Message, Metrics, Prompt, Rollout, Sample, Seed
from tests.megatron import data

STEPS, LR, TOKENS = 2, 0.02, 512
ALGO = CoVerRL(positives=3, revisions=3, requests=Requests(verify="Check it.", revise="Again."))
GOLD = {"q0": "7", "q1": "7", "q2": "8", "q3": "9", "q4": "7"}
MEASURED = ("policy/entropy", "policy/logprob_drift_mean", "policy/logprob_drift_max")  # floats of a forward pass
Keep = Callable[[list[Sample]], list[Sample]]


def questions() -> list[Prompt]:
    return [
        Prompt(agent="a", uid=uid, role="solve", messages=(Message("user", f"{uid}: 3+4?{SOLVE[:8]}"),), n=7)
        for uid in GOLD
    ]


def converse(say: Callable[[Sequence[Prompt]], list[Rollout]]) -> list[Rollout]:
    seen: list[Rollout] = []
    asks = questions()
    while asks:
        seen += read_answers(say(asks), AnswersConfig())
        asks = ALGO.follow_up(seen)
    return seen


@pytest.fixture(scope="module")
def recorded(models, tmp_path_factory):
    """A run's folder with the rollouts of all steps, drawn at random: right and wrong, malformed, confirmed and not."""
    run, chat = tmp_path_factory.mktemp("run"), open_chat(str(models["qwen2"]))
    for step in range(STEPS):
        random = np.random.default_rng(24 + step)
        seen = converse(lambda asks, random=random, step=step: _drawn(asks, chat, random, step))
        rollouts.write(rollouts.step_path(run, step), seen, step=step)
    return run


def _drawn(asks: Sequence[Prompt], chat: Chat, random: np.random.Generator, version: int) -> list[Rollout]:
    texts = {
        "solve": ("\\boxed{7}", "so \\boxed{7}", "\\boxed{8}", "\\boxed{9}", "?"),
        "verify": (CORRECT, WRONG, "hm"),
    }
    odds = {"solve": (0.3, 0.25, 0.2, 0.15, 0.1), "verify": (0.6, 0.3, 0.1)}
    drawn = []
    for prompt in asks:
        role = "verify" if prompt.role == "verify" else "solve"
        for index in range(prompt.n):
            text = str(random.choice(texts[role], p=odds[role]))
            ids = np.array([*chat.tokenizer.encode(text, add_special_tokens=False), chat.stop_ids[0]], np.int32)
            drawn.append(
                Rollout(
                    prompt=prompt,
                    index=index,
                    prompt_ids=chat.render(prompt.messages),
                    token_ids=ids,
                    logprobs=random.normal(-4.0, 1.0, len(ids)).astype(np.float32),
                    text=text,
                    stop="end",
                    version=version,
                )
            )
    return drawn


@dataclass(frozen=True)
class Trained:
    """What one policy made of the recorded steps, step by step, and the weights it ended with."""

    roles: list[Counter[str]]  # rollouts of every turn
    groups: list[list[Group]]
    samples: list[list[Sample]]
    metrics: list[Metrics]  # of the diagnostics
    updates: list[Metrics]
    weights: dict[str, torch.Tensor]


def train(policy: MegatronPolicy, run, keep: Keep = list) -> Trained:
    """The loop of ``megarl train`` over recorded rollouts; ``keep`` may lose samples, as a broken trainer does."""
    engine, out = ReplayEngine(run), Trained([], [], [], [], [], {})
    for step in range(STEPS):
        engine.begin_refit()
        engine.finish_refit(step)
        ask = Seed(run=0, step=step)
        seen = converse(lambda asks, ask=ask: engine.generate(asks, ask, SamplingConfig()))
        stats = policy.measure(seen, frozenset({"entropy"}))
        labels = ALGO.label(seen, None)
        groups = ALGO.reward(seen, labels, stats)
        samples = spread(groups, seen, stats, AdvantageConfig())
        out.roles.append(Counter(r.prompt.role for r in seen))
        out.groups.append(groups)
        out.samples.append(samples)
        out.metrics.append(diagnose(seen, labels, groups, GOLD, stats))
        batch = BatchConfig(tokens_per_microbatch=TOKENS)
        out.updates.append(policy.update(keep(samples), LossConfig(clip_high=0.28), batch, [LR, LR]))
    return replace(out, weights=data.weights(policy))


@pytest.fixture(scope="module")
def alone():
    """What one rank made of it; filled on first use."""
    return []


@pytest.fixture
def one_rank(alone, models, policy, recorded):
    if not alone:
        alone.append(train(policy(models["qwen2"], tokens=TOKENS)[0], recorded))
    return alone[0]


def test_the_record_holds_every_case(one_rank):
    """Else the comparisons below would compare little."""
    keys = {g.key[2:3] if g.key[2] == "revise" else g.key[2:] for groups in one_rank.groups for g in groups}
    assert keys == {("solve",), ("verify", "positive"), ("verify", "negative"), ("revise",)}
    for step in range(STEPS):
        samples = one_rank.samples[step]
        assert len(samples) % 2 and len(samples) < sum(one_rank.roles[step].values())
        assert {s.key.uid for s in samples} < set(GOLD)  # the filter drops some question
        assert len({s.advantage for s in samples}) > 3


@pytest.mark.parametrize("dp", (2, 4))
def test_data_parallel_ranks_change_nothing(dp, one_rank, models, policy, recorded):
    spread_out = train(policy(models["qwen2"], LayoutConfig(dp=dp), tokens=TOKENS)[0], recorded)
    assert spread_out.roles == one_rank.roles
    assert spread_out.groups == one_rank.groups  # who is compared with whom, and every reward
    for here, there in zip(spread_out.samples, one_rank.samples, strict=True):
        assert [(s.key, s.advantage) for s in here] == [(s.key, s.advantage) for s in there]
    for here, there in zip(spread_out.metrics, one_rank.metrics, strict=True):
        floats = {f"agent/a/{name}" for name in MEASURED}
        assert {k: v for k, v in here.items() if k not in floats} == {k: v for k, v in there.items() if k not in floats}
        assert [here[name] for name in sorted(floats)] == pytest.approx([there[n] for n in sorted(floats)], abs=1e-5)
    for here, there in zip(spread_out.updates, one_rank.updates, strict=True):
        assert here["tokens"] == there["tokens"] and here["skipped_steps"] == there["skipped_steps"] == 0
        assert here["loss"] == pytest.approx(there["loss"], abs=1e-5)
        assert here["grad_norm"] == pytest.approx(there["grad_norm"], rel=5e-5)
    assert data.worst(spread_out.weights, one_rank.weights) < 1e-5


def _cut(samples: list[Sample]) -> list[Sample]:
    return samples[: len(samples) // 4 * 4]


def _one_baseline_per_rank(samples: list[Sample]) -> list[Sample]:
    return [
        replace(s, advantage=s.advantage - _mean(samples[i // 4 * 4 : i // 4 * 4 + 4])) for i, s in enumerate(samples)
    ]


def _mean(samples: list[Sample]) -> float:
    return sum(s.advantage for s in samples) / len(samples)


@pytest.mark.parametrize("broken", (_cut, _one_baseline_per_rank))
def test_what_knows_the_number_of_ranks_is_seen(broken, one_rank, models, policy, recorded):
    """Negative controls: samples cut to a multiple of 4; a baseline over the part of a group that one rank holds."""
    found = train(policy(models["qwen2"], tokens=TOKENS)[0], recorded, broken)
    assert found.groups == one_rank.groups
    assert abs(found.updates[0]["loss"] - one_rank.updates[0]["loss"]) > 1e-5
    assert data.worst(found.weights, one_rank.weights) > 1e-4

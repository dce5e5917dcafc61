"""What only a human may see: metrics that know the truth, and signs that a cohort collapses or drifts.

Nothing here reaches a reward. Keys are agent/<name>/<group>/<metric> and cohort/<metric>.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np

from megarl.algos.common import answers_by_prompt, tally
from megarl.answers.equal import equal
from megarl.types import Ballot, Gold, Group, Labels, Metrics, Rollout, RolloutKey, TokenStats
from megarl.verification import verification

Ballots = Mapping[tuple[str, str], Ballot]


def diagnose(
    seen: Sequence[Rollout],
    labels: Labels,
    groups: Sequence[Group],
    gold: Gold | None,
    stats: Mapping[RolloutKey, TokenStats],
) -> Metrics:
    """All metrics of one step's rollouts.

    label: label_accuracy (of the prompts that have a label, the share where it is true), unlabeled_share,
    majority_share_parsed and majority_share_total (of the agent's own vote: two denominators), vote_ties (count),
    answered_share, sampled_accuracy (of all rollouts). reward: reward_mean, zero_variance_share (of groups),
    reward_accuracy (answers that get the step's highest reward, if above 0, exactly if they are true: a method that
    pays for form as well gives 2, 1 or 0). verifier: see verification. policy: entropy, logprob_drift_mean and
    logprob_drift_max. engine: response_tokens (mean), truncated_share. cohort: agreement/<a>~<b> (share of the prompts
    voted on by both whose majorities are equal).

    Metrics that need true answers cover the prompts that have one, and are left out where none has.
    """
    ballots = tally(seen)
    drifts = drift(seen, stats)
    out: Metrics = {}
    for agent in dict.fromkeys(r.prompt.agent for r in seen):
        own = [r for r in seen if r.prompt.agent == agent]
        own_groups = [g for g in groups if g.rollouts and g.rollouts[0].agent == agent]
        values = {
            **_votes({k: b for k, b in ballots.items() if k[0] == agent}, labels),
            **_truth(own, {k: b for k, b in labels.items() if k[0] == agent}, own_groups, gold or {}),
            **_rewards(own_groups),
            **_responses(own, stats),
            **verification(own, {k: b for k, b in labels.items() if k[0] == agent}, own_groups, gold or {}),
        }
        if agent in drifts:
            values["policy/logprob_drift_mean"], values["policy/logprob_drift_max"] = drifts[agent]
        out |= {f"agent/{agent}/{name}": value for name, value in values.items()}
    return out | _agreement(ballots)


def drift(seen: Sequence[Rollout], stats: Mapping[RolloutKey, TokenStats]) -> dict[str, tuple[float, float]]:
    """agent -> mean and maximum of |engine - policy| over the logprobs of its sampled tokens.

    Tokens without an engine logprob (NaN) are left out. Before an update both sides hold the same weights, so this is
    the numerical distance of the two implementations and catches a weight that was not handed over.
    """
    gaps: dict[str, list[np.ndarray]] = {}
    for r in seen:
        if r.key in stats:
            gap = np.abs(r.logprobs.astype(np.float64) - stats[r.key].logprobs)
            gaps.setdefault(r.prompt.agent, []).append(gap[~np.isnan(r.logprobs)])
    whole = {agent: np.concatenate(parts) for agent, parts in gaps.items()}
    return {agent: (float(gap.mean()), float(gap.max())) for agent, gap in whole.items() if gap.size}


def twins(seen: Sequence[Rollout]) -> list[str]:
    """One warning per pair of agents that answered every shared rollout with the same text at the same logprobs.

    Equal models with equal generation seeds do that; then being taught by the other is being taught by oneself. Texts
    alone do not tell: two agents that have both learnt a task agree too.
    """
    responses: dict[str, dict[tuple[str, str, int], Rollout]] = {}
    for r in seen:
        responses.setdefault(r.prompt.agent, {})[r.prompt.uid, r.prompt.role, r.index] = r
    out = []
    for a, b in combinations(sorted(responses), 2):
        shared = responses[a].keys() & responses[b].keys()
        if shared and all(_same(responses[a][k], responses[b][k]) for k in shared):
            out.append(
                f"agents {a} and {b} gave {len(shared)} identical responses of {len(shared)}: the same model with the "
                "same generation seed votes for itself; give one of them another agents.<name>.seed"
            )
    return out


def _same(a: Rollout, b: Rollout) -> bool:
    return (
        a.text == b.text
        and len(a.logprobs) == len(b.logprobs)
        and np.allclose(a.logprobs, b.logprobs, atol=1e-3, equal_nan=True)
    )


def _votes(own: Ballots, labels: Labels) -> Metrics:
    if not own:
        return {}
    ballots = list(own.values())
    return {
        "label/unlabeled_share": _mean(labels[k].answer is None for k in own if k in labels),
        "label/majority_share_parsed": _mean(b.share_parsed for b in ballots),
        "label/majority_share_total": _mean(b.share_total for b in ballots),
        "label/vote_ties": float(sum(b.tie for b in ballots)),
        "label/answered_share": sum(b.parsed for b in ballots) / max(sum(b.total for b in ballots), 1),
    }


def _truth(seen: Sequence[Rollout], labels: Labels, groups: Sequence[Group], gold: Gold) -> Metrics:
    out: Metrics = {}
    right = {
        r.key: r.answer is not None and equal(r.answer, gold[uid])
        for (_, uid), members in answers_by_prompt(seen).items()
        if uid in gold
        for r in members
    }
    labeled = [(b.answer, gold[uid]) for (_, uid), b in labels.items() if b.answer is not None and uid in gold]
    rewards = {
        key: reward
        for g in groups
        for key, reward in zip(g.rollouts, g.rewards, strict=True)
        if key in right and not np.isnan(reward)
    }
    highest = max(rewards.values(), default=0.0)
    paid = [(reward == highest and reward > 0) == right[key] for key, reward in rewards.items()]
    if right:
        out["label/sampled_accuracy"] = _mean(right.values())
    if labeled:
        out["label/label_accuracy"] = _mean(equal(label, true) for label, true in labeled)
    if paid:
        out["reward/reward_accuracy"] = _mean(paid)
    return out


def _rewards(groups: Sequence[Group]) -> Metrics:
    rewards = [np.array([r for r in g.rewards if not np.isnan(r)]) for g in groups]
    rewards = [r for r in rewards if r.size]
    if not rewards:
        return {}
    return {
        "reward/reward_mean": float(np.concatenate(rewards).mean()),
        "reward/zero_variance_share": _mean(r.max() == r.min() for r in rewards),
    }


def _responses(seen: Sequence[Rollout], stats: Mapping[RolloutKey, TokenStats]) -> Metrics:
    out: Metrics = {
        "engine/response_tokens": _mean(len(r.token_ids) for r in seen),
        "engine/truncated_share": _mean(r.stop == "length" for r in seen),
    }
    measured = [stats[r.key].entropy for r in seen if r.key in stats]
    entropies = [e for e in measured if e is not None and e.size]
    if entropies:
        out["policy/entropy"] = float(np.concatenate(entropies).mean(dtype=np.float64))
    return out


def _agreement(ballots: Ballots) -> Metrics:
    """Names are sorted, so the order in which agents are configured does not show."""
    voted: dict[str, dict[str, str]] = {}
    for (agent, uid), ballot in ballots.items():
        if ballot.answer is not None:
            voted.setdefault(agent, {})[uid] = ballot.answer
    out: Metrics = {}
    for a, b in combinations(sorted(voted), 2):
        shared = voted[a].keys() & voted[b].keys()
        if shared:
            out[f"cohort/agreement/{a}~{b}"] = _mean(equal(voted[a][u], voted[b][u]) for u in shared)
    return out


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return float(sum(values) / len(values)) if values else 0.0

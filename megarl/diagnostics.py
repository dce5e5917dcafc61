"""What only a human may see: metrics that know the truth, and signs that a cohort collapses or drifts.

Nothing here reaches a reward. Keys are agent/<name>/<group>/<metric> and cohort/<metric>.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

import numpy as np

from megarl.algos.common import answers_by_prompt, tally
from megarl.answers.equal import Outcome, compare, equal
from megarl.diversity import answers_of, classes, overlap
from megarl.types import Ballot, Gold, Group, Labels, Metrics, Rollout, RolloutKey, TokenStats
from megarl.verification import drops, verification

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
    majority_share_parsed and majority_share_total (of the agent's own vote: two denominators, of which the first leaves
    out prompts without any readable answer) and the same where that vote is true (..._right) and where it is not
    (..._wrong), vote_margin (votes of the winner less those of the
    runner-up, of the parsed ones), answer_entropy (nats, of the parsed answers of a prompt), vote_ties (count),
    answered_share, sampled_accuracy (of all answers); where prompts do not train, dropped_share, and of the prompts
    with a wrong (right) label drop_rate_wrong_label (drop_rate_right_label), unless verifier/ has them. reward:
    reward_mean, reward_spread (standard deviation within a group, mean over groups), zero_variance_share (of groups),
    reward_accuracy (see there). verifier: see verification. policy: entropy, logprob_drift_mean and
    logprob_drift_max. engine: response_tokens (mean), truncated_share. Where there are later turns, response_tokens,
    truncated_share, reward_mean, reward_spread and zero_variance_share per role, too (..._solve, ..._verify).
    cohort: agreement/<a>~<b> (share of the prompts voted on by both whose majorities are equal), and of their single
    answers, against the truth, kappa/<a>~<b>, complementarity/..., same_wrong/... and either/... (see diversity).

    label/undecided and reward/undecided: see _undecided.

    Metrics that need true answers cover the prompts that have one, and are left out where none has.
    """
    ballots = tally(seen)
    drifts = drift(seen, stats)
    out: Metrics = {}
    for agent in dict.fromkeys(r.prompt.agent for r in seen):
        own = [r for r in seen if r.prompt.agent == agent]
        own_groups = [g for g in groups if g.rollouts and g.rollouts[0].agent == agent]
        values = {
            **_votes(own, {k: b for k, b in ballots.items() if k[0] == agent}, labels, gold or {}),
            **_truth(own, {k: b for k, b in labels.items() if k[0] == agent}, own_groups, gold or {}),
            **_by_role(own, own_groups),
            **_entropy(own, stats),
            **verification(own, {k: b for k, b in labels.items() if k[0] == agent}, own_groups, gold or {}),
        }
        values |= _dropped(own, {k: b for k, b in labels.items() if k[0] == agent}, own_groups, gold or {})
        if agent in drifts:
            values["policy/logprob_drift_mean"], values["policy/logprob_drift_max"] = drifts[agent]
        values |= _undecided(own, [b for k, b in ballots.items() if k[0] == agent], labels)
        out |= {f"agent/{agent}/{name}": value for name, value in values.items()}
    return out | _agreement(ballots) | _overlap(seen, gold)


def drift(seen: Sequence[Rollout], stats: Mapping[RolloutKey, TokenStats]) -> dict[str, tuple[float, float]]:
    """agent -> mean and maximum of |engine - policy| over the logprobs of its sampled tokens.

    Tokens without an engine logprob (NaN) are left out, unless the policy's is NaN too: then so are both results.
    Before an update both sides hold the same weights, so this is the numerical distance of the two implementations and
    catches a weight that was not handed over.
    """
    gaps: dict[str, list[np.ndarray]] = {}
    for r in seen:
        if r.key in stats:
            policy = stats[r.key].logprobs
            gap = np.abs(r.logprobs.astype(np.float64) - policy)
            gaps.setdefault(r.prompt.agent, []).append(gap[~np.isnan(r.logprobs) | np.isnan(policy)])
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


def _votes(seen: Sequence[Rollout], own: Ballots, labels: Labels, gold: Gold) -> Metrics:
    if not own:
        return {}
    ballots = list(own.values())
    counts = [
        sorted((count for _, count in classes([r.answer for r in members])), reverse=True)
        for members in answers_by_prompt(seen).values()
    ]
    out: Metrics = {
        "label/unlabeled_share": _mean(labels[k].answer is None for k in own if k in labels),
        "label/vote_margin": _mean(_margin(of) for of in counts),
        "label/answer_entropy": _mean(_entropy_of(of) for of in counts if of),
        "label/vote_ties": float(sum(b.tie for b in ballots)),
        "label/answered_share": sum(b.parsed for b in ballots) / max(sum(b.total for b in ballots), 1),
    }
    known = [(b, equal(b.answer, gold[uid])) for (_, uid), b in own.items() if b.answer is not None and uid in gold]
    split = {
        "": ballots,
        "_right": [b for b, right in known if right],
        "_wrong": [b for b, right in known if not right],
    }
    for suffix, of in split.items():
        if of:
            out[f"label/majority_share_total{suffix}"] = _mean(b.share_total for b in of)
        if read := [b for b in of if b.parsed]:
            out[f"label/majority_share_parsed{suffix}"] = _mean(b.share_parsed for b in read)
    return out


def _margin(counts: Sequence[int]) -> float:
    """Of counts in falling order; nobody parsed: 0."""
    return (counts[0] - sum(counts[1:2])) / sum(counts) if counts else 0.0


def _entropy_of(counts: Sequence[int]) -> float:
    p = np.array(counts) / sum(counts)
    return float(-(p * np.log(p)).sum())


def _truth(seen: Sequence[Rollout], labels: Labels, groups: Sequence[Group], gold: Gold) -> Metrics:
    out: Metrics = {}
    right = [
        r.answer is not None and equal(r.answer, gold[r.prompt.uid])
        for r in seen
        if r.prompt.role == "solve" and r.prompt.uid in gold
    ]
    labeled = [(b.answer, gold[uid]) for (_, uid), b in labels.items() if b.answer is not None and uid in gold]
    if right:
        out["label/sampled_accuracy"] = _mean(right)
    if labeled:
        out["label/label_accuracy"] = _mean(equal(label, true) for label, true in labeled)
    return out | reward_accuracy(seen, labels, groups, gold)


def reward_accuracy(seen: Sequence[Rollout], labels: Labels, groups: Sequence[Group], gold: Gold) -> Metrics:
    """Share of an agent's rewarded rollouts that the label judges as the truth would.

    reward/reward_accuracy is that of first answers; with later turns there are _verify, _revise and, of all roles
    together, _all. A verdict is judged by whether it fits the answer that it speaks of, that answer being held against
    the label and against the truth. A method without labels is judged by its rewards where they are 1 or 0; rewards
    on a scale (certainty, entropy) call nothing right, and there is no such metric.
    """
    by_key = {r.key: r for r in seen}
    paid = [
        (by_key[key], reward)
        for g in groups
        for key, reward in zip(g.rollouts, g.rewards, strict=True)
        if key.uid in gold and not np.isnan(reward)
    ]
    if not {reward for r, reward in paid if (r.prompt.agent, r.prompt.uid) not in labels} <= {0.0, 1.0}:
        return {}
    agreeing: dict[str, list[bool]] = {}
    for r, reward in paid:
        label = labels.get((r.prompt.agent, r.prompt.uid))
        judged = reward == 1 if label is None else _is_good(r, label.answer, by_key)
        agreeing.setdefault(r.prompt.role, []).append(judged == _is_good(r, gold[r.prompt.uid], by_key))
    out = {f"reward/reward_accuracy{'' if role == 'solve' else f'_{role}'}": _mean(of) for role, of in agreeing.items()}
    if len(agreeing) > 1:
        out["reward/reward_accuracy_all"] = _mean(x for of in agreeing.values() for x in of)
    return out


def _is_good(r: Rollout, true: str | None, by_key: Mapping[RolloutKey, Rollout]) -> bool:
    """Is an answer, or what a verdict says of one, right if this were the truth?"""
    if r.prompt.role != "verify":
        return r.answer is not None and true is not None and equal(r.answer, true)
    parent = r.prompt.parent
    assert parent is not None
    return r.answer == ("correct" if _is_good(by_key[parent], true, by_key) else "wrong")


def _by_role(seen: Sequence[Rollout], groups: Sequence[Group]) -> Metrics:
    """Metrics of all rollouts together and, where there are several roles, of each."""
    out = _responses(seen) | _rewards(groups)
    roles = dict.fromkeys(r.prompt.role for r in seen)
    for role in roles if len(roles) > 1 else ():
        of = [r for r in seen if r.prompt.role == role]
        values = _responses(of) | _rewards([g for g in groups if g.rollouts and g.rollouts[0].role == role])
        out |= {f"{name}_{role}": value for name, value in values.items()}
    return out


def _rewards(groups: Sequence[Group]) -> Metrics:
    rewards = [np.array([r for r in g.rewards if not np.isnan(r)]) for g in groups]
    rewards = [r for r in rewards if r.size]
    if not rewards:
        return {}
    return {
        "reward/reward_mean": float(np.concatenate(rewards).mean()),
        "reward/reward_spread": _mean(float(r.std()) for r in rewards),
        "reward/zero_variance_share": _mean(r.max() == r.min() for r in rewards),
    }


def _responses(seen: Sequence[Rollout]) -> Metrics:
    return {
        "engine/response_tokens": _mean(len(r.token_ids) for r in seen),
        "engine/truncated_share": _mean(r.stop == "length" for r in seen),
    }


def _entropy(seen: Sequence[Rollout], stats: Mapping[RolloutKey, TokenStats]) -> Metrics:
    measured = [stats[r.key].entropy for r in seen if r.key in stats]
    entropies = [e for e in measured if e is not None and e.size]
    return {"policy/entropy": float(np.concatenate(entropies).mean(dtype=np.float64))} if entropies else {}


def _dropped(seen: Sequence[Rollout], labels: Labels, groups: Sequence[Group], gold: Gold) -> Metrics:
    """What a filter without verdicts leaves out; whoever is in no group does not train."""
    prompts = {(r.prompt.agent, r.prompt.uid) for r in seen if r.prompt.role == "solve"}
    kept = {(g.rollouts[0].agent, g.rollouts[0].uid) for g in groups if g.rollouts}
    if any(r.prompt.role == "verify" for r in seen) or prompts <= kept:
        return {}
    return {"label/dropped_share": _mean(key not in kept for key in prompts), **drops(labels, kept, gold, "label")}


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


def _overlap(seen: Sequence[Rollout], gold: Gold | None) -> Metrics:
    if gold is None:
        return {}
    answers = answers_of(seen)
    out: Metrics = {}
    for a, b in combinations(sorted(answers), 2):
        found = overlap((a, b), answers[a], answers[b], gold)
        named = {} if found is None else {"kappa": found.kappa, "complementarity": found.complementarity}
        named |= {} if found is None else {"same_wrong": found.same_wrong, "either": found.either}
        out |= {f"cohort/{name}/{a}~{b}": value for name, value in named.items() if value is not None}
    return out


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return float(sum(values) / len(values)) if values else 0.0


def _undecided(seen: Sequence[Rollout], ballots: Sequence[Ballot], labels: Labels) -> Metrics:
    """Pairs of classes in the agent's own votes, and answers against its labels, that could be neither shown equal nor
    different: they count as different, and these are how often that was a guess."""
    pairs = [
        (r.answer, labels[r.prompt.agent, r.prompt.uid].answer)
        for r in seen
        if r.prompt.role == "solve" and (r.prompt.agent, r.prompt.uid) in labels
    ]
    unsure = sum(a is not None and b is not None and compare(a, b) is Outcome.UNDECIDED for a, b in pairs)
    return {"label/undecided": float(sum(b.undecided for b in ballots)), "reward/undecided": float(unsure)}

"""Rewards -> advantages -> training samples, in float64 on the driver."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from megarl.packing import at_response, response_mask
from megarl.settings import AdvantageConfig, RewardConfig
from megarl.types import Group, Rollout, RolloutKey, Sample, TokenStats
from megarl_kernels import grouped_advantage


def spread(
    groups: Sequence[Group],
    rollouts: Sequence[Rollout],
    stats: Mapping[RolloutKey, TokenStats],
    cfg: AdvantageConfig,
    train_samples_per_prompt: int | None = None,
) -> list[Sample]:
    """One sample per group member, in group order then member order; its advantage is its group's baseline applied.

    Members without a finite reward (NaN) enter no mean and come out masked, with advantage 0. Of a group of "solve"
    rollouts only the first ``train_samples_per_prompt`` in index order train (null: all), and selection precedes the
    baseline: neither depends on rewards, lengths or arrival order. mode="batch" takes the deviation over one agent's
    groups.
    """
    groups = [first_in_order(g, train_samples_per_prompt) for g in groups]
    members = [(key, reward) for g in groups for key, reward in zip(g.rollouts, g.rewards, strict=True)]
    keys = [key for key, _ in members]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{twice} stands in two groups: a rollout has one advantage")
    advantages = _advantages(groups, cfg)
    by_key = {r.key: r for r in rollouts}
    return [
        _sample(by_key[key], stats[key], float(a), rewarded=bool(np.isfinite(reward)))
        for (key, reward), a in zip(members, advantages, strict=True)
    ]


def first_in_order(group: Group, n: int | None) -> Group:
    """The group cut to its first ``n`` "solve" rollouts by index; other roles and n=None: the whole group."""
    if n is None or any(key.role != "solve" for key in group.rollouts):
        return group
    kept = sorted(range(len(group.rollouts)), key=lambda i: group.rollouts[i].index)[:n]
    return replace(
        group, rollouts=tuple(group.rollouts[i] for i in kept), rewards=tuple(group.rewards[i] for i in kept)
    )


def differing(groups: Sequence[Group], train_samples_per_prompt: int | None) -> dict[str, list[str]]:
    """agent -> the prompts, in group order, that teach it something: rewards differ within a group of theirs.

    Rewards are compared exactly, among the members that train and have one.
    """
    out: dict[str, dict[str, bool]] = {}
    for group in groups:
        rewards = [r for r in first_in_order(group, train_samples_per_prompt).rewards if np.isfinite(r)]
        key = group.rollouts[0]
        uids = out.setdefault(key.agent, {})
        uids[key.uid] = uids.get(key.uid, False) or len(set(rewards)) > 1
    return {agent: [uid for uid, differ in uids.items() if differ] for agent, uids in out.items()}


def only(groups: Sequence[Group], prompts: Mapping[str, Sequence[str]]) -> list[Group]:
    """The groups of these prompts (agent -> uids); all groups of a prompt stay together."""
    wanted = {(agent, uid) for agent, uids in prompts.items() for uid in uids}
    return [g for g in groups if (g.rollouts[0].agent, g.rollouts[0].uid) in wanted]


def overlong(
    groups: Sequence[Group], rollouts: Sequence[Rollout], limits: Mapping[str, int], cfg: RewardConfig
) -> list[Group]:
    """Rewards less the soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13); unchanged without a buffer.

    A response of n tokens loses penalty * (n - (limit - buffer)) / buffer, at least 0 and at most the penalty, where
    ``limits`` holds each agent's max_tokens. verl's formula has no upper bound.
    """
    buffer = cfg.overlong_buffer
    if buffer is None:
        return list(groups)
    lengths = {r.key: len(r.token_ids) for r in rollouts}

    def cost(key: RolloutKey) -> float:
        return cfg.overlong_penalty * min(max(lengths[key] - (limits[key.agent] - buffer), 0) / buffer, 1.0)

    return [
        replace(g, rewards=tuple(r - cost(key) for key, r in zip(g.rollouts, g.rewards, strict=True))) for g in groups
    ]


def _advantages(groups: Sequence[Group], cfg: AdvantageConfig) -> np.ndarray:
    """float64, member by member in group order; agents are computed apart: no statistic crosses them."""
    agents = np.array([key.agent for g in groups for key in g.rollouts], dtype=object)
    ids = np.repeat(np.arange(len(groups)), [len(g.rollouts) for g in groups])
    rewards = np.array([r for g in groups for r in g.rewards], np.float64)
    rewards[~np.isfinite(rewards)] = np.nan  # one infinite reward would make its whole group NaN
    out = np.zeros(len(rewards))
    for agent in dict.fromkeys(agents.tolist()):
        own = agents == agent
        out[own] = grouped_advantage(
            torch.from_numpy(rewards[own]),
            torch.from_numpy(ids[own]),
            mode=cfg.mode,
            ddof=cfg.ddof,
            eps=cfg.eps,
        ).numpy()
    return out


def _sample(rollout: Rollout, stats: TokenStats, advantage: float, *, rewarded: bool) -> Sample:
    def placed(values: np.ndarray) -> np.ndarray:
        whole = at_response(rollout, values)
        return whole if rewarded else np.zeros_like(whole)  # NaN may stand where there is no reward

    return Sample(
        key=rollout.key,
        token_ids=np.concatenate([rollout.prompt_ids, rollout.token_ids]).astype(np.int32),
        mask=response_mask(rollout) & rewarded,
        rollout_logprobs=placed(rollout.logprobs),
        policy_logprobs=placed(stats.logprobs),
        reference_logprobs=None if stats.reference is None else placed(stats.reference),
        advantage=advantage,
    )

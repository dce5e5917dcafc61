from dataclasses import replace

import numpy as np
import pytest

from megarl.advantages import differing, spread
from megarl.packing import num_sequences, response_tokens
from megarl.settings import AdvantageConfig
from megarl.types import Group
from tests.unit.records import rollouts, stats

NAN = float("nan")


def spread_of(rewards, cfg=AdvantageConfig(), *, agent="a", uid="q0", order=None, **options):
    members = rollouts(agent, uid, ["1"] * len(rewards))
    order = range(len(rewards)) if order is None else order
    group = Group(
        key=(agent, uid, "solve"),
        rollouts=tuple(members[i].key for i in order),
        rewards=tuple(rewards[i] for i in order),
    )
    return spread([group], members, {r.key: stats(r, 0.25) for r in members}, cfg, **options)


def test_sample_by_hand():
    first, *_ = spread_of([1.0, 0.0, 0.0, 1.0])
    assert first.token_ids.tolist() == [1, 5, 7, 8, 2]
    assert first.mask.tolist() == [False, False, True, True, True]
    assert first.rollout_logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
    assert first.policy_logprobs.tolist() == [0, 0, -0.25, -0.25, -0.25]
    assert first.reference_logprobs is None
    assert first.advantage == pytest.approx(0.866023904, abs=1e-9)


def test_case_b3_a_member_without_reward_is_masked():
    samples = spread_of([1.0, 0.0, NAN, 1.0])
    assert [s.advantage for s in samples] == pytest.approx([0.577349, -1.154699, 0, 0.577349], abs=1e-6)
    assert not samples[2].mask.any() and not samples[2].policy_logprobs.any()
    assert response_tokens(samples) == 9 and num_sequences(samples) == 3


def test_case_b1_float_noise_earns_nothing():
    for rewards in ([0.7] * 7, [0.9] * 12, [float(np.float32(0.1))] * 7, [2.0]):
        assert [s.advantage for s in spread_of(rewards)] == [0.0] * len(rewards)


def test_case_b11_the_first_in_index_order_train_and_make_the_baseline():
    rewards = [1.0] * 5 + [0.0] * 3
    for order in (range(8), reversed(range(8))):
        samples = spread_of(rewards, order=list(order), train_samples_per_prompt=4)
        assert [s.key.index for s in samples] == [0, 1, 2, 3]
        assert [s.advantage for s in samples] == [0.0] * 4  # one-sided: zero variance among the trained
    mixed = spread_of(rewards, train_samples_per_prompt=6)
    assert sum(s.advantage for s in mixed) == pytest.approx(0, abs=1e-9)
    assert mixed[5].advantage == pytest.approx(-5 / 6 / np.std([1, 1, 1, 1, 1, 0], ddof=1), abs=1e-4)


def test_batch_deviation_is_of_one_agent():
    def groups_of(agent, rewards):
        members = rollouts(agent, "q", ["1"] * len(rewards))
        return members, Group(key=(agent,), rollouts=tuple(r.key for r in members), rewards=tuple(rewards))

    cfg = AdvantageConfig(mode="batch")
    a, group_a = groups_of("a", [1.0, 0.0, 0.0])
    b, group_b = groups_of("b", [9.0, 0.0, 3.0])
    every = {r.key: stats(r) for r in a + b}
    together = spread([group_a, group_b], a + b, every, cfg)
    alone = spread([group_a], a, every, cfg)
    assert [s.advantage for s in together[:3]] == [s.advantage for s in alone]


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_masked_and_moves_no_baseline(odd):
    members = rollouts("a", "q0", ["1"] * 4)
    group = Group(key=("x",), rollouts=tuple(r.key for r in members), rewards=(1.0, 0.0, odd, 1.0))
    samples = spread([group], members, {r.key: stats(r) for r in members}, AdvantageConfig(eps=0.0))
    assert [s.advantage for s in samples] == pytest.approx([3**-0.5, -2 * 3**-0.5, 0, 3**-0.5])
    assert [bool(s.mask.any()) for s in samples] == [True, True, False, True]
    assert differing([replace(group, rewards=(1.0, 1.0, odd, 1.0))], None) == {"a": []}


def test_a_rollout_in_two_groups_raises():
    members = rollouts("a", "q0", ["1"])
    group = Group(key=("x",), rollouts=(members[0].key,), rewards=(1.0,))
    with pytest.raises(ValueError, match="two groups"):
        spread([group, group], members, {members[0].key: stats(members[0])}, AdvantageConfig())


def test_no_groups():
    assert spread([], [], {}, AdvantageConfig()) == []

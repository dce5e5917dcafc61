"""Methods without a vote (Intuitor, RENT, the controls), TTRL's options, and the shaping of rewards."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from megarl.advantages import differing, only, overlong, spread
from megarl.algos import AnyAlgorithm
from megarl.algos.controls import FormatOnly, RandomReward
from megarl.algos.intuitor import Intuitor
from megarl.algos.rent import RENT
from megarl.algos.ttrl import TTRL
from megarl.packing import num_sequences, pack, response_tokens
from megarl.settings import AdvantageConfig, RewardConfig
from tests.unit.records import rollout, rollouts, stats

TWO_TOKENS = np.array([[0.0, 0, 0, 0], [2.0, 0, 0, 0]])  # logits


def measured(seen, name, values):
    """Stats of every rollout, with one statistic."""
    return {r.key: stats(r, **{name: np.asarray(v, np.float32)}) for r, v in zip(seen, values, strict=True)}


def rewards(algo, seen, about):
    return [list(g.rewards) for g in algo.reward(seen, algo.label(seen, None), about)]


def advantages(algo, seen, about):
    groups = algo.reward(seen, algo.label(seen, None), about)
    return [s.advantage for s in spread(groups, seen, about, AdvantageConfig())]


def different(answers):
    """Rollouts whose responses all differ."""
    return [replace(r, token_ids=r.token_ids + 10 * r.index) for r in rollouts("a", "q", answers)]


def test_v14_rent():
    seen = different(["1"] * 4)
    about = measured(seen, "entropy", [[0.25, 0.75, 0.5], [0.2] * 3, [7.0] * 3, [0.3] * 3])
    assert rewards(RENT(), seen, about) == [pytest.approx([-0.5, -0.2, -7.0, -0.3], abs=1e-7)]
    expected = [0.449685196, 0.539622235, -1.498950652, 0.509643222]
    assert advantages(RENT(), seen, about) == pytest.approx(expected, abs=1e-7)


def test_an_unreadable_answer_costs_rent_only_where_that_is_asked_for():
    seen = different(["1", "1", None, "1"])
    about = measured(seen, "entropy", [[0.5] * 3, [0.2] * 3, [0.1] * 3, [0.3] * 3])
    assert rewards(RENT(), seen, about) == [pytest.approx([-0.5, -0.2, -0.1, -0.3])]
    assert rewards(RENT(unparseable_entropy=7.0), seen, about) == [pytest.approx([-0.5, -0.2, -7.0, -0.3])]


def test_v15_certainty_and_entropy_are_means_over_the_response():
    logprobs = torch.log_softmax(torch.from_numpy(TWO_TOKENS), -1)
    certainty = (-logprobs.mean(-1) - np.log(4)).numpy()
    entropy = torch.special.entr(logprobs.exp()).sum(-1).numpy()
    seen = [rollout(response=(7, 8))]
    about = {seen[0].key: stats(seen[0], certainty=certainty, entropy=entropy)}
    assert rewards(Intuitor(), seen, about) == [[pytest.approx(0.227229296, abs=1e-9)]]
    assert rewards(RENT(), seen, about) == [[pytest.approx(-1.152289063, abs=1e-9)]]
    # the constant that the release leaves out cancels in the group
    seen = different(["1"] * 3)
    with_constant, without = ([[x + c] * 3 for x in (0.1, 0.4, 0.2)] for c in (0, np.log(4)))
    ours, release = (advantages(Intuitor(), seen, measured(seen, "certainty", v)) for v in (with_constant, without))
    assert ours == pytest.approx(release, abs=1e-5) and max(ours) > 1


def test_equal_responses_earn_exactly_the_same():
    """A collapsed group learns nothing from the rounding of different packs."""
    seen = rollouts("a", "q", ["1"] * 4)
    about = measured(seen, "certainty", [[3.0 + i * 1e-6] * 3 for i in range(4)])
    assert advantages(Intuitor(), seen, about) == [0.0] * 4
    # negative control: of four different responses it would have, and of different prompts it does not make one
    other = different(["1"] * 4)
    assert max(advantages(Intuitor(), other, about)) > 0.2
    two = [*rollouts("a", "q1", ["1"]), *rollouts("a", "q2", ["1"])]
    assert rewards(Intuitor(), two, measured(two, "certainty", [[1.0] * 3, [2.0] * 3])) == [[1.0], [2.0]]


def test_what_has_no_mean_has_no_reward():
    seen = [rollout(index=0, n=2, response=()), rollout(index=1, n=2)]
    about = measured(seen, "certainty", [[], [np.inf, 1, 1]])
    assert np.isnan(rewards(Intuitor(), seen, about)).all()
    with pytest.raises(ValueError, match="was not measured"):
        Intuitor().reward(seen[1:], {}, {r.key: stats(r) for r in seen})


def test_they_declare_what_they_measure_and_label_nothing():
    assert (Intuitor.needs, RENT.needs, RandomReward.needs) == ({"certainty"}, {"entropy"}, set())
    for algo in (Intuitor(), RENT(), RandomReward(), FormatOnly()):
        assert algo.label(rollouts("a", "q", ["1", "1"]), {"q": "1"}) == {}
        assert TypeAdapter(AnyAlgorithm).validate_python(algo.model_dump()) == algo


def test_random_rewards_are_a_function_of_key_weights_and_seed():
    seen = [r for i in range(200) for r in rollouts("a", f"q{i}", ["1"] * 8)]

    def coins(algo, seen=seen):
        return {k: r for g in algo.reward(seen, {}, {}) for k, r in zip(g.rollouts, g.rewards, strict=True)}

    plain = coins(RandomReward())
    assert set(plain.values()) == {0.0, 1.0} and np.mean(list(plain.values())) == pytest.approx(0.5, abs=0.05)
    assert np.mean(list(coins(RandomReward(probability=0.1)).values())) == pytest.approx(0.1, abs=0.03)
    assert coins(RandomReward(), seen[::-1]) == plain
    assert coins(RandomReward(), [replace(r, answer=None) for r in seen]) == plain
    for other in (coins(RandomReward(seed=1)), coins(RandomReward(), [replace(r, version=1) for r in seen])):
        assert 0.4 < np.mean([other[k] == plain[k] for k in plain]) < 0.6


def test_format_only():
    assert rewards(FormatOnly(), rollouts("a", "q", ["1", None, "wrong", "1"]), {}) == [[1, 0, 1, 1]]


def test_v3_format_reward_of_ttrl():
    seen = rollouts("a", "q", ["1", "1", "2", "3"])
    algo = TTRL(format_reward=True)
    assert rewards(algo, seen, {}) == [[2, 2, 1, 1]]
    assert rewards(algo, rollouts("a", "q", ["1", "2", "3", None]), {}) == [[2, 1, 1, 0]]
    about = {r.key: stats(r) for r in seen}
    assert advantages(algo, seen, about) == advantages(TTRL(), seen, about), "all read: an affine copy"


def test_the_filter_lets_a_prompt_through_by_the_share_of_its_majority():
    seen = [
        *rollouts("a", "q1", ["1", "1", None, None, "2", None, None, None]),  # 2/3 of those read, 1/4 of all
        *rollouts("a", "q2", ["1", "1", "2", "3", "4", "5", "6", "7"]),  # 1/4 of both
        *rollouts("a", "q3", [None] * 8),
    ]

    def kept(**options):
        algo = TTRL(**options)
        labels = algo.label(seen, None)
        assert len(labels) == 3, "labels are for every prompt, kept or not"
        return [g.key[1] for g in algo.reward(seen, labels, {})]

    assert kept() == ["q1", "q2", "q3"]
    assert kept(min_majority_share=0.25) == ["q1", "q2"], "at least so much"
    assert kept(min_majority_share=0.26) == ["q1"]
    assert kept(min_majority_share=0.25, share_of="total") == ["q1", "q2"]
    assert kept(min_majority_share=0.26, share_of="total") == []
    with pytest.raises(ValidationError, match="min_majority_share"):
        TTRL(min_majority_share=1.5)


def test_64_vote_and_32_train():
    """The vote counts all; the baseline is of those that train, first by index, whatever order they come in."""
    answers = ["2"] * 20 + ["1"] * 12 + ["1"] * 32
    seen = rollouts("a", "q", answers)
    label = TTRL().label(seen, None)["a", "q"]
    assert (label.answer, label.count) == ("1", 44)
    about = {r.key: stats(r) for r in seen}
    for order in (seen, seen[::-1], sorted(seen, key=lambda r: r.index * 37 % 64)):
        samples = spread(TTRL().reward(order, {("a", "q"): label}, {}), order, about, AdvantageConfig(), 32)
        assert [s.key.index for s in samples] == list(range(32))
        # V5, K=32, C=20 with the signs turned: 20 disagree
        assert [s.advantage for s in samples[::31]] == pytest.approx([-0.762395984, 1.270659974], abs=1e-9)


# --- shaping and selection


@pytest.mark.parametrize(("length", "cost"), [(0, 0), (16384, 0), (18432, 0.5), (20480, 1), (20481, 1), (99999, 1)])
def test_v20_overlong(length, cost):
    seen = [rollout(index=0, n=2, response=[7] * length), rollout(index=1, n=2, response=(7,))]
    [group] = FormatOnly().reward([replace(r, answer="1") for r in seen], {}, {})
    cfg = RewardConfig(overlong_buffer=4096)
    [shaped] = overlong([group], seen, {"a": 20480}, cfg)
    assert shaped.rewards == (1 - cost, 1) and shaped.rollouts == group.rollouts
    [dearer] = overlong([group], seen, {"a": 20480}, RewardConfig(overlong_buffer=4096, overlong_penalty=0.5))
    assert dearer.rewards == (1 - cost / 2, 1)
    assert overlong([group], seen, {"a": 20480}, RewardConfig()) == [group]


def test_overlong_is_by_agent_and_leaves_missing_rewards_missing():
    seen = rollouts("a", "q", ["1", None]) + rollouts("b", "q", ["1", None])
    groups = FormatOnly().reward(seen, {}, {})
    groups[0] = replace(groups[0], rewards=(float("nan"), 0.0))
    shaped = overlong(groups, seen, {"a": 3, "b": 4}, RewardConfig(overlong_buffer=2))
    assert np.isnan(shaped[0].rewards[0]) and shaped[0].rewards[1] == -1
    assert shaped[1].rewards == (0.5, -0.5)


def test_prompts_whose_rewards_differ():
    seen = [
        *rollouts("a", "same", ["1", "1", "1"]),
        *rollouts("a", "differ", ["1", "1", "2"]),
        *rollouts("b", "differ", ["1", "1", "1"]),
    ]
    groups = TTRL().reward(seen, TTRL().label(seen, None), {})
    assert differing(groups, None) == {"a": ["differ"], "b": []}
    assert differing(groups, 2) == {"a": [], "b": []}, "one-sided among those that train"
    # a prompt stays whole where one of its groups has a spread; a missing reward makes none
    more = [replace(groups[0], key=("a", "same", "again"), rewards=(0.1, float("nan"), 0.2))]
    assert differing([*groups, *more], None)["a"] == ["same", "differ"]
    assert only([*groups, *more], {"a": ["same"]}) == [groups[0], *more]
    assert differing([replace(groups[0], rewards=(1.0, float("nan"), 1.0))], None) == {"a": []}
    assert differing([], None) == {} and only(groups, {}) == []


def test_case_b9_a_batch_is_padded_and_not_cut_for_data_parallel_ranks():
    seen = [r for uid in ("p", "q") for r in rollouts("a", uid, ["1", "2", "1", "1", "2"])]
    samples = spread(
        TTRL().reward(seen, TTRL().label(seen, None), {}), seen, {r.key: stats(r) for r in seen}, AdvantageConfig()
    )
    shards = pack(samples, dp=4, tokens_per_microbatch=16)
    assert len({len(shard) for shard in shards}) == 1, "as many microbatches on every rank"
    flat = [m for shard in shards for m in shard]
    assert sorted(i for m in flat for i in m.sample_index.tolist() if i >= 0) == list(range(10))
    assert sum(int(m.mask.sum()) for m in flat) == response_tokens(samples) == 30 and num_sequences(samples) == 10

from dataclasses import replace

import numpy as np
import pytest

from megarl.algos.corl import CoRL
from megarl.algos.coverrl import revise_prompt, verify_prompt
from megarl.algos.ttrl import TTRL
from megarl.diagnostics import diagnose, drift, reward_accuracy, twins
from megarl.types import Group
from tests.unit.records import rollout, rollouts, stats


def diagnosed(seen, algo=TTRL(), gold=None, **changes):
    labels = algo.label(seen, None)
    groups = algo.reward(seen, labels, {})
    return diagnose(seen, labels, groups, gold, {r.key: stats(r, **changes) for r in seen})


def test_v12_lucky_hits():
    seen = rollouts("a", "q", ["7"] * 10 + ["3"] * 6 + ["5"] * 8 + ["9"] * 8)
    m = diagnosed(seen, gold={"q": "3"})
    assert m["agent/a/label/label_accuracy"] == 0
    assert m["agent/a/label/majority_share_total"] == 0.3125
    assert m["agent/a/label/sampled_accuracy"] == 0.1875
    assert m["agent/a/reward/reward_accuracy"] == 0.5
    assert m["agent/a/reward/reward_mean"] == 0.3125
    assert m["agent/a/reward/zero_variance_share"] == 0


def test_votes_by_hand():
    seen = rollouts("a", "q1", ["1", "1", None, None, "2", None, None, None]) + rollouts("a", "q2", ["1", "2"])
    seen += rollouts("a", "q3", [None, None]) + rollouts("a", "q4", ["5", "5.0"])
    m = diagnosed(seen)
    assert m["agent/a/label/majority_share_parsed"] == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)  # q3 has none
    assert m["agent/a/label/majority_share_total"] == pytest.approx((1 / 4 + 1 / 2 + 0 + 1) / 4)
    assert m["agent/a/label/vote_ties"] == 1
    assert m["agent/a/label/unlabeled_share"] == 1 / 4
    assert m["agent/a/label/answered_share"] == 7 / 14
    assert m["agent/a/reward/zero_variance_share"] == 2 / 4
    assert not any("accuracy" in name for name in m)


def test_the_label_of_a_student_is_its_teachers():
    seen = rollouts("a", "q", ["1", "1", "2"]) + rollouts("b", "q", ["2", "2", None])
    m = diagnosed(seen, CoRL(ring=("a", "b")), gold={"q": "2", "unseen": "9"})
    assert m["agent/a/label/label_accuracy"] == 1 and m["agent/b/label/label_accuracy"] == 0
    assert m["agent/a/label/sampled_accuracy"] == pytest.approx(1 / 3)
    assert m["agent/b/reward/reward_mean"] == 0
    assert m["cohort/agreement/a~b"] == 0
    agreeing = rollouts("b", "q", ["2/2"]) + rollouts("a", "q", ["1"])
    assert diagnosed(agreeing)["cohort/agreement/a~b"] == 1


def test_responses():
    seen = [rollout(index=0, n=2, answer="1"), rollout(index=1, n=2, response=(1,), stop="length")]
    m = diagnosed(seen, entropy=np.array([1.0, 3.0, 2.0]))
    assert m["agent/a/engine/response_tokens"] == 2 and m["agent/a/engine/truncated_share"] == 0.5
    assert m["agent/a/policy/entropy"] == 2
    assert "agent/a/policy/entropy" not in diagnosed(seen)


def test_drift():
    a = rollout("a")
    b = replace(rollout("b"), logprobs=np.array([np.nan, -1.0, -2.0], np.float32))
    about = {
        a.key: stats(a, 0.0),
        b.key: replace(stats(b), logprobs=np.array([-9.0, -1.25, -2.0], np.float32)),
    }
    assert drift([a, b], about) == {"a": (0.0, 0.0), "b": (0.125, 0.25)}
    assert drift([a], {}) == {}
    labels = TTRL().label([a, b], None)
    m = diagnose([a, b], labels, [], None, about)
    assert (m["agent/b/policy/logprob_drift_mean"], m["agent/b/policy/logprob_drift_max"]) == (0.125, 0.25)


def test_v38_twins_are_told():
    a, b = ([rollout(agent, "q", i, "1", n=3, text=f"so {i}") for i in range(3)] for agent in "ab")
    [warning] = twins(a + b)
    assert "agents a and b" in warning and "seed" in warning
    assert twins(a) == [] and twins([]) == []
    assert twins([*a, *b[:2], replace(b[2], text="other")]) == []
    # two different models that answer alike
    assert twins([*a, *(replace(r, logprobs=r.logprobs - np.float32(0.1)) for r in b)]) == []


def test_nothing_seen():
    assert diagnose([], {}, [], None, {}) == {}


def test_votes_split_by_truth_with_their_margin_and_entropy():
    # q1: 3 of 4 for the true 1; q2: 2 of 3 parsed for a wrong 5; q3: nobody
    seen = rollouts("a", "q1", ["1", "1", "1.0", "2"]) + rollouts("a", "q2", ["5", "5", "6", None])
    m = diagnosed(seen + rollouts("a", "q3", [None, None]), gold={"q1": "1", "q2": "6", "q3": "9"})
    assert m["agent/a/label/majority_share_parsed_right"] == 3 / 4 == m["agent/a/label/majority_share_total_right"]
    assert m["agent/a/label/majority_share_parsed_wrong"] == 2 / 3
    assert m["agent/a/label/majority_share_total_wrong"] == 2 / 4
    assert m["agent/a/label/vote_margin"] == pytest.approx((2 / 4 + 1 / 3 + 0) / 3)
    entropies = [-sum(p * np.log(p) for p in of) for of in ((3 / 4, 1 / 4), (2 / 3, 1 / 3))]
    assert m["agent/a/label/answer_entropy"] == pytest.approx(np.mean(entropies))
    # rewards 1 1 1 0, 1 1 0 0, 0 0: standard deviations sqrt(3)/4, 1/2, 0
    assert m["agent/a/reward/reward_spread"] == pytest.approx((np.sqrt(3) / 4 + 1 / 2) / 3)
    assert not any("_right" in name or "_wrong" in name for name in diagnosed(seen))


def test_a_filter_without_verdicts():
    """Labels right, right, right, wrong, wrong; the second and the fourth do not train."""
    seen = [r for i in range(5) for r in rollouts("a", f"q{i}", ["1", "1"])]
    gold = {f"q{i}": "1" if i < 3 else "2" for i in range(5)}
    labels = TTRL().label(seen, None)
    groups = [g for g in TTRL().reward(seen, labels, {}) if g.key[1] not in ("q1", "q3")]
    m = diagnose(seen, labels, groups, gold, {})
    assert m["agent/a/label/dropped_share"] == 2 / 5
    assert (m["agent/a/label/drop_rate_right_label"], m["agent/a/label/drop_rate_wrong_label"]) == (1 / 3, 1 / 2)
    assert m["agent/a/label/label_accuracy"] == 3 / 5 and m["agent/a/label/label_accuracy_kept"] == 2 / 3
    assert "agent/a/label/dropped_share" not in diagnosed(seen, gold=gold)


def test_reward_accuracy_of_every_role():
    """Label 7, truth 8. Answers 7, 8, 9; verdicts on them; revisions 7, 9."""
    seen = rollouts("a", "q", ["7", "8", "9", "7"])
    checks = [
        replace(rollout("a", "q", 0, said), prompt=verify_prompt(parent, 1))
        for parent, said in zip(seen[:3], ("correct", "correct", "wrong"), strict=True)
    ]
    revised = [replace(rollout("a", "q", i, a), prompt=revise_prompt(checks[2], 2)) for i, a in enumerate(("7", "9"))]
    whole = [*seen, *checks, *revised]
    labels = TTRL().label(whole, None)
    parts = (("solve", seen), ("verify", checks), ("revise", revised))
    groups = [Group(key=(role,), rollouts=tuple(r.key for r in of), rewards=(1.0,) * len(of)) for role, of in parts]
    m = diagnose(whole, labels, groups, {"q": "8"}, {})
    # by label T F F T, by truth F T F F: only 9 is judged alike
    assert m["agent/a/reward/reward_accuracy"] == 1 / 4
    # by label: right, wrong, right; by truth: 7 is wrong, so "correct" is wrong; 8 is right, so right; right
    assert m["agent/a/reward/reward_accuracy_verify"] == 1 / 3
    assert m["agent/a/reward/reward_accuracy_revise"] == 1 / 2
    assert m["agent/a/reward/reward_accuracy_all"] == 3 / 9
    assert m["agent/a/engine/response_tokens_verify"] == 3 and m["agent/a/reward/reward_mean_revise"] == 1


def test_reward_accuracy_without_labels():
    """Rewards of 1 and 0 call answers right and wrong; a certainty does not."""
    seen = rollouts("a", "q", ["7", "8", "9", "7"])

    def judged(*rewards):
        group = Group(key=("q",), rollouts=tuple(r.key for r in seen), rewards=rewards)
        return reward_accuracy(seen, {}, [group], {"q": "8"})

    assert judged(1.0, 1.0, 1.0, 1.0) == {"reward/reward_accuracy": 1 / 4}
    assert judged(0.0, 1.0, float("nan"), 1.0) == {"reward/reward_accuracy": 2 / 3}
    assert judged(0.0, 0.0, 0.0, 0.0) == {"reward/reward_accuracy": 3 / 4}
    assert judged(0.5, 2.0, float("nan"), 1.0) == {} == judged(-0.1, -0.2, -0.3, 0.0)
    # with a label the rewards do not matter
    labels = TTRL().label(seen, None)
    group = Group(key=("q",), rollouts=tuple(r.key for r in seen), rewards=(0.5, 2.0, 0.1, 1.0))
    assert reward_accuracy(seen, labels, [group], {"q": "8"}) == {"reward/reward_accuracy": 1 / 4}


def test_shares_of_nothing_are_absent():
    m = diagnosed(rollouts("a", "q", [None, None]), gold={"q": "8"})
    assert "agent/a/label/majority_share_parsed" not in m and m["agent/a/label/majority_share_total"] == 0


def test_overlap_of_agents_needs_the_truth():
    # V34, one answer per prompt
    a = [rollout("a", f"q{i}", 0, x, n=1) for i, x in enumerate("11123451")]
    b = [rollout("b", f"q{i}", 0, x, n=1) for i, x in enumerate("12113461")]
    m = diagnosed(a + b, CoRL(ring=("a", "b")), gold={f"q{i}": "1" for i in range(8)})
    named = {name: m[f"cohort/{name}/a~b"] for name in ("kappa", "complementarity", "same_wrong", "either")}
    assert named == {"kappa": 0.5, "complementarity": 0.25, "same_wrong": 0.25, "either": 0.625}
    blind = diagnosed(a + b, CoRL(ring=("a", "b")))
    assert [name for name in blind if name.startswith("cohort/")] == ["cohort/agreement/a~b"]

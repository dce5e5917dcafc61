from dataclasses import replace

import numpy as np
import pytest

from megarl.algos.corl import CoRL
from megarl.algos.ttrl import TTRL
from megarl.diagnostics import diagnose, drift, twins
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
    assert m["agent/a/label/majority_share_parsed"] == pytest.approx((2 / 3 + 1 / 2 + 0 + 1) / 4)
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

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from megarl.advantages import spread
from megarl.algos import AnyAlgorithm
from megarl.algos.common import tally
from megarl.algos.corl import CoRL
from megarl.algos.rlvr import RLVR
from megarl.algos.ttrl import TTRL
from megarl.settings import AdvantageConfig
from tests.unit.records import rollouts, stats

ANSWERS = {"one": ["4", "4", "5", "4"], "two": ["5", "5", "4", None], "three": ["7", "4", "7", "5"]}
PAPER = CoRL(ring=("one", "two", "three"))


def cohort(answers=ANSWERS, uid="q"):
    return [r for agent, given_ in answers.items() for r in rollouts(agent, uid, given_)]


def rewards_of(algo, seen, gold=None):
    """(agent, uid) -> rewards"""
    return {g.key[:2]: list(g.rewards) for g in algo.reward(seen, algo.label(seen, gold), {})}


def advantages_of(algo, seen, gold=None):
    groups = algo.reward(seen, algo.label(seen, gold), {})
    out = {}
    for s in spread(groups, seen, {r.key: stats(r) for r in seen}, AdvantageConfig()):
        out.setdefault(s.key.agent, []).append(s.advantage)
    return out


def test_v9_ring_of_three_in_both_directions():
    own = tally(cohort())
    assert [(b.answer, b.count, b.parsed, b.total) for b in own.values()] == [
        ("4", 3, 4, 4),
        ("5", 2, 3, 4),
        ("7", 2, 4, 4),
    ]
    assert rewards_of(PAPER, cohort()) == {
        ("one", "q"): [0, 0, 0, 0],
        ("two", "q"): [0, 0, 1, 0],
        ("three", "q"): [0, 0, 0, 1],
    }
    advantages = advantages_of(PAPER, cohort())
    assert advantages["one"] == [0.0] * 4
    assert advantages["two"] == pytest.approx([-0.499999, -0.499999, 1.499997, -0.499999], abs=1e-9)
    release = CoRL(teacher={"one": "two", "two": "three", "three": "one"})
    assert rewards_of(release, cohort()) == {
        ("one", "q"): [0, 0, 1, 0],
        ("two", "q"): [0, 0, 0, 0],
        ("three", "q"): [0, 1, 0, 0],
    }


def test_v10_two_agents_against_own_vote():
    seen = cohort({"a": ["3", "3", "3", "9"], "b": ["9", "9", "3", "9"]})
    corl, ttrl = advantages_of(CoRL(ring=("a", "b")), seen)["a"], advantages_of(TTRL(), seen)["a"]
    assert corl == pytest.approx([-0.499999] * 3 + [1.499997], abs=1e-9)
    assert corl == [-x for x in ttrl]


def test_v13_a_teacher_without_answers_leaves_its_student_unlabeled():
    seen = cohort({"a": ["1", "1", "2", "1"], "b": [None] * 4})
    algo = CoRL(ring=("b", "a"))  # b teaches a
    label = algo.label(seen, None)["a", "q"]
    assert label.answer is None and label.share_total == 0
    assert rewards_of(algo, seen)["a", "q"] == [0, 0, 0, 0]
    assert advantages_of(algo, seen)["a"] == [0.0] * 4
    ratio = tally(rollouts("a", "q", ["1", "1", None, None, "2", None, None, None]))["a", "q"]
    assert (ratio.share_parsed, ratio.share_total) == (2 / 3, 1 / 4)


def test_case_a7_missing_answers_do_not_agree():
    seen = cohort({"a": [None] * 4, "b": [None] * 4})
    for algo in (TTRL(), CoRL(ring=("a", "b"))):
        assert all(not any(r) for r in rewards_of(algo, seen).values())
    seen = rollouts("a", "q", [None, None, None, "None"])
    assert rewards_of(TTRL(), seen)["a", "q"] == [0, 0, 0, 1]


def test_v13b_own_answers_never_enter_the_own_label():
    before = PAPER.label(cohort(), None)
    for agent, teacher in PAPER.teachers.items():
        changed = PAPER.label(cohort(ANSWERS | {agent: ["99"] * 4}), None)
        students = [s for s, t in PAPER.teachers.items() if t == agent]
        for key in before:
            assert (changed[key] != before[key]) == (key[0] in students)
        assert agent != teacher and before[agent, "q"] == tally(cohort())[teacher, "q"]


def test_v13c_two_agents_have_one_ring():
    a, b = CoRL(ring=("a", "b")), CoRL(ring=("b", "a"))
    assert a.teachers == b.teachers == {"a": "b", "b": "a"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly one of"),
        ({"ring": ["a"]}, "ring a would teach itself"),
        ({"ring": ["a", "b", "a"]}, "twice"),
        ({"ring": ["a", "b"], "teacher": {"a": "b", "b": "a"}}, "exactly one of"),
        ({"teacher": {"a": "b", "b": "b"}}, "b would teach itself"),
        ({"teacher": {"a": "b", "b": "a", "c": "a"}}, "teaches exactly one other"),
        ({"teacher": {"a": "b", "b": "c"}}, "teaches exactly one other"),
        ({"teacher": {"a": "b", "b": "a", "c": "d", "d": "c"}}, "falls apart.*several_rings"),
        ({"rings": ["a", "b"]}, "rings"),
    ],
)
def test_topologies_that_are_refused(options, words):
    with pytest.raises(ValidationError, match=words):
        TypeAdapter(AnyAlgorithm).validate_python({"name": "corl"} | options)


def test_topologies_that_are_allowed():
    two = {"teacher": {"a": "b", "b": "a", "c": "d", "d": "c"}, "several_rings": True}
    algo = TypeAdapter(AnyAlgorithm).validate_python({"name": "corl"} | two)
    algo.check(["d", "c", "b", "a"])
    with pytest.raises(ValueError, match=r"\['a', 'b', 'c', 'd'\].*\['a', 'b'\]"):
        algo.check(["a", "b"])
    assert isinstance(TypeAdapter(AnyAlgorithm).validate_python({"name": "ttrl"}), TTRL)
    with pytest.raises(ValueError, match="at least one"):
        TTRL().check([])


def test_v38_prompts_that_are_not_aligned_raise():
    algo = CoRL(ring=("a", "b"))

    def deal(uids):
        return [r for uid in uids for r in rollouts("b", uid, ["1", "2"])]

    a = [r for uid in ("q1", "q2", "q3") for r in rollouts("a", uid, ["1", "2"])]
    assert len(algo.label(a + deal(["q1", "q2", "q3"]), None)) == 6
    with pytest.raises(ValueError, match="not aligned: place 1 is uid='q2' at a and uid='q3'"):
        algo.label(a + deal(["q1", "q3", "q2"]), None)
    with pytest.raises(ValueError, match="uid='q3' was answered by a and not by b"):
        algo.label(a + deal(["q1", "q2"]), None)
    with pytest.raises(ValueError, match="uid='q9' was answered by b and not by a"):
        algo.label(a + deal(["q1", "q2", "q3", "q9"]), None)
    with pytest.raises(ValueError, match="not by b"):
        algo.label(a, None)


def test_v39_truth_changes_no_label_free_reward():
    seen = cohort()
    for algo in (TTRL(), PAPER):
        assert algo.needs == frozenset()
        plain = rewards_of(algo, seen)
        for gold in ({"q": "4"}, {"q": "random-7f3"}, {}):
            assert rewards_of(algo, seen, gold) == plain
    # negative control: the supervised reference does change
    assert rewards_of(RLVR(), seen, {"q": "4"}) != rewards_of(RLVR(), seen, {"q": "random-7f3"})


def test_rlvr():
    assert RLVR.needs == {"gold"}
    assert rewards_of(RLVR(), cohort(), {"q": "8/2"}) == {
        ("one", "q"): [1, 1, 0, 1],
        ("two", "q"): [0, 0, 1, 0],
        ("three", "q"): [0, 1, 0, 0],
    }
    with pytest.raises(ValueError, match=r"data\.gold"):
        RLVR().label(cohort(), None)
    with pytest.raises(ValueError, match="uid='q'"):
        RLVR().label(cohort(), {"other": "1"})


def test_case_b11_all_vote_and_some_train():
    seen = rollouts("a", "q", ["3"] * 5 + ["5"] * 3)
    label = TTRL().label(seen, None)["a", "q"]
    assert (label.answer, label.count, label.total) == ("3", 5, 8)
    groups = TTRL().reward(seen, {("a", "q"): label}, {})
    every = {r.key: stats(r) for r in seen}
    samples = spread(groups, seen, every, AdvantageConfig(), train_samples_per_prompt=4)
    assert len(samples) == 4 and not any(s.advantage for s in samples)


def test_only_solve_rollouts_vote():
    seen = rollouts("a", "q", ["1", "2"])
    checks = rollouts("a", "q", ["2", "2"])
    checks = [
        type(r)(**{f: getattr(r, f) for f in r.__slots__} | {"prompt": verify(r.prompt, seen[0])}) for r in checks
    ]
    assert tally(seen + checks)["a", "q"].total == 2
    assert TTRL().follow_up(seen) == []


def verify(prompt, parent):
    return type(prompt)(agent="a", uid="q", role="verify", messages=prompt.messages, n=2, parent=parent.key)


@settings(max_examples=40, deadline=None)
@given(
    answers=st.lists(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=4, max_size=4), min_size=2, max_size=4),
    seed=st.integers(0, 999),
)
def test_v11_v6_order_of_arrival_and_of_agents_does_not_matter(answers, seed):
    names = [f"agent{i}" for i in range(len(answers))]
    seen = cohort(dict(zip(names, answers, strict=True)))
    shuffled = random.Random(seed).sample(seen, len(seen))
    for algo in (TTRL(), CoRL(ring=tuple(names))):
        assert rewards_of(algo, shuffled) == rewards_of(algo, seen)
        assert advantages_of(algo, shuffled) == advantages_of(algo, seen)
        for agent, values in advantages_of(algo, seen).items():
            assert abs(sum(values)) < 1e-9, agent

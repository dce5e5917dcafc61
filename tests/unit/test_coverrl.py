"""CoVerRL by hand: who is verified, who is kept, who is revised, what is paid, and what is compared with what."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from megarl.advantages import spread
from megarl.algos import AnyAlgorithm
from megarl.algos.coverrl import REVISE, SOLVE, VERIFY, CoVerRL, Requests, revise_prompt, verify_prompt
from megarl.answers.read import read_answers
from megarl.answers.verdict import CORRECT, WRONG, read_verdict
from megarl.diagnostics import diagnose
from megarl.loss import TokenBatch, pg_loss
from megarl.packing import num_sequences, pack, response_tokens
from megarl.settings import AdvantageConfig, AnswersConfig, LossConfig
from megarl.verification import verification
from tests.unit.records import rollout, rollouts, stats

RELEASE = CoVerRL(choose="first", even_pairs=True, min_positives=1, unverified="keep")


def solved(answers, uid="q", agent="a"):
    """First turns: one boxed answer each; None: no box."""
    seen = [replace(r, text=f"\\boxed{{{r.answer}}}" if r.answer else "?") for r in rollouts(agent, uid, answers)]
    return read_answers(seen, AnswersConfig())


def answered(prompts, say, cfg=AnswersConfig()):
    """Rollouts of follow-up prompts: ``say(prompt, index)`` is the text."""
    said = [
        replace(rollout(p.agent, p.uid, i, text=say(p, i)), prompt=p, prompt_ids=np.array([1, 5, 9], np.int32))
        for p in prompts
        for i in range(p.n)
    ]
    return read_answers(said, cfg)


def turns(seen, algo, say, cfg=AnswersConfig()):
    """All rollouts of the step, with follow-ups answered by ``say``."""
    asked = []
    while asks := algo.follow_up(seen):
        asked.append(asks)
        seen = seen + answered(asks, say, cfg)
    return seen, asked


def groups_of(algo, seen):
    return {g.key: g for g in algo.reward(seen, algo.label(seen, None), {})}


def advantages_of(algo, seen, train=None):
    groups = list(groups_of(algo, seen).values())
    samples = spread(groups, seen, {r.key: stats(r) for r in seen}, AdvantageConfig(), train)
    return {s.key: s.advantage for s in samples}


def parents(prompts):
    return [p.parent.index for p in prompts]


def verdicts(*said):
    """say(): the verdicts in the order in which V+ (by answer) and then V- (by sample) are asked; revisions box 7."""
    rest = list(said)

    def say(prompt, index):
        return rest.pop(0) if prompt.role == "verify" else "\\boxed{7}"

    return say


def test_the_conversation():
    question = solved(["7", "7", "8"])
    seen, asked = turns(question, CoVerRL(), verdicts("Yes. " + CORRECT, CORRECT, WRONG, CORRECT))
    verify, revise = asked
    assert [(p.role, p.parent.index, p.n) for p in verify] == [("verify", 0, 1), ("verify", 1, 1), ("verify", 2, 2)]
    assert [(m.role, m.content) for m in verify[0].messages] == [
        ("user", "q"),
        ("assistant", "\\boxed{7}"),
        ("user", VERIFY),
    ]
    assert [(p.role, p.parent.role, p.parent.index, p.n) for p in revise] == [("revise", "verify", 0, 6)]
    assert [(m.role, m.content) for m in revise[0].messages] == [
        ("user", "q"),
        ("assistant", "\\boxed{8}"),
        ("user", VERIFY),
        ("assistant", WRONG),
        ("user", REVISE),
    ]
    assert revise[0].parent.parent == question[2].key
    assert CoVerRL().follow_up(seen) == []
    assert CORRECT in VERIFY and WRONG in VERIFY and "\\boxed{}" in SOLVE
    other = Requests(verify="Sure?", revise="Again:")
    assert verify_prompt(question[0], 3, other).messages[-1].content == "Sure?"
    assert revise_prompt(seen[3], 2, other).messages[-1].content == "Again:"


@pytest.mark.parametrize(
    ("text", "verdict", "well_formed", "guess"),
    [
        ("The answer is correct.", "correct", True, "correct"),
        ("So: The answer is wrong.", "wrong", True, "wrong"),
        ("The answer is correct.\n", "correct", True, "correct"),
        ("The answer is correct.\n\n", None, False, "correct"),
        ("The answer is correct", None, False, "correct"),
        ("The answer is correct. ", None, False, "correct"),
        ("The answer is Correct.", None, False, "correct"),
        ("**The answer is wrong.**", None, False, "wrong"),
        ("The answer is wrong.\nThe answer is correct.", "correct", True, "correct"),
        ("The answer is correct.\nThe answer is wrong.", "wrong", True, "wrong"),
        ("No mistake found, all steps hold", None, False, "wrong"),
        ("", None, False, "correct"),
        ("Looks good", None, False, "correct"),
        ("\\boxed{incorrect}", None, False, "wrong"),
    ],
)
def test_v25_verdicts(text, verdict, well_formed, guess):
    assert read_verdict(text) == (verdict, well_formed)
    assert read_verdict(text, "keywords") == (guess, well_formed)


def test_a_verify_turn_is_read_for_its_verdict_and_no_other_turn_is():
    ask = verify_prompt(solved(["7"])[0], 1)
    (boxed,) = answered([ask], lambda *_: f"\\boxed{{8}} {WRONG}")
    assert (boxed.answer, boxed.well_formed) == ("wrong", True)
    (guessed,) = answered([ask], lambda *_: "There is a mistake.", AnswersConfig(verdict="keywords"))
    assert (guessed.answer, guessed.well_formed) == ("wrong", False)
    (solve,) = solved(["7"])
    (said,) = read_answers([replace(solve, text=f"{CORRECT} \\boxed{{7}}")], AnswersConfig())
    assert said.answer == "7"


@pytest.mark.parametrize(("total", "right", "kept"), [(8, 4, False), (8, 5, True), (2, 1, False), (2, 2, True)])
def test_v21_filter(total, right, kept):
    seen = solved(["7"] * total + ["8"])
    say = verdicts(*[CORRECT] * right, *[WRONG] * (total - right), *[WRONG] * total)
    seen, asked = turns(seen, CoVerRL(), say)
    assert ("a", "q", "solve") in groups_of(CoVerRL(filter=False), seen)
    assert (("a", "q", "solve") in groups_of(CoVerRL(), seen)) == kept
    assert bool(groups_of(CoVerRL(), seen)) == kept  # a dropped question has no sample of any role
    assert len(asked) == (2 if kept else 1)


def test_a_verdict_that_is_none_counts_against_keeping():
    seen = solved(["7"] * 4 + ["8"])
    say = verdicts(CORRECT, CORRECT, "hm", "hm", *[WRONG] * 4)
    unread, asked = turns(seen, CoVerRL(), say)
    assert groups_of(CoVerRL(), unread) == {} and len(asked) == 1
    paper = AnswersConfig(verdict="keywords")  # the guess is "correct"
    guessed, asked = turns(seen, CoVerRL(), verdicts(CORRECT, CORRECT, "hm", "hm", *["a mistake"] * 3, WRONG), paper)
    assert ("a", "q", "solve") in groups_of(CoVerRL(), guessed)
    assert [p.parent.index for p in asked[1]] == [3]  # only a well-formed "wrong" is revised


@pytest.mark.parametrize(
    ("algo", "expected"),
    [
        (CoVerRL(min_positives=1), [0, 1, 2, 3, 5, 7, 8, 8]),
        (CoVerRL(), [0, 0, 2, 3, 5, 7, 8, 8]),
        (RELEASE, [0, 0, 2, 2, 4, 6, 8, 8]),
    ],
)
def test_v22_how_many_are_verified(algo, expected):
    counts = [0, 1, 2, 3, 5, 7, 8, 20]
    assert [algo.pairs(n) for n in counts] == expected
    for agreeing, wanted in zip(counts[1:], expected[1:], strict=True):
        seen = solved(["7"] * agreeing + ["8"])
        asks = algo.follow_up(seen)
        sides = [sum(p.n for p in asks if (p.parent.index < agreeing) == side) for side in (True, False)]
        assert sides == [wanted, wanted]  # balance


def test_which_positives():
    seen = solved(["7"] * 20 + ["8"])
    first = parents(CoVerRL(choose="first").follow_up(seen))
    chosen = parents(CoVerRL().follow_up(seen))
    assert first == [*range(8), 20]
    assert chosen != first and chosen == sorted(set(chosen)) and chosen[-1] == 20
    assert parents(CoVerRL().follow_up(list(reversed(seen)))) == chosen
    later = [replace(r, version=1) for r in seen]
    assert parents(CoVerRL().follow_up(later)) != chosen
    other = [replace(r, prompt=replace(r.prompt, uid="q2")) for r in seen]
    assert parents(CoVerRL().follow_up(other)) != chosen
    counts = np.zeros(20)
    for version in range(300):
        counts[parents(CoVerRL().follow_up([replace(r, version=version) for r in seen]))[:-1]] += 1
    assert counts.sum() == 2400 and counts.min() > 80 and counts.max() < 160  # 120 expected, deviation 8.5


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        (["8", "8", "9"], 6),  # least frequent, not first
        (["8", "9", "9", "8", "5", "6"], 8),  # equally rare: the first seen
        ([None, "8", "8"], 5),  # an answer that was read, before one that was not
        ([None, None], 4),
        (["8/1", "8.0", "9", "9", "9"], 4),  # equal answers are one class
    ],
)
def test_the_negative_is_of_the_least_frequent_class(others, chosen):
    asks = CoVerRL().follow_up(solved(["7"] * 4 + others))
    assert asks[-1].parent.index == chosen and asks[-1].n == len(asks) - 1


def test_random_negative():
    seen = solved(["7"] * 5 + ["8"] * 4 + ["9", None])
    drawn = [
        CoVerRL(negative="random").follow_up([replace(r, version=v) for r in seen])[-1].parent.index for v in range(60)
    ]
    assert set(drawn) == set(range(5, 11))


def test_v23_answer_anchors():
    """V+ is one group over eight different solutions; V-, all on one solution, another."""
    seen = solved(["7"] * 8 + ["8"])
    said = [CORRECT, CORRECT, WRONG, "mistake", CORRECT, CORRECT, CORRECT, WRONG]
    seen, _ = turns(seen, CoVerRL(), verdicts(*said, *[WRONG, CORRECT] * 4))
    groups = groups_of(CoVerRL(), seen)
    positive, negative = groups["a", "q", "verify", "positive"], groups["a", "q", "verify", "negative"]
    assert positive.rewards == (2, 2, 1, 0, 2, 2, 2, 1)
    assert len({k.parent for k in positive.rollouts}) == 8 and len({k.parent for k in negative.rollouts}) == 1
    advantages = advantages_of(CoVerRL(), seen)
    high, low = 0.661437, -1.984311
    expected = [high, high, -high, low, high, high, high, -high]
    assert [advantages[k] for k in positive.rollouts] == pytest.approx(expected, abs=1e-5)
    four, _ = turns(solved(["7"] * 4 + ["8"]), CoVerRL(), verdicts(CORRECT, WRONG, CORRECT, CORRECT, *[WRONG] * 4))
    group = groups_of(CoVerRL(), four)["a", "q", "verify", "positive"]
    assert group.rewards == (2, 1, 2, 2)
    advantages = advantages_of(CoVerRL(), four)
    assert [advantages[k] for k in group.rollouts] == pytest.approx([0.499999, -1.499997, 0.499999, 0.499999], abs=1e-6)


def test_v24_negatives_of_different_questions_never_meet():
    """Where the negative could not be read, its spelling is None in every question."""
    seen = solved(["7", "7", None], "q1") + solved(["7", "7", None], "q2")
    say = {"q1": verdicts(CORRECT, CORRECT, WRONG, WRONG), "q2": verdicts(CORRECT, CORRECT, CORRECT, CORRECT)}
    seen, _ = turns(seen, CoVerRL(), lambda p, i: say[p.uid](p, i))
    negatives = [g for key, g in groups_of(CoVerRL(), seen).items() if key[2:] == ("verify", "negative")]
    assert [g.rewards for g in negatives] == [(2, 2), (1, 1)]
    advantages = advantages_of(CoVerRL(), seen)
    assert [advantages[k] for g in negatives for k in g.rollouts] == [0.0] * 4


def test_v26_rewards():
    keywords = AnswersConfig(verdict="keywords")
    seen = solved(["7", "7", "7", "9", None])
    said = ["fine", CORRECT, WRONG, "a mistake", WRONG, CORRECT]

    def say(prompt, index):
        if prompt.role == "verify":
            return said.pop(0)
        return ["\\boxed{7}", "\\boxed{9}", "so 7", "\\boxed{14/2}", "\\boxed{}", "7"][index]

    seen, _ = turns(seen, CoVerRL(), say, keywords)
    groups = groups_of(CoVerRL(), seen)
    assert groups["a", "q", "solve"].rewards == (2, 2, 2, 1, 0)
    assert groups["a", "q", "verify", "positive"].rewards == (1, 2, 1)  # malformed and right 1, well-formed 2 and 1
    assert groups["a", "q", "verify", "negative"].rewards == (1, 2, 1)
    # paid for reaching the question's label, whichever answer is revised: a rejected positive too
    revised = (2, 1, 0, 2, 0, 0)
    assert {k: g.rewards for k, g in groups.items() if k[2] == "revise"} == {
        ("a", "q", "revise", "2.0"): revised,
        ("a", "q", "revise", "3.1"): revised,
    }
    bare = groups_of(CoVerRL(format_reward=False), seen)
    assert bare["a", "q", "solve"].rewards == (1, 1, 1, 0, 0)
    assert bare["a", "q", "verify", "positive"].rewards == (1, 1, 0)


def test_v27_corrections():
    seen = solved(["7"] * 8 + ["8"]) + solved(["7"] * 8 + ["8"], "dropped")
    say = {
        "q": verdicts(*[CORRECT] * 6, *[WRONG] * 2, *[WRONG] * 6, *["hm"] * 2),
        "dropped": verdicts(*[CORRECT] * 4, *[WRONG] * 4, *[WRONG] * 8),
    }
    seen, _ = turns(seen, CoVerRL(), lambda p, i: say[p.uid](p, i))
    revisions = [r for r in seen if r.prompt.role == "revise"]
    assert len(revisions) == (2 + 6) * 6
    groups = groups_of(CoVerRL(), seen)
    assert [len(g.rollouts) for key, g in groups.items() if key[2] == "revise"] == [6] * 8
    assert {key[1] for key in groups} == {"q"}


def test_v29_counts_and_the_trained_half():
    """16 of 32 answers train, and [8, 4, 2] pairs stay [8, 4, 2]."""
    seen = [
        r
        for uid, n in (("x", 20), ("y", 4), ("z", 2))
        for r in solved(["7"] * n + [str(i) for i in range(10, 42 - n)], uid)
    ]
    seen, _ = turns(seen, CoVerRL(), lambda p, i: CORRECT)
    groups = groups_of(CoVerRL(), seen)
    assert [len(g.rollouts) for key, g in groups.items() if key[2:] == ("verify", "positive")] == [8, 4, 2]
    assert [len(g.rollouts) for key, g in groups.items() if key[2:] == ("verify", "negative")] == [8, 4, 2]
    trained = advantages_of(CoVerRL(), seen, train=16)
    assert [sum(k.uid == uid and k.role == "solve" for k in trained) for uid in "xyz"] == [16] * 3
    assert max(k.index for k in trained if k.role == "solve") == 15
    assert sum(k.role == "verify" for k in trained) == 28


def test_v8_a_lone_verification_learns_nothing():
    lone = CoVerRL(min_positives=1)
    seen = solved(["7", "8"])  # a tie: the first is the label
    assert CoVerRL().follow_up(seen) == [] and groups_of(CoVerRL(), seen) == {}
    seen, _ = turns(seen, lone, verdicts(CORRECT, WRONG))
    assert groups_of(lone, seen)["a", "q", "verify", "positive"].rewards == (2,)
    assert [a for k, a in advantages_of(lone, seen).items() if k.role == "verify"] == [0.0, 0.0]


def test_questions_that_are_not_verified():
    unanimous, single, mute = solved(["7"] * 4, "u"), solved(["1", "2", "3", "4"], "s"), solved([None] * 4, "m")
    seen = unanimous + single + mute
    assert CoVerRL().follow_up(seen) == [] and groups_of(CoVerRL(), seen) == {}
    kept = groups_of(RELEASE, seen)
    assert [(key[1], g.rewards) for key, g in kept.items()] == [
        ("u", (2, 2, 2, 2)),
        ("s", (2, 1, 1, 1)),
        ("m", (0, 0, 0, 0)),
    ]
    metric = CoVerRL(verify_unanimous=True)
    seen, asked = turns(seen, metric, lambda *_: WRONG)
    assert [(p.uid, p.n) for p in asked[0]] == [("u", 1)] * 4 and len(asked) == 1
    assert groups_of(metric, seen) == {}


def test_filter_tau():
    seen = solved(["7"] * 3 + ["8", "9", None, None, None])  # 3 of 5 parsed, 3 of 8 in all
    assert CoVerRL(min_majority_share=0.6).follow_up(seen)
    algo = CoVerRL(min_majority_share=0.61)
    assert algo.follow_up(seen) == [] and groups_of(algo, seen) == {}
    assert groups_of(CoVerRL(min_majority_share=0.61, unverified="keep"), seen) == {}


def test_ablations():
    seen = solved(["7"] * 4 + ["8"])
    say = verdicts(*[CORRECT] * 3, *[WRONG] * 5)
    base, _ = turns(seen, CoVerRL(), say)
    without = groups_of(CoVerRL(train_verifier=False), base)
    assert {key[2] for key in without} == {"solve", "revise"}
    assert {key: g for key, g in groups_of(CoVerRL(), base).items() if key[2] != "verify"} == without
    _, asked = turns(seen, CoVerRL(revisions=0), verdicts(*[CORRECT] * 3, *[WRONG] * 5))
    assert len(asked) == 1
    asks = CoVerRL(anchor="prefix").follow_up(seen)
    assert [(p.parent.index < 4, p.n) for p in asks] == [(True, 4), (False, 4)]
    prefix, _ = turns(seen, CoVerRL(anchor="prefix"), verdicts(*[CORRECT] * 3, *[WRONG] * 5))
    assert len(groups_of(CoVerRL(anchor="prefix"), prefix)["a", "q", "verify", "positive"].rollouts) == 4
    unbalanced = CoVerRL(negative_samples=30).follow_up(seen)
    assert [p.n for p in unbalanced] == [1, 1, 1, 1, 30]


def test_options_are_checked():
    read = TypeAdapter(AnyAlgorithm)
    assert read.validate_python({"name": "coverrl", "revisions": 4}) == CoVerRL(revisions=4)
    with pytest.raises(ValidationError, match="even_pear"):
        read.validate_python({"name": "coverrl", "even_pear": True})
    with pytest.raises(ValueError, match="at least one"):
        CoVerRL().check([])
    assert CoVerRL(max_prompt_tokens=10).prompt_limit(12) == 12 and CoVerRL().prompt_limit(12) == 8192


ANSWERS = st.lists(st.sampled_from(["7", "7", "7", "8", "9", None]), min_size=8, max_size=8)


@settings(max_examples=25, deadline=None)
@given(
    answers=st.lists(ANSWERS, min_size=3, max_size=3), said=st.randoms(use_true_random=False), seed=st.integers(0, 99)
)
def test_order_of_arrival_and_data_parallelism_change_nothing(answers, said, seed):
    """Counts, anchors, rewards: the same whatever order rollouts arrive in; every sample trains once at DP 1, 2, 4."""
    algo, memory, rng = CoVerRL(revisions=2), {}, random.Random(seed)

    def say(prompt, index):
        key = (prompt.uid, prompt.role, prompt.parent, index)
        texts = [CORRECT, CORRECT, WRONG, "hm"] if prompt.role == "verify" else ["\\boxed{7}", "\\boxed{8}", "?"]
        return memory.setdefault(key, rng.choice(texts))

    first = [r for i, own in enumerate(answers) for r in solved(own, f"q{i}")]
    seen, asked = turns(first, algo, say)
    shuffled = random.Random(seed).sample(seen, len(seen))
    by_key = {k: dict(zip(g.rollouts, g.rewards, strict=True)) for k, g in groups_of(algo, seen).items()}
    assert {k: dict(zip(g.rollouts, g.rewards, strict=True)) for k, g in groups_of(algo, shuffled).items()} == by_key
    if asked:
        again = algo.follow_up(random.Random(seed).sample(first, len(first)))
        assert {(p.parent, p.n) for p in again} == {(p.parent, p.n) for p in asked[0]}
    samples = spread(
        list(groups_of(algo, seen).values()), seen, {r.key: stats(r, 0.1 * r.index) for r in seen}, AdvantageConfig()
    )
    losses = []
    for dp in (1, 2, 4):
        shards = pack(samples, dp=dp, tokens_per_microbatch=16)
        trained = [i for shard in shards for m in shard for i in m.sample_index.tolist() if i >= 0]
        assert sorted(trained) == list(range(len(samples)))
        losses.append(loss_of(samples, shards))
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def loss_of(samples, shards):
    total = 0.0
    for batch in (TokenBatch.of(m) for shard in shards for m in shard):
        value, _ = pg_loss(
            batch.policy_logprobs * 0.9,
            batch,
            LossConfig(clip_high=0.28),
            num_tokens=response_tokens(samples),
            num_sequences=num_sequences(samples),
            kl_coef=0.0,
        )
        total += float(value)
    return total


def test_case_b9_ten_samples_on_four_ranks():
    """Groups of five, DP 4: all ten train, padding carries no loss."""
    seen = rollouts("a", "x", ["7"] * 3 + ["8"] * 2) + rollouts("a", "y", ["7"] * 4 + ["8"])
    groups = list(groups_of(CoVerRL(unverified="keep", positives=1, min_positives=9), seen).values())
    samples = spread(groups, seen, {r.key: stats(r, 0.05 * r.index) for r in seen}, AdvantageConfig())
    assert len(samples) == 10 and any(s.advantage for s in samples)
    one, four = (pack(samples, dp=dp, tokens_per_microbatch=64) for dp in (1, 4))
    assert sorted(len(shard) for shard in four) == [1] * 4
    assert loss_of(samples, four) == pytest.approx(loss_of(samples, one), abs=1e-6)
    cut = loss_of(samples[:8], pack(samples[:8], dp=4, tokens_per_microbatch=64))  # what cutting would train on
    assert abs(cut - loss_of(samples, one)) > 1e-3


def test_v33_metrics_of_the_verifier():
    """Labels right [1,1,1,0,0,0,0,1], kept [1,1,0,0,0,1,1,1]; and the confusion TP 6, FN 2, TN 3, FP 5."""
    seen, gold, groups = [], {}, []
    for i, (right, kept) in enumerate(zip([1, 1, 1, 0, 0, 0, 0, 1], [1, 1, 0, 0, 0, 1, 1, 1], strict=True)):
        own = solved(["7", "7", "8"], f"q{i}")
        gold[f"q{i}"] = "7" if right else "8"
        seen += own
        groups += groups_of(CoVerRL(unverified="keep"), own).values() if kept else []
    labels = CoVerRL().label(seen, None)
    said = {True: [CORRECT] * 6 + [WRONG, "hm"], False: [WRONG] * 3 + [CORRECT] * 5}
    judged = [r for r in seen if r.index == 0 and r.prompt.uid in ("q0", "q3")]  # one answer right, one wrong
    for answer in judged:
        texts = said[answer.answer == gold[answer.prompt.uid]]
        seen += answered([verify_prompt(answer, 8)], lambda _, i, texts=texts: texts[i])
    metrics = verification(seen, labels, groups, gold)
    assert {k: round(v, 6) for k, v in metrics.items()} == {
        "verifier/verified_share": 0.25,
        "verifier/kept_share": 0.625,
        "verifier/well_formed_share": 15 / 16,
        "verifier/said_correct_share": 11 / 16,
        "verifier/revisions": 0,
        "verifier/correct_recall": 0.75,
        "verifier/wrong_recall": 0.375,
        "verifier/accuracy": 0.5625,
        "verifier/precision": 0.545455,
        "verifier/drop_rate_wrong_label": 0.5,
        "verifier/drop_rate_right_label": 0.25,
        "verifier/label_accuracy_kept": 0.6,
    }
    assert verification(solved(["7"]), labels, groups, gold) == {}


def test_a_verifier_that_says_nothing_has_no_recall():
    """q0 is answered right, q1 wrong; on wrong answers a verdict is read, on right ones none, then none at all."""
    seen = solved(["7", "7"], "q0") + solved(["8", "8"], "q1")
    labels, gold = CoVerRL().label(seen, None), {"q0": "7", "q1": "7"}

    def judged(of_wrong):
        asks = [verify_prompt(r, 2) for r in seen]
        said = answered(asks, lambda p, i: "hm" if p.uid == "q0" else of_wrong[i])
        return {k.removeprefix("verifier/"): v for k, v in verification([*seen, *said], labels, [], gold).items()}

    found = judged((WRONG, "hm"))
    assert found["wrong_recall"] == 1 / 2 and found["accuracy"] == 2 / 8
    assert "correct_recall" not in found and "precision" not in found
    silent = judged(("hm", "hm"))
    assert silent["well_formed_share"] == 0 and not {"wrong_recall", "correct_recall", "accuracy"} & silent.keys()


def test_metrics_of_revisions_and_of_rewards_that_pay_for_form():
    seen = solved(["7", "7", "8"])
    texts = iter(["\\boxed{7}", "\\boxed{8}", "\\boxed{9}", "?", "\\boxed{7}", "\\boxed{8}"])
    first = verdicts(CORRECT, CORRECT, WRONG, CORRECT)
    seen, _ = turns(seen, CoVerRL(), lambda p, i: first(p, i) if p.role == "verify" else next(texts))
    labels = CoVerRL().label(seen, None)
    groups = list(groups_of(CoVerRL(), seen).values())
    metrics = diagnose(seen, labels, groups, {"q": "7"}, {r.key: stats(r) for r in seen})
    assert metrics["agent/a/verifier/revisions"] == 6
    assert metrics["agent/a/verifier/changed_share"] == 4 / 6
    assert metrics["agent/a/verifier/wrong_to_right"] == 2 / 6 and metrics["agent/a/verifier/right_to_wrong"] == 0
    assert metrics["agent/a/reward/reward_accuracy"] == 1.0  # 2, 2 and 1, of which the 1 is for form
    other = diagnose(seen, labels, groups, {"q": "8"}, {r.key: stats(r) for r in seen})
    assert other["agent/a/reward/reward_accuracy"] == 0.0
    assert other["agent/a/verifier/right_to_wrong"] == 4 / 6

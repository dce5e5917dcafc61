"""Recorded rollouts of two agents on four problems, and the table of their scores worked by hand."""

from dataclasses import replace
from fractions import Fraction

from megarl.algos.coverrl import revise_prompt, verify_prompt
from megarl.types import Rollout
from tests.unit.records import rollout

GOLD = {"q1": "7", "q2": r"\frac{1}{2}", "q3": "12", "q4": "5"}
CORRECT, WRONG = "The answer is correct.", "So: The answer is wrong."

# ann: (answer, verification, revision) of four samples per problem; None: no box, or not asked.
#      right answers   3 + 1 + 0 + 4 = 8 of 16;  answered 15
ANN = {
    "q1": [("7", CORRECT, None), ("7", CORRECT, None), ("8", WRONG, "7"), ("7.0", WRONG, "9")],
    "q2": [
        ("0.5", WRONG, "1/2"),
        ("1/3", WRONG, "none"),
        (r"\frac13", "No mistake found.", None),
        (None, CORRECT, None),
    ],
    "q3": [("11", CORRECT, None), ("10", CORRECT, None), ("11", WRONG, "12"), ("10", WRONG, "13")],
    "q4": [("5", CORRECT, None), ("5", CORRECT, None), ("5", CORRECT, None), ("5", CORRECT, None)],
}
# bob verifies nothing; right answers 1 + 4 + 2 + 0 = 7 of 16; answered 12
BOB = {
    "q1": ["8", "8", "8", "7"],
    "q2": [r"\frac{1}{2}", "1/2", "0.50", r"\dfrac{1}{2}"],
    "q3": ["12", "12", "9", "9"],
    "q4": [None, None, None, None],
}
BY_HAND = {
    "ann": {
        "avg@4": 8 / 16,
        # per problem c = 3, 1, 0, 4 of n = 4
        # pass@2 = 1 - C(n-c,2)/C(4,2):  1 - 0/6, 1 - 3/6, 1 - 6/6, 1 - 0/6
        "pass@1": 8 / 16,
        "pass@2": (1 + 1 / 2 + 0 + 1) / 4,
        "pass@4": 3 / 4,
        # the first answers are right in q1, q2, q4
        "maj@1": 3 / 4,
        # of two different votes the first wins: q2 stays right
        "maj@2": 3 / 4,
        # all four: q1 7 (3 votes), q2 1/3 (2 of 3 parsed), q3 11 (a tie, the first), q4 5
        "maj@4": 2 / 4,
        "answered": 15 / 16,
        "truncated": 0.0,
        "tokens": 3.0,
        "acc_first": 8 / 16,
        # q1 7, 7, 7 (revised), 9 (was right); q2 1/2 (revised to the same); q3 12 (revised); q4 all
        "acc_final": (3 + 1 + 1 + 4) / 16,
        # TP 2 + 0 + 0 + 4, TN 1 + 1 + 2 + 0; q2's third verification has no verdict
        "verify_accuracy": 10 / 16,
        "correct_recall": 6 / 8,
        "wrong_recall": 4 / 8,
        "malformed": 1 / 16,
        "verified": 1.0,
        "revised": 6 / 16,
        "wrong_to_right": 2 / 16,
        "right_to_wrong": 1 / 16,
    },
    "bob": {
        "avg@4": 7 / 16,
        # c = 1, 4, 2, 0:  1 - 3/6, 1, 1 - 1/6, 0
        "pass@1": 7 / 16,
        "pass@2": float(Fraction(1, 2) + 1 + Fraction(5, 6)) / 4,
        "pass@4": 3 / 4,
        # q2 and q3 are right at first; q3's tie 12, 12, 9, 9 goes to the first; q4 has no vote
        "maj@1": 2 / 4,
        "maj@2": 2 / 4,
        "maj@4": 2 / 4,
        "answered": 12 / 16,
        "truncated": 0.0,
        "tokens": 3.0,
    },
    "cohort": {
        # two answers of each, in the order ann, bob, ann, bob:
        # q1 7 8 7 8 (tie, 7)   q2 1/2 1/2 1/3 1/2   q3 11 12 10 12   q4 5 - 5 -
        "maj@4": 4 / 4,
        # all: q1 four 7, four 8 (7 came first)   q2 five 1/2   q3 two each of 11, 12, 10, 9 (11 came first)   q4 5
        "maj@8": 3 / 4,
    },
}


def boxed(answer: str | None) -> str:
    return "I do not know." if answer in (None, "none") else rf"It is \boxed{{{answer}}}."


def turn(parent: Rollout, text: str) -> Rollout:
    ask = revise_prompt if parent.prompt.role == "verify" else verify_prompt
    return replace(parent, prompt=ask(parent, 1), index=0, text=text)


def recorded() -> list[Rollout]:
    out = []
    for uid, samples in ANN.items():
        for i, (answer, verdict, revision) in enumerate(samples):
            first = rollout("ann", uid, i, text=boxed(answer))
            check = turn(first, verdict)
            out += [first, check] + ([turn(check, boxed(revision))] if revision else [])
    return out + [rollout("bob", uid, i, text=boxed(a)) for uid, of in BOB.items() for i, a in enumerate(of)]

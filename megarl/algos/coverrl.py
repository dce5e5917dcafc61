r"""CoVerRL: one policy answers, judges its own answers, and revises what it called wrong (arXiv 2603.17775).

1. N answers per question; the label is their majority vote.
2. Up to M answers that agree with the label are verified once each, and one answer of the least frequent other class
   as many times: V+ and V- are equally large, so that neither verdict can win by being said always.
3. A question is kept if more than half of V+ call the label's answer correct; all others train nothing.
4. Every well-formed "wrong" is followed by K revisions.
5. Reward = 1 for form + 1 for content, in one update over all roles. Content is: the label's answer (answers and
   revisions), "correct" in V+, "wrong" in V-.

Answer-Anchored GRPO compares the verdicts in V+ with each other: their prompts differ (different solutions), but the
answer that is judged is the same. That is nothing but a choice of group keys, see ``CoVerRL.reward``.

Differences from the release: random instead of the first M; no even counts; questions that were not verified are
dropped instead of slipping past the filter; a verdict that is not well-formed is no verdict; groups are never keyed by
an answer's spelling, under which V+ splits and V- of different questions meet; nothing depends on the number of ranks.
``positives``, ``even_pairs``, ``min_positives``, ``unverified`` and ``answers.verdict`` bring the release back.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from megarl.algos.common import tally
from megarl.algos.coverrl_tree import Question, least_frequent, questions
from megarl.answers.equal import equal
from megarl.answers.verdict import CORRECT, WRONG
from megarl.settings import Section
from megarl.types import Gold, Group, Labels, Message, Need, Prompt, Role, Rollout, RolloutKey, TokenStats, derive

# what follows a question: data.views.<view>.after
SOLVE = "\nThink it through step by step. Put your final answer in \\boxed{}."
VERIFY = (
    "Go through this solution step by step. If one of its steps is wrong, name that step, say why it is wrong, and end "
    f'with the sentence "{WRONG}" If all of its steps hold, end with the sentence "{CORRECT}"'
)
REVISE = "You found that your answer was wrong. Reflect step by step and put your final answer in \\boxed{}."
REVISE_CHOICE = (  # GPQA, evaluation only
    "You found that your answer was wrong. Reflect step by step and put the letter of your choice, A, B, C or D, and "
    "nothing else in \\boxed{}."
)


class Requests(Section):
    """What the user says in the later turns of the conversation."""

    verify: str = Field(default=VERIFY, description="asks for a verdict on the answer before it")
    revise: str = Field(default=REVISE, description="asks for another answer, after a verdict of wrong")


def verify_prompt(answer: Rollout, n: int, requests: Requests = Requests()) -> Prompt:  # noqa: B008 (frozen value)
    """Ask for ``n`` verdicts on an answer, as the next turn of its conversation."""
    return _next_turn(answer, "verify", requests.verify, n)


def revise_prompt(verdict: Rollout, n: int, requests: Requests = Requests()) -> Prompt:  # noqa: B008 (frozen value)
    """Ask for ``n`` revisions after a verdict, as the next turn of its conversation."""
    return _next_turn(verdict, "revise", requests.revise, n)


def _next_turn(said: Rollout, role: Role, request: str, n: int) -> Prompt:
    before = said.prompt
    messages = (*before.messages, Message("assistant", said.text), Message("user", request))
    return Prompt(agent=before.agent, uid=before.uid, role=role, messages=messages, n=n, parent=said.key)


class CoVerRL(Section):
    """An agent answers, verifies its answers and revises; r = 1 for form + 1 for content, in every role.

    N is ``batch.samples_per_prompt``, of which ``batch.train_samples_per_prompt`` train. The paper's ablations:

    ``filter=false``, ``train_verifier=false``, ``revisions=0`` (no self-correction), ``anchor=prefix`` (no AA-GRPO),
    ``negative=random`` (no least ratio), ``min_majority_share`` (+ tau), ``negative_samples`` (unbalanced);
    ``loss.clip_high=0.2`` (no clip-higher), ``agents.<name>.template={enable_thinking: false}`` (non-thinking).
    """

    name: Literal["coverrl"] = "coverrl"
    needs: ClassVar[frozenset[Need]] = frozenset()

    positives: int = Field(default=8, ge=1, description="M: at most so many answers that agree are verified")
    choose: Literal["random", "first"] = Field(default="random", description="which M of them")
    min_positives: int = Field(default=2, ge=1, description="a question with fewer that agree is not verified")
    even_pairs: bool = Field(default=False, description="fewer than M: verify the largest even number (release)")
    negative: Literal["least-frequent", "random"] = Field(
        default="least-frequent", description="which answer that disagrees is verified"
    )
    negative_samples: int | None = Field(default=None, ge=1, description="verdicts on it; null: as many as in V+")
    anchor: Literal["answer", "prefix"] = Field(
        default="answer", description="answer: V+ spans many solutions; prefix: one solution, verified as many times"
    )
    filter: bool = Field(default=True, description="keep a question only if most of V+ call its label correct")
    min_majority_share: float = Field(
        default=0.0, ge=0, le=1, description="tau: drop questions whose majority is a smaller share of the parsed votes"
    )
    unverified: Literal["drop", "keep"] = Field(
        default="drop", description="questions without V+ and V-; keep: they train their answers (release)"
    )
    verify_unanimous: bool = Field(default=False, description="verify V+ of a question without Y-; does not train")
    train_verifier: bool = Field(default=True, description="verdicts train, too")
    revisions: int = Field(default=6, ge=0, description="K, per verdict of wrong")
    format_reward: bool = Field(default=True, description="1 for form beside the 1 for content")
    max_prompt_tokens: int = Field(
        default=8192, ge=1, description="longest prompt of a later turn; longer ones are not asked, and counted"
    )
    requests: Requests = Field(default=Requests(), description="texts of the later turns")

    def check(self, agents: Sequence[str]) -> None:
        """Any agents; each is its own verifier."""
        if not agents:
            raise ValueError("agents is empty: a run needs at least one")

    def prompt_limit(self, question: int) -> int:
        """Longest prompt of any turn, in tokens."""
        return max(question, self.max_prompt_tokens)

    def follow_up(self, seen: Sequence[Rollout]) -> list[Prompt]:
        """Per question: what to verify, once it has answers; what to revise, once it has verdicts."""
        asks: list[Prompt] = []
        for q in questions(seen, tally(seen)):
            if not q.verdicts:
                asks += self._to_verify(q)
            elif not q.revisions and self.revisions and self.keeps(q):
                judged = (*q.positive_verdicts, *q.negative_verdicts)
                wrong = [v for v in judged if v.well_formed and v.answer == "wrong"]
                asks += [revise_prompt(v, self.revisions, self.requests) for v in wrong]
        return asks

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """Each agent's own vote over its first answers; verdicts and revisions do not vote."""
        return tally(seen)

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """Groups of the kept questions, question by question, so that every part of an update holds all roles."""
        return [group for q in questions(seen, labels) if self.keeps(q) for group in self._groups(q)]

    def pairs(self, agreeing: int) -> int:
        """|V+|, of |Y+| answers that agree with the label."""
        if agreeing < self.min_positives:
            return 0
        if agreeing < self.positives and self.even_pairs:
            return agreeing - agreeing % 2
        return min(agreeing, self.positives)

    def keeps(self, q: Question) -> bool:
        """Does the question train? A tie among the verdicts of V+ rejects it, and so does a verdict that is none."""
        if q.ballot.share_parsed < self.min_majority_share:
            return False
        if not q.verified:
            return self.unverified == "keep"
        return not self.filter or confirmed(q.positive_verdicts)

    def _to_verify(self, q: Question) -> list[Prompt]:
        count = self.pairs(len(q.agreeing))
        divided = q.ballot.share_parsed < self.min_majority_share
        if not count or divided or not (q.others or self.verify_unanimous):
            return []
        chosen, each = self._positives(q, count)
        asks = [verify_prompt(r, each, self.requests) for r in chosen]
        if q.others:
            asks.append(verify_prompt(self._negative(q), self.negative_samples or count, self.requests))
        return asks

    def _positives(self, q: Question, count: int) -> tuple[list[Rollout], int]:
        """The answers to verify, and how often each."""
        if self.anchor == "prefix":
            return [q.agreeing[_order(q, "prefix", len(q.agreeing))[0]]], count
        if self.choose == "first":
            return list(q.agreeing[:count]), 1
        return [q.agreeing[i] for i in sorted(_order(q, "positives", len(q.agreeing))[:count])], 1

    def _negative(self, q: Question) -> Rollout:
        if self.negative == "random":
            return q.others[_order(q, "negative", len(q.others))[0]]
        return least_frequent(q.others)

    def _groups(self, q: Question) -> Iterator[Group]:
        """Keys are made of the question, the role and the side, never of an answer: answers may be missing."""
        label, name = q.ballot.answer, (q.agent, q.uid)
        yield self._group((*name, "solve"), q.answers, label, equal)
        if self.train_verifier and q.verified:
            yield self._group((*name, "verify", "positive"), q.positive_verdicts, "correct", str.__eq__)
            yield self._group((*name, "verify", "negative"), q.negative_verdicts, "wrong", str.__eq__)
        for parent, members in q.revisions.items():
            path = f"{parent.parent.index if parent.parent else ''}.{parent.index}"
            yield self._group((*name, "revise", path), members, label, equal)

    def _group(
        self, key: tuple[str, ...], members: Sequence[Rollout], wanted: str | None, same: Callable[[str, str], bool]
    ) -> Group:
        rewards = [
            float(self.format_reward and r.well_formed)
            + float(r.answer is not None and wanted is not None and same(r.answer, wanted))
            for r in members
        ]
        return Group(key=key, rollouts=tuple(r.key for r in members), rewards=tuple(rewards))


def confirmed(verdicts: Sequence[Rollout]) -> bool:
    """Do more than half of the verdicts say "correct"? One that could not be read counts against it."""
    return 2 * sum(v.answer == "correct" for v in verdicts) > len(verdicts)


def _order(q: Question, what: str, size: int) -> list[int]:
    """A random order of ``size`` places that depends on the question and the step (as the weights' version) alone.

    The run's seed has no part in it: it has decided which answer stands at which place.
    """
    version = q.answers[0].version
    seed = derive("coverrl", version, q.agent, q.uid, what)
    return np.random.Generator(np.random.PCG64(seed)).permutation(size).tolist()

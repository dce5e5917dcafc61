"""The records that travel between the stages of a step; numpy and the standard library only.

Axes: T packed tokens, S sequences in a pack, Lp prompt tokens, Lc response tokens of one rollout.
Every record is frozen and built by keyword; a stage makes new ones and never edits those it was given.
Records point at each other by key, because object identity does not survive the trip through Ray.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

Role = Literal["solve", "verify", "revise"]
Stop = Literal["end", "length", "abort"]
Need = Literal["entropy", "certainty", "reference", "gold"]
Metrics = dict[str, float]
Gold = Mapping[str, str]  # uid -> true answer; held by the deck, found in no record


class Message(NamedTuple):
    """One chat turn."""

    role: Literal["system", "user", "assistant"]
    content: str


class RolloutKey(NamedTuple):
    """Names one rollout of one step for ever: it links, sorts, logs and seeds it."""

    agent: str
    uid: str
    role: Role
    parent: "RolloutKey | None"
    index: int  # pyright: ignore[reportIncompatibleMethodOverride] - tuple.index is of no use on a key


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """Random state of one step, as a value.

    Example: ``Seed(run=1, step=3).sample(key)`` is the same number on every machine and in any call order.
    """

    run: int
    step: int

    def sample(self, key: RolloutKey, stream: str | None = None) -> int:
        """Seed of one rollout, 62 bits; ``stream`` replaces the agent's name: agents given one stream sample alike."""
        return derive(self.run, self.step, stream if stream is not None else key.agent, _spell(key))

    def choice(self, *what: object) -> int:
        """Seed of a named random choice of this step, 62 bits."""
        return derive(self.run, self.step, *what)


def derive(*parts: object) -> int:
    """A 62-bit hash of the parts, equal in every process (unlike ``hash``)."""
    text = "\x1f".join(repr(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _spell(key: RolloutKey | None) -> str:
    if key is None:
        return ""
    # the agent's own name is left out: it enters through the stream
    return f"{_spell(key.parent)}/{key.uid}:{key.role}:{key.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A dataset row as one agent sees it, or a follow-up turn: a request for ``n`` rollouts."""

    agent: str
    uid: str
    role: Role
    messages: tuple[Message, ...]
    n: int
    parent: RolloutKey | None = None

    def key(self, index: int) -> RolloutKey:
        """Of the rollout number ``index`` (0 .. n - 1)."""
        return RolloutKey(self.agent, self.uid, self.role, self.parent, index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled response. ``token_ids`` holds what the engine sampled, the end token included."""

    prompt: Prompt
    index: int  # 0 .. prompt.n - 1
    prompt_ids: np.ndarray  # int32[Lp]
    token_ids: np.ndarray  # int32[Lc]
    logprobs: np.ndarray  # float32[Lc], of the sampled tokens at the sampling temperature, by the engine
    text: str  # decoded response without special tokens
    stop: Stop
    version: int  # of the weights that sampled it
    answer: str | None = None  # filled in by answers.read
    well_formed: bool = False

    @property
    def key(self) -> RolloutKey:
        return self.prompt.key(self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """What the policy says of a rollout's response tokens, each float32[Lc], at the sampling temperature."""

    logprobs: np.ndarray
    reference: np.ndarray | None = None  # logprobs under the frozen initial weights
    entropy: np.ndarray | None = None  # nats
    certainty: np.ndarray | None = None  # KL(uniform || policy) over the true vocabulary, nats


@dataclass(frozen=True, slots=True, kw_only=True)
class Ballot:
    """Outcome of one vote. The two shares have different denominators in print; the name says which."""

    answer: str | None  # None: nothing could be parsed
    count: int  # votes for the answer
    parsed: int  # voters with an answer
    total: int  # voters
    winners: tuple[int, ...] = ()  # positions, among the voters, of those that agree with the answer
    tie: bool = False  # another class had as many votes
    undecided: int = 0  # pairs of classes that could neither be shown equal nor different

    @property
    def share_parsed(self) -> float:
        return self.count / self.parsed if self.parsed else 0.0

    @property
    def share_total(self) -> float:
        return self.count / self.total if self.total else 0.0


Labels = Mapping[tuple[str, str], Ballot]  # (agent, uid) -> the label that agent is trained with


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rollouts whose rewards are compared with each other. Whoever is in no group does not train."""

    key: tuple[str, ...]  # e.g. (agent, uid, role)
    rollouts: tuple[RolloutKey, ...]  # G
    rewards: tuple[float, ...]  # G; NaN: no reward could be given, the member is masked out


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training sequence: prompt and response, L = Lp + Lc tokens.

    ``mask`` and the logprobs stand at the token they speak of: ``mask[i]`` is true where ``token_ids[i]`` is a
    response token; the logprobs are 0 where it is false.
    """

    key: RolloutKey
    token_ids: np.ndarray  # int32[L]
    mask: np.ndarray  # bool[L]
    rollout_logprobs: np.ndarray  # float32[L], engine; NaN where the engine gave none
    policy_logprobs: np.ndarray  # float32[L], policy before the update
    reference_logprobs: np.ndarray | None = None  # float32[L]
    advantage: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Samples laid end to end, shifted: position t predicts ``labels[t]``, the next token of its own sequence.

    All per-token arrays speak of the label, so ``mask[t]`` is true where ``labels[t]`` is a response token. The last
    position of a sequence, and every position of padding, has mask 0 and label 0.
    """

    token_ids: np.ndarray  # int64[T]
    labels: np.ndarray  # int64[T]
    positions: np.ndarray  # int64[T], from 0 in each sequence
    mask: np.ndarray  # bool[T]
    sequence_ids: np.ndarray  # int64[T], index into the S axis
    rollout_logprobs: np.ndarray  # float32[T]
    policy_logprobs: np.ndarray  # float32[T]
    reference_logprobs: np.ndarray | None  # float32[T]
    advantages: np.ndarray  # float32[S]
    sequence_tokens: np.ndarray  # int64[S], response tokens of each sequence, whole (not of this rank's slice)
    sample_index: np.ndarray  # int64[S], which input sample a sequence is; -1: padding
    cu_seqlens: np.ndarray  # int32[S + 1]

    @property
    def tokens(self) -> int:
        return int(self.token_ids.shape[0])

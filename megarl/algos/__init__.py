"""The methods. One is its own configuration: a frozen section with the pure functions that make it what it is."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Protocol

from pydantic import Field

from megarl.algos.controls import FormatOnly, RandomReward
from megarl.algos.corewarding import CoRewarding
from megarl.algos.corl import CoRL
from megarl.algos.coverrl import CoVerRL
from megarl.algos.intuitor import Intuitor
from megarl.algos.rent import RENT
from megarl.algos.rlvr import RLVR
from megarl.algos.ttrl import TTRL
from megarl.types import Gold, Group, Labels, Need, Prompt, Rollout, RolloutKey, TokenStats

AnyAlgorithm = Annotated[
    RLVR | TTRL | CoRL | CoVerRL | CoRewarding | Intuitor | RENT | RandomReward | FormatOnly,
    Field(discriminator="name"),
]


class Algorithm(Protocol):
    """What makes a method: whom it asks again, what it takes for the truth, and what it pays for."""

    needs: ClassVar[frozenset[Need]]

    def check(self, agents: Sequence[str]) -> None:
        """Raise ValueError where the method cannot run with agents of these names."""
        ...

    def prompt_limit(self, question: int) -> int:
        """Longest prompt of any turn, in tokens, where a question has at most ``question``."""
        ...

    def follow_up(self, seen: Sequence[Rollout]) -> list[Prompt]:
        """The next turn's prompts, from all rollouts of the step so far; none ends the conversation."""
        ...

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """(agent, uid) -> the answer to train towards. ``gold`` is None unless the method needs it."""
        ...

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """Rewards, in the groups in which they are compared."""
        ...

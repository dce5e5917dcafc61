"""Controls: rewards that know nothing of the answer. A method counts for what it gains over these.

On Qwen2.5-Math rewards drawn at random gained most of what true ones did, and a format reward somewhat less; on Llama
random ones cost accuracy (arXiv 2506.10947, which puts it down to a bias of clipping). With one update per step no
ratio leaves 1, so nothing is clipped and there is no such bias.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field

from megarl.algos.common import OneTurn, paid
from megarl.types import Gold, Group, Labels, Rollout, RolloutKey, TokenStats, derive

_SEEDS = 1 << 62  # derive is below


class RandomReward(OneTurn):
    """r = 1 with a fixed probability, else 0. No label.

    A function of the run-independent ``seed``, the rollout's key and the weights that sampled it: the same for any
    order of arrival, another one when a prompt comes again.
    """

    name: Literal["random"] = "random"
    probability: float = Field(default=0.5, gt=0, lt=1, description="of a reward of 1")
    seed: int = Field(default=0, description="of the coins, apart from the run's")

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """None: nothing is taken for the truth."""
        return {}

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """A coin per rollout."""

        def coin(r: Rollout) -> float:
            return float(derive(self.seed, "random reward", r.version, *r.key) < self.probability * _SEEDS)

        return paid(seen, coin)


class FormatOnly(OneTurn):
    """r = 1 where an answer could be read, whatever it says, else 0. No label."""

    name: Literal["format"] = "format"

    def label(self, seen: Sequence[Rollout], gold: Gold | None) -> Labels:
        """None: nothing is taken for the truth."""
        return {}

    def reward(self, seen: Sequence[Rollout], labels: Labels, stats: Mapping[RolloutKey, TokenStats]) -> list[Group]:
        """1 for the form."""
        return paid(seen, lambda r: float(r.answer is not None))

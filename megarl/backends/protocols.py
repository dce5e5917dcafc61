"""The whole boundary between the loop and whatever trains or samples: Policy and Engine.

Two implementations of each live in this folder (Megatron and transformers; vLLM, transformers and replay) and run
the same contract tests.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megarl.settings import BatchConfig, LossConfig, SamplingConfig
from megarl.types import Metrics, Need, Prompt, Rollout, RolloutKey, Sample, Seed, TokenStats


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBucket:
    """Some of a policy's weights under their Hugging Face names, in one safetensors file.

    The file stands in shared memory where that has room, under the same path on every node that hosts the policy.
    """

    path: Path
    names: tuple[str, ...]
    nbytes: int


class Policy(Protocol):
    """A trainable model. Logprobs, entropy and certainty are at the sampling temperature it was built with."""

    version: int  # calls of update it has seen since it was made of the model directory; save and load keep it

    def measure(self, rollouts: Sequence[Rollout], needs: frozenset[Need]) -> dict[RolloutKey, TokenStats]:
        """Statistics of every rollout's response tokens under the present weights.

        Raises ValueError for a token id that is not of the model's vocabulary.
        """
        ...

    def update(
        self, samples: Sequence[Sample], loss: LossConfig, batch: BatchConfig, learning_rates: Sequence[float]
    ) -> Metrics:
        """One optimizer step per learning rate, over ``packing.minibatches(samples, len(learning_rates))``.

        Returns loss, grad_norm, clip_share, kl ... as ``updates.take_steps`` does. No samples: only version moves.
        """
        ...

    def weights(self, bucket_bytes: int) -> Generator[WeightBucket, None, None]:
        """All weights, bucket by bucket; a bucket's file is gone once the next one is asked for, or this is closed."""
        ...

    def save(self, path: Path) -> None: ...
    def begin_save(self, path: Path) -> None:
        """As ``save``, but what is written may not be there before ``end_save``; updates in between do not reach it."""
        ...

    def end_save(self) -> None: ...
    def load(self, path: Path) -> None: ...
    def onload(self) -> None: ...
    def offload(self) -> None: ...
    def close(self) -> None: ...


class Engine(Protocol):
    """A sampler. It refuses to generate before its first refit."""

    version: int  # of the policy that its weights were taken from

    def generate(self, prompts: Sequence[Prompt], seed: Seed, sampling: SamplingConfig) -> list[Rollout]:
        """``n`` rollouts of every prompt, in prompt order then index order.

        Each rollout has its own seed, so results do not depend on how many engines share the work.
        Raises ValueError for a prompt with a token id that is not of the model's vocabulary.
        """
        ...

    def begin_refit(self) -> None: ...
    def load_weights(self, bucket: WeightBucket) -> None: ...
    def finish_refit(self, version: int) -> None:
        """Raise unless every weight of the model has come; drop cached prefixes; stamp the version."""
        ...

    def wake(self) -> None: ...
    def sleep(self) -> None: ...
    def close(self) -> None: ...

"""The whole boundary between the loop and whatever trains or samples: Policy and Engine.

Two implementations of each live in this folder (Megatron and transformers; vLLM, transformers and replay) and run
the same contract tests.
"""

from collections.abc import Iterator, Sequence
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

    version: int  # updates steps it has seen; the engine's weights carry the same number

    def measure(self, rollouts: Sequence[Rollout], needs: frozenset[Need]) -> dict[RolloutKey, TokenStats]:
        """Statistics of every rollout's response tokens under the present weights."""
        ...

    def update(
        self, samples: Sequence[Sample], loss: LossConfig, batch: BatchConfig, learning_rates: Sequence[float]
    ) -> Metrics:
        """One optimizer step per learning rate, over ``packing.minibatches(samples, len(learning_rates))``.

        Returns loss, grad_norm, clip_share, kl ... averaged over the updates. No samples: nothing but version moves.
        """
        ...

    def weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """All weights, bucket by bucket; a bucket's file is gone once the next one is asked for."""
        ...

    def save(self, path: Path) -> None: ...
    def load(self, path: Path) -> None: ...
    def onload(self) -> None: ...
    def offload(self) -> None: ...
    def close(self) -> None: ...


class Engine(Protocol):
    """A sampler. It refuses to generate before its first refit."""

    version: int

    def generate(self, prompts: Sequence[Prompt], seed: Seed, sampling: SamplingConfig) -> list[Rollout]:
        """``n`` rollouts of every prompt, in prompt order then index order.

        Each rollout has its own seed, so results do not depend on how many engines share the work.
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

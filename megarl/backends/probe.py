"""Does an engine compute what its policy computes? One short text, scored by both after a refit.

Checksums hold the weights; this holds all that stands between weights and samples: packed copies, cached prefixes.
"""

import numpy as np

from megarl.backends.fingerprints import RefitMismatch
from megarl.backends.protocols import Policy
from megarl.backends.vllm.engine import VllmEngine
from megarl.types import Prompt, Rollout

TOKENS = 128  # of the text; the first half is the prompt: long enough to fill blocks of the prefix cache


class Probe:
    """``refitted`` while the policy is on its device, ``check`` as soon as the engine can generate."""

    def __init__(self, policy: Policy, engine: VllmEngine, *, temperature: float, limit: float) -> None:
        """``limit``: most nats by which the two may differ, in the mean."""
        ids = engine.familiar_ids(TOKENS)
        self._prompt, self._tokens = ids[: len(ids) // 2], ids[len(ids) // 2 :]
        self._policy, self._engine = policy, engine
        self._temperature, self._limit = temperature, limit
        self._expected: np.ndarray | None = None

    def refitted(self) -> None:
        """Note what the policy's present weights say of the text."""
        text = Rollout(
            prompt=Prompt(agent="probe", uid="probe", role="solve", messages=(), n=1),
            index=0,
            prompt_ids=self._prompt,
            token_ids=self._tokens,
            logprobs=np.full(len(self._tokens), np.nan, np.float32),
            text="",
            stop="length",
            version=self._policy.version,
        )
        self._expected = self._policy.measure([text], frozenset())[text.key].logprobs

    def check(self) -> None:
        """Once after ``refitted``: raise RefitMismatch where a replica says otherwise than the policy."""
        if self._expected is None:
            return
        expected, self._expected = self._expected, None
        for replica, said in enumerate(self._engine.score(self._prompt, self._tokens, self._temperature)):
            gaps = np.abs(said.astype(np.float64) - expected)
            if not gaps.mean() <= self._limit:
                raise RefitMismatch(
                    f"after the refit to version {self._engine.version} engine and policy differ by {gaps.mean():.2g} "
                    f"(mean; at most {gaps.max():.2g}) in the logprobs of {len(gaps)} given tokens at replica "
                    f"{replica}; the limit is {self._limit:g}. The weights are equal by their checksums: what is "
                    "computed from them is not (a stale prefix cache, packed copies of old weights)"
                )

    def remember(self) -> None:
        """Before the next refit: leave the text in the engine's cache, so that a cache which survives shows."""
        self._engine.score(self._prompt, self._tokens[:1], self._temperature)

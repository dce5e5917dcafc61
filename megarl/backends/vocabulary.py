"""Token ids stay with the agent whose tokenizer made them."""

from collections.abc import Sequence

import numpy as np

from megarl.types import Prompt, Rollout


def check_prompt(prompt: Prompt, ids: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError for a prompt without tokens, or with an id that the agent's model has no embedding for.

    Such an id comes from another vocabulary; a model would read past its table or, on several ranks, take it for
    nothing, without a word.
    """
    if not len(ids):
        raise ValueError(f"agent {prompt.agent}: prompt {prompt.uid} has no tokens")
    _check(f"agent {prompt.agent}: prompt {prompt.uid}", ids, vocab_size)


def check_rollouts(rollouts: Sequence[Rollout], vocab_size: int) -> None:
    """The same of prompts and responses that are to be measured."""
    for r in rollouts:
        check_prompt(r.prompt, r.prompt_ids, vocab_size)
        _check(f"agent {r.prompt.agent}: response {r.index} to prompt {r.prompt.uid}", r.token_ids, vocab_size)


def _check(where: str, ids: np.ndarray, vocab_size: int) -> None:
    strange = ids[(ids < 0) | (ids >= vocab_size)]
    if len(strange):
        raise ValueError(
            f"{where} has token id {strange[0]}, of another vocabulary; this agent's ids are 0 to {vocab_size - 1}"
        )

"""Small hand-made records for the unit tests."""

import numpy as np

from megarl.types import Message, Prompt, Rollout, RolloutKey, Sample, TokenStats


def rollout(agent="a", uid="q0", index=0, answer=None, *, n=4, response=(7, 8, 2), prompt=(1, 5), text="", **changes):
    values = {
        "prompt": Prompt(agent=agent, uid=uid, role="solve", messages=(Message("user", uid),), n=n),
        "index": index,
        "prompt_ids": np.array(prompt, np.int32),
        "token_ids": np.array(response, np.int32),
        "logprobs": np.full(len(response), -0.5, np.float32),
        "text": text,
        "stop": "end",
        "version": 0,
        "answer": answer,
        "well_formed": answer is not None,
    }
    return Rollout(**(values | changes))


def rollouts(agent, uid, answers, **changes):
    """One rollout per answer; None: unparseable."""
    return [rollout(agent, uid, i, a, n=len(answers), **changes) for i, a in enumerate(answers)]


def stats(rollout_, offset=0.0, **changes):
    return TokenStats(logprobs=rollout_.logprobs + np.float32(offset), **changes)


def sample(index=0, prompt=2, response=3, advantage=0.0, *, seed=0, reference=False, uid="q0"):
    rng = np.random.default_rng([seed, index])
    length = prompt + response
    mask = np.arange(length) >= prompt

    def logprobs():
        return np.where(mask, -rng.random(length), 0).astype(np.float32)

    return Sample(
        key=RolloutKey("a", uid, "solve", None, index),
        token_ids=rng.integers(1, 50, length).astype(np.int32),
        mask=mask,
        rollout_logprobs=logprobs(),
        policy_logprobs=logprobs(),
        reference_logprobs=logprobs() if reference else None,
        advantage=advantage,
    )

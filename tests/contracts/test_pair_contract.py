"""Policy and engine of one agent speak of the same distribution, and a refit keeps it so."""

from dataclasses import replace

import numpy as np
import pytest
from safetensors.torch import load_file

from megarl.backends.protocols import Engine, Policy
from megarl.packing import from_rollouts
from megarl.settings import BatchConfig, LossConfig
from megarl.types import Rollout
from tests.contracts.backends import PROMPTS, SAMPLING, SEED, refit


def reshard(policy: Policy, engine: Engine, version: int) -> None:
    engine.begin_refit()
    for bucket in policy.weights(100_000):
        engine.load_weights(bucket)
    engine.finish_refit(version)
    engine.wake()


def drift(policy: Policy, rollouts: list[Rollout]) -> float:
    """Mean |logprob by engine - by policy| over all response tokens."""
    stats = policy.measure(rollouts, frozenset())
    return float(np.mean(np.concatenate([np.abs(r.logprobs - stats[r.key].logprobs) for r in rollouts])))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_engine_and_policy_agree_after_a_refit(open_policy, engine, temperature):
    """case-C17 and case-C1"""
    policy = open_policy(temperature=temperature)
    sampling = SAMPLING.model_copy(update={"temperature": temperature})
    reshard(policy, engine, version=0)
    assert drift(policy, engine.generate(PROMPTS, SEED, sampling)) < 1e-4
    # control: another temperature on one side
    assert drift(open_policy(temperature=1.1 * temperature), engine.generate(PROMPTS, SEED, sampling)) > 1e-2


def test_a_perturbed_layer_shows(open_policy, engine):
    """case-C17's control: one matrix of one layer, by 10 percent."""
    policy = open_policy()
    weights = {n: w for b in policy.weights(1 << 30) for n, w in load_file(b.path).items()}
    weights["model.layers.1.mlp.down_proj.weight"] *= 1.1
    refit(engine, weights.items())
    engine.wake()
    assert drift(policy, engine.generate(PROMPTS, SEED, SAMPLING)) > 1e-3


def test_they_agree_again_after_an_update(open_policy, engine):
    policy = open_policy(agent={"optimizer": {"lr": 1e-2}})
    reshard(policy, engine, version=0)
    rollouts = engine.generate(PROMPTS, SEED, SAMPLING)
    stats = policy.measure(rollouts, frozenset())
    samples = []
    for i, (r, s) in enumerate(zip(rollouts, from_rollouts(rollouts), strict=True)):
        logprobs = np.zeros(len(s.token_ids), np.float32)
        logprobs[s.mask] = stats[r.key].logprobs
        samples.append(replace(s, policy_logprobs=logprobs, advantage=1.0 if i % 2 else -1.0))
    policy.update(samples, LossConfig(), BatchConfig(tokens_per_microbatch=512), [1e-2])

    assert drift(policy, engine.generate(PROMPTS, SEED, SAMPLING)) > 1e-2  # the engine still has the old weights
    reshard(policy, engine, version=policy.version)
    fresh = engine.generate(PROMPTS, SEED, SAMPLING)
    assert drift(policy, fresh) < 1e-4
    assert {r.version for r in fresh} == {1}

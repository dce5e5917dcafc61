"""What every policy owes, held against plain transformers and autograd on each sequence alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megarl.packing import from_rollouts, response_tokens
from megarl.settings import BatchConfig, LossConfig
from megarl.types import Prompt, Rollout, Sample
from tests.contracts.backends import named_weights, oracle, oracle_logprobs

BATCH = BatchConfig(tokens_per_microbatch=96)
LOSS = LossConfig()
SGD = {"optimizer": {"name": "sgd", "clip_grad": 0.0}}
EVERYTHING = frozenset({"entropy", "certainty"})


def make_rollouts(count: int = 7) -> list[Rollout]:
    """Rollouts of different lengths (one of a single token) whose ids end in a stop id."""
    random = np.random.default_rng(0)
    return [
        Rollout(
            prompt=Prompt(agent="ann", uid=str(i), role="solve", messages=(), n=1),
            index=0,
            prompt_ids=random.integers(7, 103, 3 + 4 * (i % 3)).astype(np.int32),
            token_ids=np.append(random.integers(7, 103, 5 * i), 2).astype(np.int32),
            logprobs=np.full(5 * i + 1, -4.0, np.float32),
            text="",
            stop="end",
            version=0,
        )
        for i in range(count)
    ]


def make_samples(policy, rollouts: list[Rollout]) -> list[Sample]:
    """Training samples on policy, engine and policy agreeing, with advantages of both signs."""
    stats = policy.measure(rollouts, frozenset())
    samples = []
    for i, (r, s) in enumerate(zip(rollouts, from_rollouts(rollouts), strict=True)):
        logprobs = np.zeros(len(s.token_ids), np.float32)
        logprobs[s.mask] = stats[r.key].logprobs
        samples.append(
            replace(s, policy_logprobs=logprobs, rollout_logprobs=logprobs, advantage=float((-1) ** i * (1 + i / 4)))
        )
    return samples


def weights_of(policy) -> dict[str, torch.Tensor]:
    found = {}
    for bucket in policy.weights(64_000):
        found |= load_file(bucket.path)
    return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
def test_measure_equals_transformers(open_policy, model, temperature):
    """Packed or padded, a sequence is measured as if it were alone; case-C1, case-C11 (the end token counts)."""
    rollouts = make_rollouts()
    stats = open_policy(temperature=temperature).measure(rollouts, EVERYTHING)
    plain = oracle(model)
    assert list(stats) == [r.key for r in rollouts]
    for r in rollouts:
        all_logprobs = oracle_logprobs(plain, r.prompt_ids, r.token_ids, temperature)
        ids = torch.tensor(r.token_ids)[:, None].long()
        p = all_logprobs.exp()
        got = stats[r.key]
        wanted = {
            "logprobs": all_logprobs.gather(1, ids)[:, 0],
            "entropy": -(p * all_logprobs).sum(-1),
            "certainty": (np.log(1 / p.shape[1]) - all_logprobs).mean(-1),
        }
        for name, values in wanted.items():
            array = getattr(got, name)
            assert array.dtype == np.float32 and array.shape == r.token_ids.shape
            np.testing.assert_allclose(array, values, atol=1e-5, rtol=0, err_msg=name)
        assert got.reference is None
        off = oracle_logprobs(plain, r.prompt_ids, r.token_ids, temperature * 1.1).gather(1, ids)[:, 0]
        assert np.abs(got.logprobs - off.numpy()).max() > 1e-3  # control


def test_measure_gives_only_what_is_asked_for(open_policy):
    rollouts = make_rollouts(2)
    policy = open_policy()
    for stats in policy.measure(rollouts, frozenset()).values():
        assert stats.entropy is None and stats.certainty is None and stats.reference is None
    assert policy.measure([], EVERYTHING) == {}
    with pytest.raises(ValueError, match="kl_coef"):
        policy.measure(rollouts, frozenset({"reference"}))


def test_ids_of_another_vocabulary_are_refused(open_policy):
    """case-I1: the model has the ids 0 to 127."""
    policy, (fine, *_, last) = open_policy(), make_rollouts()
    edge = replace(fine, token_ids=np.array([127], np.int32))
    assert list(policy.measure([edge, last], frozenset())) == [edge.key, last.key]
    for part, ids, named in (
        ("token_ids", [5, 128], "agent ann: response 0 to prompt 6 has token id 128"),
        ("prompt_ids", [5, -1], "agent ann: prompt 6 has token id -1"),
        ("prompt_ids", [], "agent ann: prompt 6 has no tokens"),
    ):
        with pytest.raises(ValueError, match=named):
            policy.measure([fine, replace(last, **{part: np.array(ids, np.int32)})], frozenset())


def test_measure_does_not_depend_on_the_packing(open_policy):
    rollouts = make_rollouts()
    small, large = (open_policy(tokens_per_microbatch=n).measure(rollouts, EVERYTHING) for n in (48, 4096))
    for key, stats in small.items():
        np.testing.assert_allclose(stats.logprobs, large[key].logprobs, atol=1e-5, rtol=0)
        np.testing.assert_allclose(stats.entropy, large[key].entropy, atol=1e-5, rtol=0)


def test_one_sgd_update_is_the_gradient_step(open_policy, model):
    """On policy, token-mean: loss = -sum(A logp) / tokens, so weights move by lr * its gradient."""
    policy = open_policy(agent=SGD, temperature=0.7)
    samples = make_samples(policy, make_rollouts())
    before = weights_of(policy)
    metrics = policy.update(samples, LOSS, BATCH, [0.05])

    plain = oracle(model)
    for s in samples:
        ids = torch.tensor(s.token_ids)[None].long()
        logprobs = (plain(input_ids=ids).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        (-s.advantage * logprobs[torch.tensor(s.mask[1:])].sum() / response_tokens(samples)).backward()
    gradient = {n: p.grad for n, p in plain.named_parameters()}

    norm = torch.cat([g.flatten() for g in gradient.values()]).norm().item()
    assert metrics["grad_norm"] == pytest.approx(norm, rel=5e-5)
    after = weights_of(policy)
    assert after.keys() == gradient.keys()
    for name, g in gradient.items():
        torch.testing.assert_close(after[name], before[name] - 0.05 * g, atol=1e-6, rtol=0)
    # control: the step is large against that bound, and its sign matters
    assert max((after[n] - before[n]).abs().max() for n in after) > 1e-4
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5) and metrics["clip_share"] == 0.0


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_microbatch_size_changes_nothing(open_policy, aggregation):
    """case-B13"""
    loss = LossConfig(aggregation=aggregation)
    results = []
    for tokens in (48, 4096):
        policy = open_policy(agent=SGD)
        samples = make_samples(policy, make_rollouts())
        metrics = policy.update(samples, loss, BatchConfig(tokens_per_microbatch=tokens), [0.05])
        results.append((metrics, weights_of(policy)))
    (small, small_weights), (large, large_weights) = results
    assert small["loss"] == pytest.approx(large["loss"], abs=1e-6)
    assert small["grad_norm"] == pytest.approx(large["grad_norm"], rel=5e-5)
    for name, w in small_weights.items():
        torch.testing.assert_close(w, large_weights[name], atol=1e-6, rtol=0)


def test_the_aggregations_differ(open_policy):
    """Control of the test before: it would notice the other mean."""
    losses = []
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        policy = open_policy(agent=SGD)
        samples = make_samples(policy, make_rollouts())
        losses.append(policy.update(samples, LossConfig(aggregation=aggregation), BATCH, [0.05])["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3


def test_two_learning_rates_are_two_updates(open_policy):
    one, two = open_policy(), open_policy()
    samples = make_samples(one, make_rollouts(6))
    one.update(samples, LOSS, BATCH, [1e-3, 5e-4])
    two.update(samples[:3], LOSS, BATCH, [1e-3])
    two.update(samples[3:], LOSS, BATCH, [5e-4])
    assert equal(weights_of(one), weights_of(two))
    assert (one.version, two.version) == (1, 2)


def test_an_empty_update_moves_only_the_version(open_policy):
    policy, idle = open_policy(), open_policy()
    samples = make_samples(policy, make_rollouts())
    before = weights_of(idle)
    masked = [replace(samples[0], mask=np.zeros_like(samples[0].mask))]  # e.g. its reward could not be judged
    for nothing in ([], masked):
        assert all(np.isfinite(x) for x in idle.update(nothing, LOSS, BATCH, [1e-3]).values())
    assert idle.version == 2 and equal(weights_of(idle), before)
    # neither moments nor step count moved: the next real update is that of a policy which never idled
    for p in (policy, idle):
        p.update(samples, LOSS, BATCH, [1e-3])
    assert equal(weights_of(policy), weights_of(idle)) and not equal(weights_of(idle), before)


def test_a_gradient_that_is_not_finite_moves_nothing(open_policy):
    policy = open_policy()
    samples = make_samples(policy, make_rollouts())
    before = weights_of(policy)
    metrics = policy.update([replace(samples[0], advantage=float("nan")), *samples[1:]], LOSS, BATCH, [1e-3])
    assert metrics["skipped_steps"] == 1.0 and equal(weights_of(policy), before)
    assert policy.update(samples, LOSS, BATCH, [1e-3])["skipped_steps"] == 0.0
    assert all(torch.isfinite(w).all() for w in weights_of(policy).values())


def test_metrics_by_name(open_policy):
    policy = open_policy()
    samples = make_samples(policy, make_rollouts())
    metrics = policy.update(samples, LOSS, BATCH, [1e-3, 1e-3])
    assert {"loss", "kl", "clip_share", "grad_norm", "ratio", "tis_weight"} <= metrics.keys()
    assert metrics["tokens"] == response_tokens(samples) and metrics["microbatches"] >= 2


def test_gradient_clipping_and_weight_decay(open_policy, model):
    clipped = open_policy(agent={"optimizer": {"name": "sgd", "clip_grad": 1e-3}})
    before = weights_of(clipped)
    samples = make_samples(clipped, make_rollouts())
    assert clipped.update(samples, LOSS, BATCH, [1.0])["grad_norm"] > 1e-2  # before clipping
    after = weights_of(clipped)
    assert torch.cat([(after[n] - before[n]).flatten() for n in after]).norm().item() == pytest.approx(1e-3, rel=1e-2)

    steps = []
    for decay in (0.0, 0.1):
        policy = open_policy(agent={"optimizer": {"weight_decay": decay}})
        policy.update(make_samples(policy, make_rollouts()), LOSS, BATCH, [1e-2])
        steps.append(weights_of(policy))
    for name, start in before.items():
        gap = steps[0][name] - steps[1][name]
        wanted = torch.zeros_like(start) if start.ndim == 1 else 1e-2 * 0.1 * start
        torch.testing.assert_close(gap, wanted, atol=2e-6, rtol=0)


def test_kl_is_against_the_initial_weights(open_policy):
    policy = open_policy(kl_coef=0.5)
    rollouts = make_rollouts()
    asked = frozenset({"reference"})
    first = policy.measure(rollouts, asked)
    for stats in first.values():
        np.testing.assert_allclose(stats.logprobs, stats.reference, atol=1e-5, rtol=0)
    samples = make_samples(policy, rollouts)
    samples = [
        replace(s, reference_logprobs=np.where(s.mask, s.policy_logprobs, 0).astype(np.float32)) for s in samples
    ]
    assert policy.update(samples, LossConfig(kl_coef=0.5), BATCH, [5e-3])["kl"] == pytest.approx(0.0, abs=1e-6)
    second = policy.measure(rollouts, asked)
    for key, stats in second.items():
        np.testing.assert_allclose(stats.reference, first[key].reference, atol=1e-6, rtol=0)
    drift = [np.abs(s.logprobs - s.reference).max() for s in second.values()]
    assert max(drift) > 1e-2
    moved = policy.update(samples, LossConfig(kl_coef=0.5), BATCH, [5e-3])
    assert moved["kl"] > 1e-4 and moved["kl_loss"] == pytest.approx(0.5 * moved["kl"])


def test_save_and_load_continue_bitwise(open_policy, tmp_path):
    """case-E13: two updates in a row equal one, a save, a load elsewhere, and one."""
    unbroken, broken, resumed = open_policy(), open_policy(), open_policy()
    samples = make_samples(unbroken, make_rollouts())
    for policy in (unbroken, broken):
        policy.update(samples, LOSS, BATCH, [1e-3])
    broken.save(tmp_path / "saved")
    middle = weights_of(broken)
    broken.update(samples[:3], LOSS, BATCH, [1e-2])  # a save is a copy
    resumed.load(tmp_path / "saved")
    assert resumed.version == 1 and equal(weights_of(resumed), middle)
    for policy in (unbroken, resumed):
        policy.update(samples[::-1], LOSS, BATCH, [1e-3])
    assert equal(weights_of(unbroken), weights_of(resumed))
    assert unbroken.version == resumed.version == 2
    # control: the same update without the first one's moments goes elsewhere
    fresh = open_policy()
    fresh.update(samples[::-1], LOSS, BATCH, [1e-3])
    moved = {n: w - middle[n] for n, w in weights_of(resumed).items()}
    start = weights_of(open_policy())
    assert not all(torch.allclose(weights_of(fresh)[n] - start[n], m, atol=1e-6) for n, m in moved.items())
    # files that users may bring hold no pickle
    assert not [p for p in (tmp_path / "saved").rglob("*") if p.suffix in (".pt", ".pkl", ".bin")]


def test_weights_under_their_hugging_face_names(open_policy, model):
    policy = open_policy()
    wanted = dict(named_weights(oracle(model)))
    found, paths = {}, []
    for bucket in policy.weights(50_000):
        assert not paths or not paths[-1].exists()
        tensors = load_file(bucket.path)
        assert bucket.names == tuple(tensors) or set(bucket.names) == set(tensors)
        assert bucket.nbytes == sum(t.nbytes for t in tensors.values())
        assert bucket.nbytes <= 50_000 or len(tensors) == 1
        assert not found.keys() & tensors.keys()
        found |= tensors
        paths.append(bucket.path)
    assert len(paths) > 3 and not paths[-1].exists()
    assert equal(found, wanted)
    # a reader that stops early leaves nothing behind
    early = policy.weights(50_000)
    path = next(early).path
    early.close()
    assert not path.exists()


def test_weights_come_in_the_agents_dtype(open_policy):
    policy = open_policy(agent={"dtype": "bfloat16"})
    assert {t.dtype for t in weights_of(policy).values()} == {torch.bfloat16}


def test_small_updates_survive_bfloat16(open_policy):
    """A step far below bfloat16's resolution adds up, because the optimizer works on float32 masters."""
    policy = open_policy(agent={"dtype": "bfloat16"})
    samples = make_samples(policy, make_rollouts(4))
    before = weights_of(policy)["model.norm.weight"]
    changed = []
    for _ in range(24):
        policy.update(samples, LOSS, BATCH, [4e-4])
        changed.append((weights_of(policy)["model.norm.weight"] != before).float().mean().item())
    assert changed[0] < 0.05 and changed[-1] > 0.3, changed


def test_offload_and_onload_change_nothing(open_policy):
    """A policy is born loaded."""
    policy = open_policy()
    rollouts = make_rollouts()
    before = policy.measure(rollouts, frozenset())
    policy.offload()
    policy.onload()
    for key, stats in policy.measure(rollouts, frozenset()).items():
        assert np.array_equal(stats.logprobs, before[key].logprobs)


@pytest.mark.parametrize("doing", ["offload", "measure", "weights", "save"])
def test_an_offloaded_policy_does_nothing_but_onload(open_policy, tmp_path, doing):
    policy = open_policy()
    policy.offload()
    arguments = {"measure": (make_rollouts(), frozenset()), "weights": (50_000,), "save": (tmp_path / "s",)}
    with pytest.raises(RuntimeError, match="onload it first"):
        list(getattr(policy, doing)(*arguments.get(doing, ())) or ())


def test_a_loaded_policy_is_not_onloaded(open_policy):
    policy = open_policy()
    with pytest.raises(RuntimeError, match="already"):
        policy.onload()

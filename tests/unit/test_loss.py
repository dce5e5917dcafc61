import dataclasses

import numpy as np
import pytest
import torch

from megarl import packing
from megarl.loss import TokenBatch, pg_loss, summarize
from megarl.settings import LossConfig
from tests.unit.records import sample

NO_TIS = LossConfig(tis_cap=None)


def batch(policy, rollout=None, advantage=1.0, *, mask=None, reference=None):
    """One sequence of len(policy) labels."""
    n = len(policy)
    mask = [True] * n if mask is None else mask
    return TokenBatch(
        token_ids=torch.zeros(n, dtype=torch.int64),
        labels=torch.zeros(n, dtype=torch.int64),
        positions=torch.arange(n),
        mask=torch.tensor(mask),
        sequence_ids=torch.zeros(n, dtype=torch.int64),
        rollout_logprobs=torch.tensor(policy if rollout is None else rollout),
        policy_logprobs=torch.tensor(policy),
        reference_logprobs=None if reference is None else torch.tensor(reference),
        advantages=torch.tensor([advantage]),
        sequence_tokens=torch.tensor([sum(mask)]),
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
    )


def loss_of(logprobs, b, cfg, **changes):
    counts = {"num_tokens": int(b.mask.sum()), "num_sequences": 1, "kl_coef": 0.0} | changes
    return pg_loss(logprobs, b, cfg, **counts)


@pytest.mark.parametrize(("cap", "capped"), [(2.0, 2.0), (3.0, 3.0)])
def test_v19_truncated_importance_weights(cap, capped):
    # policy - engine = 0, 1.5, -1.5, and no logprob of the engine
    b = batch([-2.0] * 4, [-2.0, -3.5, -0.5, float("nan")])
    cfg = LossConfig(tis_cap=cap)
    logprobs = torch.full((4,), -2.0, requires_grad=True)
    loss, sums = loss_of(logprobs, b, cfg)
    loss.backward()
    expected = torch.tensor([1.0, capped, 0.22313016, 1.0])
    torch.testing.assert_close(logprobs.grad, -expected / 4)
    torch.testing.assert_close(sums["tis_weight_sum"], expected.sum())
    assert sums["tis_capped_tokens"] == 1 and sums["tis_missing_tokens"] == 1


def test_v19_gspo_from_the_configuration():
    b = batch([0.0, 0.0, 0.0])
    logprobs = torch.tensor([0.1, -0.2, 0.3])
    cfg = LossConfig(ratio_level="sequence", clip_low=3e-4, clip_high=4e-4, tis_cap=None)
    loss, sums = loss_of(logprobs, b, cfg)
    assert loss.item() == pytest.approx(-1.0004)
    assert summarize({k: float(v) for k, v in sums.items()})["ratio"] == pytest.approx(1.068939, abs=1e-6)
    assert summarize({k: float(v) for k, v in sums.items()})["clip_share"] == 1.0
    token, _ = loss_of(logprobs, b, cfg.model_copy(update={"ratio_level": "token"}))
    assert token.item() == pytest.approx(-(1.0004 + 0.818731 + 1.0004) / 3, abs=1e-6)
    with pytest.raises(ValueError, match="ratio_level"):
        LossConfig(ratio_level="word")


def test_no_cap_means_no_weight():
    loss, sums = loss_of(torch.tensor([-2.0]), batch([-2.0], [-3.5]), NO_TIS)
    assert loss == -1 and sums["tis_weight_sum"] == 1 and sums["tis_capped_tokens"] == 0


def test_the_weight_is_not_on_the_kl():
    b = batch([-1.0], [-2.5], advantage=0.0, reference=[-1.5])
    loss, _ = loss_of(torch.tensor([-1.0]), b, LossConfig(tis_cap=2.0, kl_coef=1.0), kl_coef=1.0)
    assert loss.item() == pytest.approx(0.106530660, abs=1e-7)


def test_case_b3_loss_is_finite_with_a_masked_member():
    nan = float("nan")
    b = batch([-1.0, nan], [-1.0, nan], advantage=0.0, mask=[True, False])
    logprobs = torch.tensor([-1.0, nan], requires_grad=True)
    loss, sums = loss_of(logprobs, b, LossConfig(), num_tokens=1)
    loss.backward()
    assert loss == 0 and logprobs.grad.tolist() == [0, 0]
    assert all(torch.isfinite(v) for v in sums.values()) and sums["tis_missing_tokens"] == 0


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
@pytest.mark.parametrize("layout", [(1, 64, 1), (1, 12, 1), (2, 16, 1), (4, 12, 4), (3, 64, 2)])
def test_case_b13_packing_and_data_parallel_size_do_not_change_loss_or_gradient(aggregation, layout):
    samples = [
        sample(i, prompt=2, response=n, advantage=a, reference=True)
        for i, (n, a) in enumerate([(2, 1.0), (8, -0.5), (5, 0.3), (1, 0.0), (8, 2.0), (3, -1.0), (4, 0.1), (7, 1.0)])
    ]
    samples[3] = dataclasses.replace(samples[3], mask=np.zeros(3, bool))
    cfg = LossConfig(aggregation=aggregation, max_tokens=10, kl_coef=0.1)
    whole = step(samples, cfg, dp=1, tokens_per_microbatch=4096, multiple=1)
    dp, budget, multiple = layout
    parts = step(samples, cfg, dp=dp, tokens_per_microbatch=budget, multiple=multiple)
    assert parts[0] == pytest.approx(whole[0], abs=1e-6)
    for i in whole[1]:
        np.testing.assert_allclose(parts[1][i], whole[1][i], atol=1e-6)
    assert parts[2] == pytest.approx(whole[2], abs=1e-6)


def step(samples, cfg, *, dp, tokens_per_microbatch, multiple):
    """Loss, gradient per sample, and averages of one optimizer step whose logprobs are those of the policy + noise."""
    ranks = packing.pack(
        samples,
        dp=dp,
        tokens_per_microbatch=tokens_per_microbatch,
        sequence_multiple=multiple,
        total_multiple=multiple,
    )
    flat = [m for r in ranks for m in r]
    total, grads, sums = 0.0, [], {}
    for m in flat:
        b = TokenBatch.of(m)
        drift = 0.3 * torch.sin(m_values(m))
        logprobs = (b.policy_logprobs + drift).requires_grad_()
        loss, metrics = pg_loss(
            logprobs,
            b,
            cfg,
            num_tokens=packing.response_tokens(samples),
            num_sequences=packing.num_sequences(samples),
            kl_coef=cfg.kl_coef,
        )
        loss.backward()
        total += loss.item()
        grads.append(logprobs.grad.numpy())
        for k, v in metrics.items():
            sums[k] = sums.get(k, 0.0) + v.item()
    return total, packing.unpack(flat, grads), summarize(sums)


def m_values(m):
    """A number for every token that does not depend on where packing put it."""
    return torch.tensor(m.labels * 7 + m.token_ids, dtype=torch.float32)


def test_case_b13_the_check_can_fail():
    """A mean taken inside each microbatch (num_tokens of that microbatch) is another number."""
    samples = [sample(0, response=2, advantage=-1.0), sample(1, response=8, advantage=-3.0)]
    mean = {"num_sequences": 2, "kl_coef": 0.0}
    losses, halves = [], []
    for m in (
        packing.pack(samples, dp=2, tokens_per_microbatch=16)[0]
        + packing.pack(samples, dp=2, tokens_per_microbatch=16)[1]
    ):
        b = TokenBatch.of(m)
        losses.append(pg_loss(b.policy_logprobs, b, NO_TIS, num_tokens=10, **mean)[0].item())
        halves.append(pg_loss(b.policy_logprobs, b, NO_TIS, num_tokens=int(m.mask.sum()), **mean)[0].item())
    assert sum(losses) == pytest.approx(2.6) and sum(halves) / 2 == pytest.approx(2.0)


def test_slices_of_a_sequence_add_up_to_it():
    """Context parallelism: each rank holds some tokens of every sequence."""
    samples = [sample(i, response=n, advantage=0.5 - i) for i, n in enumerate([3, 6])]
    [[m]] = packing.pack(samples, dp=1, tokens_per_microbatch=64)
    b = TokenBatch.of(m)
    logprobs = b.policy_logprobs + 0.1
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        cfg = LossConfig(aggregation=aggregation)
        counts = {"num_tokens": 9, "num_sequences": 2, "kl_coef": 0.0}
        whole, _ = pg_loss(logprobs, b, cfg, **counts)
        cut = [torch.arange(0, b.mask.numel(), 2), torch.arange(1, b.mask.numel(), 2)]
        parts = sum(pg_loss(logprobs[i], b.at(i), cfg, **counts)[0] for i in cut)
        torch.testing.assert_close(parts, whole)


def test_summarize():
    b = batch([-1.0, -1.0], advantage=1.0)
    _, sums = loss_of(torch.tensor([-1.0, 0.0]), b, NO_TIS)
    report = summarize({k: v.item() for k, v in sums.items()})
    assert report["clip_share"] == report["clip_high_share"] == 0.5 and report["clip_low_share"] == 0
    assert report["loss"] == pytest.approx(-(1 + 1.2) / 2)
    assert report["ratio"] == pytest.approx((1 + np.e) / 2)

"""Grouped advantages on a CUDA device; tests/kernels/interpreted holds the same checks without one."""

import pytest
import torch

from megarl_kernels import grouped_advantage

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def cohort(samples, groups, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, groups, (samples,), generator=g) * 7919 - 1_000_000
    rewards = torch.randint(0, 3, (samples,), generator=g) * 0.35
    rewards[torch.rand(samples, generator=g) < 0.05] = float("nan")
    return rewards, ids, torch.rand(samples, generator=g) > 0.1


@pytest.mark.parametrize("mode", ("grpo", "dr_grpo", "rloo", "batch"))
@pytest.mark.parametrize(("samples", "groups"), ((1, 1), (999, 37), (131_072, 8_192), (20_000, 3)))
def test_agrees_with_the_host(samples, groups, mode):
    rewards, ids, valid = cohort(samples, groups)
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-6)):
        r = rewards.to(dtype)
        want = grouped_advantage(r.double(), ids, mode=mode, valid=valid)
        got = grouped_advantage(r.cuda(), ids.cuda(), mode=mode, valid=valid.cuda())
        assert got.is_cuda and got.dtype == dtype
        torch.testing.assert_close(got.double().cpu(), want, atol=10 * tolerance, rtol=tolerance)
        assert torch.equal(got.cpu() == 0, want == 0)


def test_repeats_bit_for_bit_and_waits_for_nothing():
    rewards, ids, valid = (x.cuda() for x in cohort(131_072, 8_192, seed=1))
    first = grouped_advantage(rewards, ids, valid=valid)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = grouped_advantage(rewards, ids, valid=valid)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)


def test_equal_rewards_and_lone_members_get_exactly_zero():
    for value in (0.1, 0.7, 0.9, 2.0):
        for size in (1, 7, 12, 100):
            rewards = torch.full((size,), value, device="cuda")
            assert not grouped_advantage(rewards, torch.zeros(size, dtype=torch.int64, device="cuda")).any()

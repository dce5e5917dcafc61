"""The Triton grouped advantage, in Triton's interpreter, against the host's. Run by test_interpreted.py."""

import pytest
import torch

from megarl_kernels import grouped_advantage
from megarl_kernels.advantage_triton import MEMBERS, STARTS, advantages

MODES = ("grpo", "dr_grpo", "rloo", "batch")


def check(rewards, ids, valid=None, **options):
    options = {"mode": "grpo", "ddof": 1, "eps": 1e-6, **options}
    got = advantages(rewards, ids, valid=valid, **options)
    want = grouped_advantage(rewards.double(), ids, valid=valid, **options)
    tight = rewards.dtype == torch.float64
    torch.testing.assert_close(got, want.to(got.dtype), atol=1e-12 if tight else 1e-6, rtol=1e-10 if tight else 1e-5)
    assert got.dtype == rewards.dtype and torch.equal(got == 0, want == 0)


def cohort(seed, sizes):
    """Interleaved ragged groups with negative and huge ids, NaN members, masked members and groups of equal rewards."""
    g = torch.Generator().manual_seed(seed)
    names = torch.randint(-(2**62), 2**62, (len(sizes),), generator=g)
    ids = torch.repeat_interleave(names, torch.tensor(sizes))
    rewards = torch.randint(0, 3, ids.shape, generator=g) * 0.35
    rewards[ids == names[1]] = 0.7
    rewards[torch.rand(ids.shape, generator=g) < 0.1] = float("nan")
    rewards[torch.rand(ids.shape, generator=g) < 0.05] = float("inf")
    rewards[ids == names[2]] = float("nan")
    mixed = torch.randperm(len(ids), generator=g)
    return rewards[mixed], ids[mixed], torch.rand(ids.shape, generator=g) > 0.2


SIZES = [1, 7, 3, 1, MEMBERS, MEMBERS + 1, 2, 5 * MEMBERS + 3, 8, 1] + [4] * STARTS


@pytest.mark.parametrize("mode", MODES)
def test_agrees_with_the_host(mode):
    rewards, ids, valid = cohort(MODES.index(mode), SIZES)
    check(rewards.double(), ids, mode=mode)
    check(rewards.float(), ids, valid, mode=mode, ddof=0, eps=1e-4)
    check(rewards.double(), ids, valid, mode=mode, eps=0.0)


def test_vectors_and_exact_ties():
    zeros = torch.zeros(7, dtype=torch.int64)
    for mode in MODES:
        for value in (0.1, 0.7, 0.9, 2.0):  # case-B1
            assert (advantages(torch.full((7,), value), zeros, mode, 1, 1e-6, None) == 0).all()
        assert advantages(torch.tensor([2.0]), zeros[:1], mode, 1, 1e-6, None) == 0
    ids = torch.tensor([0, 1, 0, 2, 1, 0, 2, 1, 0])  # case-B5
    got = advantages(torch.tensor([1.0, 0, 0, 1, 1, 1, 0, 0, 0]), ids, "grpo", 1, 1e-6, None)
    want = torch.tensor([0.866, -0.577, -0.866, 0.707, 1.155, 0.866, -0.707, -0.577, -0.866])
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)
    got = advantages(torch.tensor([1.0, 0, float("nan"), 1]), zeros[:4], "grpo", 1, 1e-6, None)  # case-B3
    torch.testing.assert_close(got, torch.tensor([0.577, -1.155, 0.0, 0.577]), atol=1e-3, rtol=0)


def test_far_from_zero_and_repeatable():
    g = torch.Generator().manual_seed(0)
    ids = torch.arange(50) % 5
    far = 1e9 + torch.randint(0, 2, (50,), generator=g).double()  # E[x^2] - m^2 would have no right digit
    check(far, ids)
    assert torch.equal(advantages(far, ids, "grpo", 1, 1e-6, None), advantages(far, ids, "grpo", 1, 1e-6, None))

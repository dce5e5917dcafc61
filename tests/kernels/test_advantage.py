import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl_kernels import advantage_host, grouped_advantage

NAN = float("nan")


def advantages(rewards, ids=None, dtype=torch.float64, **options):
    r = torch.tensor(rewards, dtype=dtype)
    return grouped_advantage(r, torch.zeros(len(r), dtype=torch.int64) if ids is None else torch.tensor(ids), **options)


def close(got, expected, tolerance=6e-10):
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), atol=tolerance, rtol=0)


def test_v1():
    close(advantages([1, 0, 0, 1]), [0.866023904, -0.866023904, -0.866023904, 0.866023904])
    close(advantages([1, 0, 0, 1], eps=1e-4)[:1], [0.865875430])
    close(advantages([1, 0, 0, 1], ddof=0)[:1], [0.999998000])
    close(advantages([1, 0, 0, 1], mode="dr_grpo"), [0.5, -0.5, -0.5, 0.5])


def test_v2_v3():
    close(advantages([1, 0, 0, 0]), [1.499997, -0.499999, -0.499999, -0.499999])
    close(advantages([1, 0, 0, 0], eps=1e-4)[:2], [1.49970006, -0.49990002], 1e-8)
    close(advantages([1, 0, 0, 0], ddof=0)[:2], [1.732046808, -0.577348936])
    close(advantages([2, 1, 1, 0]), [1.224743371, 0, 0, -1.224743371])
    close(advantages([2, 2, 1, 1]).abs(), [0.866023904] * 4)


@pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "rloo", "batch"])
def test_v4_v7_v8_equal_rewards_and_lone_members_get_exactly_zero(mode):
    for rewards in ([1.0] * 4, [0.0] * 4, [2.0] * 4, [0.1] * 7, [0.7] * 7, [0.9] * 12, [2.0]):  # case-B1
        for dtype in (torch.float32, torch.float64):
            for eps in (1e-6, 1e-8, 0.0):
                assert not advantages(rewards, dtype=dtype, mode=mode, eps=eps).any()
    # the same in a batch whose other groups do vary
    got = advantages([0.1] * 7 + [5.0, 0.0, 1.0], [0] * 7 + [1] + [2] * 2, dtype=torch.float32, mode=mode)
    assert not got[:8].any() and got[8] < 0 < got[9]


def test_v7_the_naive_formula_fails_here():
    r = torch.full((7,), 0.1, dtype=torch.float32)
    mean = r.sum() / 7
    std = ((r - mean).square().sum() / 6).sqrt()
    assert ((r - mean) / (std + 1e-6)).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("k", "ones", "positive", "negative"),
    [
        (12, 9, 0.552769576, -1.658308729),
        (32, 20, 0.762395984, -1.270659974),
        (8, 1, 2.474866734, -0.353552390),
        (16, 1, 3.749985000, -0.249999000),
    ],
)
def test_v5(k, ones, positive, negative):
    close(advantages([1] * ones + [0] * (k - ones)), [positive] * ones + [negative] * (k - ones))


def test_v14_rent():
    close(advantages([-0.5, -0.2, -7.0, -0.3]), [0.449685196, 0.539622235, -1.498950652, 0.509643222])


def test_v23_anchored_groups_are_a_choice_of_ids():
    close(advantages([2, 2, 1, 0, 2, 2, 2, 1])[:4], [0.661437, 0.661437, -0.661437, -1.984311], 1e-6)
    close(advantages([2, 1, 2, 2]), [0.499999, -1.499997, 0.499999, 0.499999], 1e-9)
    assert not advantages([2, 1, 2, 2], [0, 1, 2, 3]).any()


def test_case_b3_nan_members():
    close(advantages([1, 0, NAN, 1]), [0.577349269, -1.154698538, 0, 0.577349269], 1e-6)
    close(advantages([1, 0, NAN, 1], ddof=0), [0.707, -1.414, 0, 0.707], 1e-3)
    close(advantages([1, 0, 9, 1], valid=torch.tensor([True, True, False, True]))[2:3], [0])
    assert not advantages([NAN, NAN]).any() and not advantages([NAN, 1.0]).any()
    assert advantages([]).shape == (0,)


@pytest.mark.parametrize("mode", ["grpo", "dr_grpo", "rloo", "batch"])
def test_an_infinite_reward_is_left_out_like_a_nan(mode):
    without = advantages([1, 0, NAN, 1, 3], mode=mode)
    for infinite in (math.inf, -math.inf):
        assert torch.equal(advantages([1, 0, infinite, 1, 3], mode=mode), without)


def test_case_b5_interleaved_groups():
    a, b, c = 0, 1, 2
    got = advantages([1, 0, 0, 1, 1, 1, 0, 0, 0], [a, b, a, c, b, a, c, b, a])
    close(got, [0.866, -0.577, -0.866, 0.707, 1.155, 0.866, -0.707, -0.577, -0.866], 1e-3)


def test_modes():
    close(advantages([1, 0, 0, 0], mode="rloo"), [1, -1 / 3, -1 / 3, -1 / 3], 1e-12)
    std = torch.tensor([3.0, 1.0, 1.0, 0.0]).std().item()
    close(
        advantages([3, 1, 1, 0], [0, 0, 1, 1], mode="batch", eps=0.0), [1 / std, -1 / std, 0.5 / std, -0.5 / std], 1e-7
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "ppo"}, "grpo, dr_grpo"),
        ({"ddof": 2}, "ddof=2"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"eps": NAN}, "eps=nan"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        advantages([1.0, 0.0], **options)


rewards_ = st.lists(st.floats(-5, 5), min_size=2, max_size=12).filter(lambda r: max(r) - min(r) > 1e-2)


@settings(max_examples=80, deadline=None)
@given(r=rewards_, scale=st.floats(0.1, 10), shift=st.floats(-5, 5), seed=st.integers(0, 99))
def test_v6_invariants(r, scale, shift, seed):
    a = advantages(r, eps=0.0)
    assert abs(a.sum()) < 1e-9
    assert a.square().sum() == pytest.approx(len(r) - 1)
    close(advantages([scale * x + shift for x in r], eps=0.0), a.tolist(), 1e-7)
    close(advantages([-x for x in r], eps=0.0), (-a).tolist(), 1e-9)
    order = torch.randperm(len(r), generator=torch.Generator().manual_seed(seed))
    close(advantages([r[i] for i in order]), advantages(r)[order].tolist(), 1e-9)


def test_v6_eps_bounds_the_square_sum():
    assert advantages([1] * 20 + [0] * 12).square().sum().item() == pytest.approx(30.999874, abs=1e-6)
    assert math.isclose(advantages([1.0, 0.0]).sum().item(), 0.0)


def test_slabs_and_interleaving_change_no_bit(monkeypatch):
    g = torch.Generator().manual_seed(0)
    ids = torch.sort(torch.randint(0, 90, (3000,), generator=g)).values * 10**9
    rewards = torch.rand(3000, generator=g, dtype=torch.float64)
    whole = grouped_advantage(rewards, ids)
    rank = torch.cat([torch.arange(n) for n in torch.unique(ids, return_counts=True)[1]])
    mixed = torch.argsort(rank, stable=True)  # first members, second members, ...
    for slab in (1, 17, 1000):
        monkeypatch.setattr(advantage_host, "_SLAB", slab)
        assert torch.equal(grouped_advantage(rewards, ids), whole)
        assert torch.equal(grouped_advantage(rewards[mixed], ids[mixed]), whole[mixed])


def test_a_large_cohort_costs_a_fiftieth_of_a_loop_over_its_groups():
    """131,072 samples in 8,192 ragged groups; in seconds of this thread, so that a busy machine counts for nothing."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.bincount(torch.randint(0, 8192, (131_072 - 8192,), generator=g), minlength=8192) + 1
    ids = torch.repeat_interleave(sizes)
    rewards = torch.randint(0, 2, ids.shape, generator=g).double()

    def loop():
        out, start = torch.zeros_like(rewards), 0
        for size in sizes.tolist():
            r = rewards[start : start + size]
            if size > 1 and r.max() > r.min():
                out[start : start + size] = (r - r.mean()) / (r.std() + 1e-6)
            start += size
        return out

    def scatter():
        _, index = torch.unique(ids, return_inverse=True)
        zeros = torch.zeros(8192, dtype=torch.float64)
        count = zeros.scatter_add(0, index, torch.ones_like(rewards))
        centred = rewards - (zeros.scatter_add(0, index, rewards) / count)[index]
        std = (zeros.scatter_add(0, index, centred.square()) / (count - 1).clamp(min=1)).sqrt()
        top = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
        bottom = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
        return torch.where((top == bottom)[index], 0.0, centred / (std[index] + 1e-6))

    def cost(call, repeats):
        taken = []
        for _ in range(repeats):
            start = time.thread_time()
            out = call()
            taken.append(time.thread_time() - start)
        return min(taken), out

    ours, got = cost(lambda: grouped_advantage(rewards, ids), 10)
    looped, want = cost(loop, 1)
    scattered, _ = cost(scatter, 5)
    close(got, want.tolist(), 1e-12)
    print(f"loop / ours {looped / ours:.0f}, scatter / ours {scattered / ours:.1f}")
    assert looped / ours >= 50 and scattered / ours >= 3  # the second is above 5 on a quiet machine

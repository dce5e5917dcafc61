"""The Triton token loss, in Triton's interpreter, against its definition in float64. Run by test_interpreted.py."""

import itertools

import pytest
import torch

from megarl_kernels import grpo_token_loss
from megarl_kernels.token_loss_terms import METRICS
from megarl_kernels.token_loss_triton import BLOCK, SPAN
from tests.kernels.packs import NAN, PER_TOKEN, by_definition, pack_of, run


def check(pack, **options):
    options = {"num_tokens": 900, "num_sequences": 30, **options}
    loss, metrics, grad = run(pack, "triton", **options)
    _, want_metrics, _ = run(pack, "torch", **options)
    want_loss, want_grad = by_definition({k: v for k, v in pack.items() if k not in options}, **options)
    assert loss.dtype == torch.float32 and tuple(metrics) == METRICS
    scale = want_metrics["ratio_sum"].abs() / 900 + 1  # terms of both signs cancel in the loss
    torch.testing.assert_close(loss.double(), want_loss, atol=2e-6 * scale.item(), rtol=1e-5)
    for name, value in metrics.items():
        exact = name.endswith("tokens")
        torch.testing.assert_close(
            value.double(), want_metrics[name], atol=0 if exact else 2e-5, rtol=0 if exact else 2e-5,
            msg=lambda m, n=name: f"{n}: {m}",
        )  # fmt: skip
    torch.testing.assert_close(grad.double(), want_grad, atol=1e-30, rtol=5e-5)  # each token on its own
    assert (grad[~pack["mask"]] == 0).all() and grad.isfinite().all()


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize(("level", "aggregation"), itertools.product(("token", "sequence"), AGGREGATIONS))
def test_agrees_with_float64(level, aggregation):
    i = AGGREGATIONS.index(aggregation)
    options = {"ratio_level": level, "aggregation": aggregation, "max_tokens": 64 if i == 3 else None}
    check(
        pack_of(1500, 17, seed=i, spread=0.3 if level == "token" else 0.05),
        kl=("k1", "k2", "k3", "k3")[i],
        kl_coef=0.2,
        clip_high=0.28,
        dual_clip=(None, 3.0, None, 1.2)[i],
        **options,
    )


def test_options_left_out_and_counts_on_the_device():
    pack = pack_of(700, 5, seed=7)
    bare = {"reference_logprob": None, "tis_weight": None}
    check(pack, **bare)
    options = {"ratio_level": "sequence", "num_sequences": 5, "num_tokens": 900}
    want = run(pack, "torch", **bare, **options)
    for count in (900, torch.tensor(900), torch.tensor(900.0)):
        loss, _, grad = run(pack, "triton", **bare, **options | {"num_tokens": count})
        torch.testing.assert_close(loss.double(), want[0], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(grad.double(), want[2], atol=1e-30, rtol=5e-5)
    loss, _, grad = run(pack, "triton", num_tokens=0, num_sequences=torch.tensor(0.0), aggregation="seq-mean-token-sum")
    want, _, want_grad = run(pack, "torch", num_tokens=0, num_sequences=1, aggregation="seq-mean-token-sum")
    torch.testing.assert_close(loss.double(), want)
    torch.testing.assert_close(grad.double(), want_grad, atol=1e-30, rtol=5e-5)


@pytest.mark.parametrize("tokens", (1, BLOCK, SPAN + 3))
def test_sizes_around_blocks_and_programs(tokens):
    check(pack_of(tokens, 3, seed=tokens), kl_coef=0.1, dual_clip=3.0)


def test_small_kl_keeps_its_digits():
    """k3 of nearly equal policies: e^d - d - 1 would have no right digit left in float32."""
    logprob = -torch.rand(512, generator=torch.Generator().manual_seed(0))
    reference = logprob + torch.linspace(-1e-3, 1e-3, 512)
    pack = {
        "logprob": logprob, "old_logprob": logprob, "advantage": torch.zeros(1),
        "sequence_ids": torch.zeros(512, dtype=torch.int64), "mask": torch.ones(512, dtype=torch.bool),
        "reference_logprob": reference,
    }  # fmt: skip
    _, metrics, grad = run(pack, "triton", num_tokens=1, num_sequences=1, kl_coef=1.0)
    _, want, want_grad = run(pack, "torch", num_tokens=1, num_sequences=1, kl_coef=1.0)
    torch.testing.assert_close(metrics["kl_sum"].double(), want["kl_sum"], atol=0, rtol=1e-6)
    torch.testing.assert_close(grad.double(), want_grad, atol=0, rtol=1e-6)


def test_v16_v18_v19_through_the_kernel():
    def one(logprob, advantage=1.0, **options):
        x = torch.tensor(logprob)
        n = len(logprob)
        return grpo_token_loss(
            x, torch.zeros(n), torch.tensor([advantage]), torch.zeros(n, dtype=torch.int64),
            torch.ones(n, dtype=torch.bool), num_tokens=1, num_sequences=1, backend="triton", **options,
        )  # fmt: skip

    def log(ratio):
        return [torch.tensor(ratio).log().item()]

    assert one(log(1.5), clip_high=0.28)[0].item() == pytest.approx(-1.28)
    assert one(log(0.5), -1.0)[0].item() == pytest.approx(0.8)
    assert one(log(4.0), -1.0, dual_clip=3.0)[0].item() == pytest.approx(3.0)
    kl = one([-1.0], 0.0, reference_logprob=torch.tensor([-1.5]), kl_coef=1.0)[1]["kl_sum"]
    assert kl.item() == pytest.approx(0.106530660, abs=1e-7)
    far = one([-1.0], 0.0, reference_logprob=torch.tensor([30.0]), kl_coef=1.0)[1]["kl_sum"]
    assert far.item() == 10.0
    loss, metrics = one([0.1, -0.2, 0.3], ratio_level="sequence", clip_high=4e-4)
    assert metrics["ratio_sum"].item() / 3 == pytest.approx(1.068939, abs=1e-6)
    assert loss.item() == pytest.approx(-3 * 1.0004)


def test_trouble_inside_the_mask_is_seen():
    pack = pack_of(300, 4, seed=3)
    options = {"num_tokens": 300, "num_sequences": 4}
    at = int(pack["mask"].nonzero()[7])
    bad = {**pack, "logprob": pack["logprob"].clone()}
    bad["logprob"][at] = NAN
    for backend in ("triton", "torch"):
        loss, _, grad = run(bad, backend, **options)
        assert loss.isnan() and grad[at].isnan() and grad.isnan().sum() == 1
    outside = {**pack, "sequence_ids": pack["sequence_ids"].clone()}
    outside["sequence_ids"][at] = 4
    with pytest.raises(ValueError, match="sequence_ids reach from 0 to 4"):
        run(outside, "triton", **options)  # on a CPU it is an error, on a device NaN: see tests/gpu
    mixed = {**pack, "sequence_ids": pack["sequence_ids"].flip(0)}
    assert run(mixed, "triton", ratio_level="sequence", **options)[0].isnan()
    assert run(mixed, "torch", ratio_level="sequence", **options)[0].isfinite()
    check(mixed)  # the token level takes any order


def test_a_sequence_over_two_ranks_is_one_sequence():
    """What each rank holds is given by turns; the sum over ranks is that of the first pass."""
    pack = pack_of(400, 6, seed=5, spread=0.05)
    pack["sequence_tokens"] = torch.zeros(6).index_add(0, pack["sequence_ids"], pack["mask"].float())
    options = {
        "num_tokens": 300, "num_sequences": 6, "kl_coef": 0.1, "ratio_level": "sequence",
        "aggregation": "seq-mean-token-mean",
    }  # fmt: skip
    halves = [torch.arange(400) % 7 < 3, torch.arange(400) % 7 >= 3]
    parts = [{k: v[half] if k in PER_TOKEN else v for k, v in pack.items()} for half in halves]
    for backend in ("triton", "torch"):
        seen = []
        for part in parts:
            run(part, backend, context_sum=lambda x: seen.append(x.clone()) or x, **options)
        total = seen[0] + seen[1]
        found = [run(part, backend, context_sum=lambda x: total.to(x.dtype), **options) for part in parts]
        loss, metrics, grad = run(pack, "torch", **options)
        torch.testing.assert_close((found[0][0] + found[1][0]).double(), loss, atol=1e-6, rtol=1e-5)
        for name, value in metrics.items():
            got = (found[0][1][name] + found[1][1][name]).double()
            torch.testing.assert_close(got, value, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        for half, (_, _, part) in zip(halves, found, strict=True):
            torch.testing.assert_close(part.double(), grad[half], atol=1e-30, rtol=5e-5)


def test_no_gradient_wanted_and_no_tokens():
    pack = pack_of(64, 2, seed=9)
    del pack["tis_weight"], pack["reference_logprob"]
    loss, _ = grpo_token_loss(**pack, num_tokens=9, num_sequences=2, backend="triton")
    assert not loss.requires_grad and loss.isfinite()
    empty = {k: v[:0] if k != "advantage" else v for k, v in pack.items()}
    logprob = empty.pop("logprob").requires_grad_()
    loss, metrics = grpo_token_loss(logprob, **empty, num_tokens=0, num_sequences=0, backend="triton")
    loss.backward()
    assert loss == 0 and logprob.grad.shape == (0,) and metrics["tokens"] == 0
    asked = []
    grpo_token_loss(
        logprob, **empty, num_tokens=0, num_sequences=0, backend="triton", ratio_level="sequence",
        sequence_tokens=torch.ones(2), context_sum=lambda x: asked.append(x.shape) or x,
    )  # fmt: skip
    assert asked == [(2, 2)]  # the other ranks of the context would wait


def test_repeats_bit_for_bit():
    pack = pack_of(SPAN + 2000, 9, seed=2)
    a, b = (run(pack, "triton", num_tokens=900, num_sequences=9, ratio_level="sequence") for _ in range(2))
    assert torch.equal(a[0], b[0]) and torch.equal(a[2], b[2])
    assert all(torch.equal(a[1][k], b[1][k]) for k in METRICS)

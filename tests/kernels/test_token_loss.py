import itertools

import pytest
import torch

from megarl_kernels import grpo_token_loss
from megarl_kernels.token_loss_torch import in_segments
from tests.kernels.packs import NAN, by_definition, pack_of, run


def loss_of(logprob, old=None, advantage=1.0, *, mask=None, **options):
    """grpo_token_loss of one sequence, summed over its tokens (num_tokens=1)."""
    logprob = torch.as_tensor(logprob, dtype=torch.float64)
    n = logprob.shape[0]
    counts = {"num_tokens": 1, "num_sequences": 1}
    return grpo_token_loss(
        logprob,
        torch.zeros(n, dtype=torch.float64) if old is None else torch.as_tensor(old, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        torch.zeros(n, dtype=torch.int64),
        torch.ones(n, dtype=torch.bool) if mask is None else torch.tensor(mask),
        **(counts | options),
    )


V16 = [
    # advantage, ratio, clip_high, dual_clip, loss
    (1, 1.25, 0.28, 3.0, -1.25),
    (1, 1.25, 0.2, 3.0, -1.2),
    (1, 1.5, 0.28, 3.0, -1.28),
    (1, 1.5, 0.2, 3.0, -1.2),
    (1, 0.5, 0.28, 3.0, -0.5),
    (-1, 1.25, 0.28, 3.0, 1.25),
    (-1, 1.5, 0.28, 3.0, 1.5),
    (-1, 0.5, 0.28, 3.0, 0.8),
    (-1, 4, 0.28, 3.0, 3.0),
    (-1, 4, 0.28, None, 4.0),
    (1, 4, 0.28, 3.0, -1.28),
]


@pytest.mark.parametrize(("advantage", "ratio", "clip_high", "dual_clip", "expected"), V16)
def test_v16_clipping(advantage, ratio, clip_high, dual_clip, expected):
    logprob = torch.tensor([ratio], dtype=torch.float64).log().requires_grad_()
    loss, metrics = loss_of(logprob, advantage=advantage, clip_high=clip_high, dual_clip=dual_clip)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    loss.backward()
    bound = abs(expected + advantage * ratio) > 1e-9  # some clip decided: no gradient
    assert logprob.grad.item() == pytest.approx(0.0 if bound else -advantage * ratio, abs=1e-12)
    clips = metrics["clip_low_tokens"] + metrics["clip_high_tokens"] + metrics["dual_clip_tokens"]
    assert clips == bound


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", 2.5),
        ("seq-mean-token-mean", 2.0),
        ("seq-mean-token-sum", 10.0),
        ("seq-mean-token-sum-norm", 1.0),
    ],
)
def test_v17_aggregation(aggregation, expected):
    ids = torch.tensor([0] * 2 + [1] * 6)
    advantage = torch.tensor([-1.0, -3.0])  # at ratio 1 a token's loss is minus its advantage
    zeros, on = torch.zeros(8), torch.ones(8, dtype=torch.bool)
    options = dict(num_tokens=8, num_sequences=2, aggregation=aggregation, max_tokens=10)
    loss, _ = grpo_token_loss(zeros, zeros, advantage, ids, on, **options)
    assert loss.item() == pytest.approx(expected)
    parts = [
        grpo_token_loss(zeros[s], zeros[s], advantage[i : i + 1], torch.zeros_like(ids[s]), on[s], **options)[0]
        for i, s in enumerate((slice(0, 2), slice(2, 8)))
    ]
    assert sum(parts).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("kind", "logprob", "reference", "expected"),
    [
        ("k3", -1.0, -1.5, 0.106530660),
        ("k3", -1.5, -1.0, 0.148721271),
        ("k3", -1.0, -1.0, 0.0),
        ("k3", -1.0, -31.0, 10.0),
        ("k1", -1.0, -1.5, 0.5),
        ("k1", -1.5, -1.0, -0.5),
        ("k2", -1.0, -1.5, 0.125),
        ("k2", -1.5, -1.0, 0.125),
    ],
)
def test_v18_kl(kind, logprob, reference, expected):
    _, metrics = loss_of([logprob], [logprob], 0.0, reference_logprob=torch.tensor([reference]), kl=kind)
    assert metrics["kl_sum"].item() == pytest.approx(expected, abs=1e-8)
    loss, metrics = loss_of(
        [logprob], [logprob], 0.0, reference_logprob=torch.tensor([reference]), kl=kind, kl_coef=0.5
    )
    assert loss.item() == metrics["kl_loss"].item() == pytest.approx(expected / 2, abs=1e-8)


def test_no_gradient_outside_the_clamps():
    logprob = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    loss, _ = loss_of(logprob, advantage=0.0, old=[-1.0], reference_logprob=torch.tensor([-31.0]), kl_coef=1.0)
    loss.backward()
    assert logprob.grad == 0
    far = torch.tensor([25.0], dtype=torch.float64, requires_grad=True)  # log ratio 25, advantage negative: unclipped
    loss, _ = loss_of(far, advantage=-1.0)
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(20.0, dtype=torch.float64).exp().item()) and far.grad == 0


def test_v19_gspo_ratio_is_of_the_sequence():
    logprob = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64, requires_grad=True)
    loss, metrics = loss_of(logprob, ratio_level="sequence", clip_high=4e-4, num_tokens=3)
    assert metrics["ratio_sum"].item() / 3 == pytest.approx(1.068939, abs=1e-6)
    assert loss.item() == pytest.approx(-1.0004)
    assert metrics["clip_high_tokens"] == 3  # the whole sequence is clipped, and no token has a gradient
    loss.backward()
    assert not logprob.grad.any()
    loss, _ = loss_of(logprob, ratio_level="sequence", num_tokens=3)
    loss.backward()
    torch.testing.assert_close(logprob.grad, torch.full((3,), -1.0689391 / 3, dtype=torch.float64))
    _, metrics = loss_of(logprob, num_tokens=3, clip_high=4e-4)  # the token level clips two of the three
    assert metrics["clip_high_tokens"] == 2 and metrics["log_ratio_sum"].exp().item() == pytest.approx(1.221403)


AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.mark.parametrize(("level", "aggregation"), itertools.product(("token", "sequence"), AGGREGATIONS))
def test_equals_the_definition(level, aggregation):
    """float64 to its last digits, float32 within the bounds of the kernels."""
    i = AGGREGATIONS.index(aggregation)
    pack = pack_of(1500, 17, seed=10 + i, spread=0.3 if level == "token" else 0.05)
    options = {
        "num_tokens": 900, "num_sequences": 30, "max_tokens": 64 if i == 3 else None, "ratio_level": level,
        "aggregation": aggregation, "kl": ("k1", "k2", "k3", "k3")[i], "kl_coef": 0.2, "clip_high": 0.28,
        "dual_clip": (None, 3.0, None, 1.2)[i],
    }  # fmt: skip
    want, want_grad = by_definition(pack, **options)
    loss, _, grad = run(pack, "torch", **options)
    torch.testing.assert_close(loss, want, atol=0, rtol=1e-12)
    torch.testing.assert_close(grad, want_grad, atol=1e-30, rtol=1e-10)
    loss, metrics, grad = run(pack, "torch", dtype=torch.float32, **options)
    assert loss.dtype == grad.dtype == metrics["kl_sum"].dtype == torch.float32
    torch.testing.assert_close(loss.double(), want, atol=2e-6 * metrics["ratio_sum"].item() / 900 + 2e-6, rtol=1e-5)
    torch.testing.assert_close(grad.double(), want_grad, atol=1e-30, rtol=5e-5)
    shuffled = torch.randperm(1500, generator=torch.Generator().manual_seed(0))
    mixed = {k: v if k == "advantage" else v[shuffled] for k, v in pack.items()}
    loss, _, grad = run(mixed, "torch", **options)
    torch.testing.assert_close(loss, want, atol=0, rtol=1e-12)
    torch.testing.assert_close(grad, want_grad[shuffled], atol=1e-30, rtol=1e-10)


def test_sums_without_atomics_are_the_same_sums():
    """What takes the place of index_add on a GPU."""
    ids = torch.randint(0, 9, (300,), generator=torch.Generator().manual_seed(0)) * 2  # odd ones are empty
    values = torch.randn(300, dtype=torch.float64, requires_grad=True)
    sums = in_segments(values, ids, 20)
    torch.testing.assert_close(sums, torch.zeros(20, dtype=torch.float64).index_add(0, ids, values))
    sums.mul(torch.arange(20.0)).sum().backward()
    assert torch.equal(values.grad, ids.double())


def test_metrics_are_one_vector():
    pack = pack_of(300, 4)
    _, metrics, _ = run(pack, "torch", num_tokens=300, num_sequences=4)
    assert len({v.untyped_storage().data_ptr() for v in metrics.values()}) == 1


def test_trained_nan_is_seen_in_the_gradient():
    """A step with it must not be taken; a NaN that left the gradient finite would go unnoticed."""
    pack = pack_of(300, 4, seed=3)
    at = int(pack["mask"].nonzero()[7])
    pack["logprob"][at] = NAN
    loss, _, grad = run(pack, "torch", num_tokens=300, num_sequences=4)
    assert loss.isnan() and grad[at].isnan() and grad.isnan().sum() == 1


def test_a_sequence_cut_over_ranks_is_one_sequence():
    """case-B13 for GSPO: two ranks hold the tokens by turns; the second pass knows what both gave in the first."""
    pack = pack_of(400, 6, seed=5, spread=0.05)
    whole = torch.zeros(6).index_add(0, pack["sequence_ids"], pack["mask"].float())
    options = {
        "num_tokens": 300, "num_sequences": 6, "kl_coef": 0.1, "ratio_level": "sequence", "sequence_tokens": whole,
        "aggregation": "seq-mean-token-mean", "clip_low": 0.03, "clip_high": 0.03,
    }  # fmt: skip
    loss, metrics, grad = run(pack, "torch", **options)
    assert 0 < metrics["clip_low_tokens"] + metrics["clip_high_tokens"] < metrics["tokens"]
    halves = [torch.arange(400) % 7 < 3, torch.arange(400) % 7 >= 3]
    parts = [{k: v if k == "advantage" else v[half] for k, v in pack.items()} for half in halves]
    given = []
    for part in parts:
        run(part, "torch", context_sum=lambda x: given.append(x.clone()) or x, **options)
    found = [run(part, "torch", context_sum=lambda _: given[0] + given[1], **options) for part in parts]
    torch.testing.assert_close(found[0][0] + found[1][0], loss, rtol=1e-12, atol=0)
    for name, value in metrics.items():
        torch.testing.assert_close(found[0][1][name] + found[1][1][name], value, msg=name)
    for half, (_, _, part) in zip(halves, found, strict=True):
        torch.testing.assert_close(part, grad[half], rtol=1e-10, atol=1e-30)
    alone = [run(part, "torch", **options)[0] for part in parts]  # control: without the sum it is another loss
    assert abs(alone[0] + alone[1] - loss) > 1e-4


def test_gradcheck():
    torch.manual_seed(0)
    old = torch.randn(9, dtype=torch.float64)
    logprob = (old + 0.3 * torch.randn(9, dtype=torch.float64)).requires_grad_()
    ids, on = torch.tensor([0] * 4 + [1] * 5), torch.tensor([True] * 8 + [False])
    tis = torch.rand(9)
    for kind in ("k1", "k2", "k3"):
        for level in ("token", "sequence"):

            def f(x, kind=kind, level=level):
                return grpo_token_loss(
                    x, old, torch.tensor([1.3, -0.4]), ids, on, num_tokens=8, num_sequences=2, dual_clip=1.3,
                    reference_logprob=old - 0.2, kl_coef=0.3, kl=kind, ratio_level=level,
                    aggregation="seq-mean-token-mean", tis_weight=tis,
                )[0]  # fmt: skip

            assert torch.autograd.gradcheck(f, (logprob,))


def test_masked_nan_contributes_exactly_nothing():
    nan = float("nan")
    logprob = torch.tensor([-1.0, nan], requires_grad=True)
    bad = torch.tensor([-1.0, nan])
    loss, metrics = grpo_token_loss(
        logprob, bad, torch.tensor([1.0, nan]), torch.tensor([0, 1]), torch.tensor([True, False]), num_tokens=1,
        num_sequences=1, reference_logprob=bad, kl_coef=0.1, tis_weight=bad,
    )  # fmt: skip
    loss.backward()
    assert torch.isfinite(loss) and logprob.grad[1] == 0 and torch.isfinite(logprob.grad[0])
    assert all(torch.isfinite(v) for v in metrics.values()) and metrics["tokens"] == 1


def test_empty_and_all_masked():
    for n in (0, 3):
        logprob = torch.zeros(n, requires_grad=True)
        loss, _ = loss_of(logprob, mask=[False] * n, num_tokens=0, num_sequences=0, aggregation="seq-mean-token-mean")
        loss.backward()
        assert loss == 0 and (logprob.grad is None or not logprob.grad.any())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kl": "k4"}, "kl='k4'.*k1, k2, k3"),
        ({"backend": "cuda"}, "backend='cuda'.*auto, torch, triton"),
        ({"backend": "triton"}, "backend='triton'.*CPU tensor.*TRITON_INTERPRET"),
        ({"dual_clip": 0.5}, "dual_clip=0.5"),
        ({"clip_low": 1.5}, r"clip_low=1.5.*\[0, 1\]"),
        ({"sequence_tokens": torch.ones(2)}, r"sequence_tokens\[2\] must be \[S\] like advantage\[1\]"),
        ({"tis_weight": torch.ones(2)}, r"tis_weight\[2\] must be \[T\] like logprob\[1\]"),
        ({"context_sum": torch.neg}, "context_sum.*sequence_tokens"),
        ({"aggregation": "mean"}, "token-mean"),
        ({"ratio_level": "word"}, "token, sequence"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "max_tokens"),
        ({"kl_coef": 0.1}, "reference_logprob"),
        ({"num_tokens": -3}, "num_tokens=-3"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        loss_of([0.0], **options)

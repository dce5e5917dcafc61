import math
import os

import pytest
import torch

from megarl_kernels import logprob_torch, vocab_parallel_logprob
from tests.kernels import logprob_problems as cases
from tests.kernels.logprob_problems import ALL, Case, check_logits, reference


@pytest.mark.parametrize("case", cases.logits_cases(), ids=lambda c: c.name)
def test_against_float64(case):
    check_logits(case, "torch")


def test_case_c1_temperature():
    logits, target = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([0])
    assert vocab_parallel_logprob(logits, target, temperature=0.5).logprob.item() == pytest.approx(-0.1429, abs=1e-4)
    assert vocab_parallel_logprob(logits, target).logprob.item() == pytest.approx(-0.4076, abs=1e-4)
    each = vocab_parallel_logprob(logits.repeat(2, 1), target.repeat(2), temperature=torch.tensor([0.5, 1.0]))
    torch.testing.assert_close(each.logprob, torch.tensor([-0.1429, -0.4076]), atol=1e-4, rtol=0)


def test_case_c15_padded_columns_take_no_part():
    for pad in (50.0, 0.0, float("inf"), float("nan")):
        logits = torch.tensor([[1.0, 2.0, 0.5, pad]], requires_grad=True)
        got = vocab_parallel_logprob(logits, torch.tensor([1]), vocab_size=3, stats=ALL)
        bare = vocab_parallel_logprob(logits[:, :3], torch.tensor([1]), stats=ALL)
        assert got.logprob.item() == pytest.approx(-0.4644, abs=1e-4)
        assert all(torch.equal(got.stats[s], bare.stats[s]) for s in ALL)
        (got.logprob + got.stats["entropy"] + got.stats["self_certainty"]).backward()
        assert logits.grad[0, 3] == 0 and torch.isfinite(logits.grad).all() and logits.grad.any()


def test_v15_entropy_and_certainty():
    got = vocab_parallel_logprob(torch.tensor([[0.0] * 4, [2.0, 0, 0, 0]]), torch.tensor([0, 0]), stats=ALL)
    torch.testing.assert_close(got.stats["entropy"], torch.tensor([1.386294361, 0.918283765]))
    torch.testing.assert_close(got.stats["self_certainty"], torch.tensor([0.0, 0.454458593]), atol=1e-6, rtol=1e-6)
    shifted = vocab_parallel_logprob(torch.tensor([[102.0, 100, 100, 100]]), torch.tensor([0]), stats=ALL)
    torch.testing.assert_close(shifted.stats["self_certainty"], torch.tensor([0.454458593]))


def test_case_h1_bfloat16_logits_are_read_exactly():
    torch.manual_seed(0)
    logits = (6 * torch.randn(16, 20011)).to(torch.bfloat16)
    target = torch.randint(0, 20011, (16,))
    check_logits(Case("bfloat16", logits, target, {"temperature": 0.9}), "torch")
    naive = logits.div(0.9).log_softmax(1).gather(1, target[:, None])[:, 0].double()
    assert (naive - reference(logits, target, temperature=0.9)["logprob"]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "logits",
    [
        torch.full((2, 7), -3.0),
        torch.tensor([[1e4, -1e4, 0, 5]] * 2),
        torch.tensor([[-1e4, -1e4 - 1, -1e4 + 1, -1e4]] * 2),
        torch.tensor([[-torch.inf, 1.0, 2.0, -torch.inf]] * 2),
    ],
)
def test_case_h11_extreme_logits(logits):
    logits = logits.clone().requires_grad_()
    got = vocab_parallel_logprob(logits, torch.tensor([2, 1]))
    want = reference(logits.detach(), torch.tensor([2, 1]))
    torch.testing.assert_close(got.logprob.double(), want["logprob"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(got.stats["entropy"].double(), want["entropy"], atol=1e-6, rtol=1e-6)
    assert (got.logprob <= 0).all()
    (got.logprob.sum() + got.stats["entropy"].sum()).backward()
    assert torch.isfinite(logits.grad).all()


def test_nearly_certain_tokens_keep_their_gradient():
    # 1 - p = 1e-3 and 1e-6
    for gap in (8.3, 15.2):
        logits = torch.tensor([[gap, 0.0, 0.0, 0.0, 0.0]], requires_grad=True)
        vocab_parallel_logprob(logits, torch.tensor([0])).logprob.backward()
        exact = logits.detach().double().requires_grad_()
        exact.log_softmax(1)[0, 0].backward()
        torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradients_are_exact(softcap):
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([0, 1, -100, 9, 4, 9])
    temperature = torch.rand(6, dtype=torch.float64) + 0.5

    def f(x):
        out = vocab_parallel_logprob(
            x, target, vocab_size=10, temperature=temperature, softcap=softcap, logit_scale=0.7,
            stats=("entropy", "self_certainty"),
        )  # fmt: skip
        return out.logprob, out.stats["entropy"], out.stats["self_certainty"]

    assert torch.autograd.gradcheck(f, (logits,))
    sum(x.sum() for x in f(logits)).backward()
    assert not logits.grad[2].any() and not logits.grad[:, 10].any()


def test_statistics_without_a_gradient_say_so():
    out = vocab_parallel_logprob(torch.randn(2, 3, requires_grad=True), torch.tensor([0, 1]), stats=ALL)
    assert not out.stats["sum_p2"].requires_grad and not out.stats["top1_probability"].requires_grad
    assert out.logprob.requires_grad and out.stats["entropy"].requires_grad


def test_blocks_do_not_show(monkeypatch):
    torch.manual_seed(0)
    target = torch.randint(0, 50, (20,))
    base = torch.randn(20, 50)

    def run():
        logits = base.clone().requires_grad_()
        out = vocab_parallel_logprob(logits, target, stats=ALL)
        (out.logprob.sum() + out.stats["entropy"].sum()).backward()
        return out.logprob.detach(), out.stats["entropy"].detach(), logits.grad

    whole = run()
    monkeypatch.setitem(logprob_torch.BLOCK_BYTES, "cpu", 3 * 50 * 4)
    assert [b.stop - b.start for b in logprob_torch.blocks(20, 50, base)] == [3, 3, 3, 3, 3, 3, 2]
    assert [b.stop - b.start for b in logprob_torch.blocks(7, 50, base)] == [3, 4]
    assert all(torch.equal(a, b) for a, b in zip(whole, run(), strict=True))


def test_rows_do_not_depend_on_their_batch():
    """Sums of one row alone would be split over threads."""
    torch.manual_seed(0)
    logits, target = torch.randn(9, 70001), torch.randint(0, 70001, (9,))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        whole = vocab_parallel_logprob(logits, target, stats=ALL)
        for rows in (slice(0, 1), slice(8, 9), slice(2, 4), slice(1, 9)):
            part = vocab_parallel_logprob(logits[rows], target[rows], stats=ALL)
            assert torch.equal(part.logprob, whole.logprob[rows])
            assert all(torch.equal(part.stats[s], whole.stats[s][rows]) for s in ALL)
    finally:
        torch.set_num_threads(threads)


def test_offsets_beyond_31_bits():
    cases.far_rows("torch")
    cases.far_gradient(logprob_torch)


def test_targets_that_are_not_aligned_or_adjacent():
    torch.manual_seed(0)
    logits, wide = torch.randn(4, 9), torch.randint(0, 9, (9, 2))
    plain = vocab_parallel_logprob(logits, wide[1:5, 0].clone())
    assert torch.equal(vocab_parallel_logprob(logits, wide[1:5, 0]).logprob, plain.logprob)
    assert torch.equal(vocab_parallel_logprob(logits, wide[1:5, 0].int()).logprob, plain.logprob)


def test_unlikely_tokens_keep_their_gradient():
    """No gradient is filtered for being small."""
    logits = torch.tensor([[0.0, -20.0, -40.0]], requires_grad=True)
    vocab_parallel_logprob(logits, torch.tensor([0])).logprob.backward()
    exact = logits.detach().double().requires_grad_()
    exact.log_softmax(1)[0, 0].backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=0)


def test_case_h5_targets():
    logits = torch.randn(3, 5, requires_grad=True)
    out = vocab_parallel_logprob(logits, torch.tensor([1, -100, 4]), stats=ALL)
    assert out.logprob[1] == 0 and all(v[1] == 0 for v in out.stats.values())
    out.logprob.sum().backward()
    assert not logits.grad[1].any() and logits.grad[0].any()
    for wrong in (5, -1):
        with pytest.raises(ValueError, match=rf"target {wrong} is outside the vocabulary \[0, 5\)"):
            vocab_parallel_logprob(logits, torch.tensor([1, -100, wrong]))
    with pytest.raises(ValueError, match="target 4"):
        vocab_parallel_logprob(logits, torch.tensor([1, -100, 4]), vocab_size=4)
    with pytest.raises(ValueError, match=r"target is torch\.float32"):
        vocab_parallel_logprob(logits, torch.tensor([1.0, 2.0, 4.0]))


@pytest.mark.parametrize("broken", [-math.inf, math.inf, math.nan])
def test_a_row_that_is_no_distribution_gives_no_plausible_number(broken):
    logits = torch.randn(3, 5)
    want = vocab_parallel_logprob(logits, torch.tensor([0, 1, 2]), stats=ALL)
    logits[1] = broken
    got = vocab_parallel_logprob(logits, torch.tensor([0, 1, 2]), stats=ALL)
    for name, values in {"logprob": got.logprob, **got.stats}.items():
        assert values[1].isnan(), name
        assert torch.equal(values[::2], {"logprob": want.logprob, **want.stats}[name][::2])
    ignored = vocab_parallel_logprob(logits, torch.tensor([0, -100, 2]), stats=ALL)
    assert ignored.logprob[1] == 0 and all(v[1] == 0 for v in ignored.stats.values())


def test_case_h9_empty():
    logits = torch.zeros(0, 5, requires_grad=True)
    out = vocab_parallel_logprob(logits, torch.zeros(0, dtype=torch.int64), stats=ALL)
    out.logprob.sum().backward()
    assert out.logprob.shape == (0,) and logits.grad.shape == (0, 5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "cuda"}, "backend='cuda'.*auto, torch, triton"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"logit_scale": 0.0}, "logit_scale=0.0"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"temperature": torch.tensor([1.0, -2.0])}, "temperature=-2.0"),
        ({"stats": ("varentropy",)}, "varentropy.*entropy, self_certainty"),
        ({"vocab_size": 9}, "vocab_size=9"),
        ({"vocab_start": 4}, "vocab_start=4.*tp_group"),
        ({"temperature": torch.ones(3)}, "temperature"),
    ],
)
def test_errors(options, words):
    with pytest.raises(ValueError, match=words):
        vocab_parallel_logprob(torch.zeros(2, 4), torch.tensor([0, 1]), **options)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="here the interpreter takes CPU tensors")
def test_compiled_kernels_refuse_cpu_tensors():
    with pytest.raises(ValueError, match=r"backend='triton'.*CPU tensor"):
        vocab_parallel_logprob(torch.zeros(2, 4), torch.tensor([0, 1]), backend="triton")

import importlib.util
import math

import pytest
import torch

from megarl_kernels import linear_logprob, projection, vocab_parallel_logprob
from megarl_kernels.head import chunk_rows
from tests.kernels import logprob_problems as cases
from tests.kernels.logprob_problems import ALL, reference

ROW = 1024 * 4  # bytes of one row of float32 logits in cases.check_head


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": torch.linspace(0.4, 1.6, 21)},
        {"softcap": 20.0, "logit_scale": 0.5},
        {"workspace_bytes": 8 * ROW},
        {"workspace_bytes": ROW},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "workspace_bytes": 5 * ROW},
        {"vocab": 1024, "pad": 0},
    ],
    ids=str,
)
def test_against_float64(options):
    cases.check_head("torch", **options)


def test_case_h3_odd_shapes_and_a_strided_weight():
    torch.manual_seed(0)
    for vocab in (100, 1000):
        for rows in (1, 7, 33):
            hidden, target = torch.randn(rows, 24), torch.randint(0, vocab, (rows,))
            weight = torch.randn(24, vocab).t()
            got = linear_logprob(hidden, weight, target, temperature=0.7)
            want = vocab_parallel_logprob(hidden @ weight.t(), target, temperature=0.7)
            torch.testing.assert_close(got.logprob, want.logprob, atol=1e-5, rtol=1e-6)
            torch.testing.assert_close(got.stats["entropy"], want.stats["entropy"], atol=1e-5, rtol=1e-6)
            assert (got.logprob <= 0).all() and (got.stats["entropy"] <= math.log(vocab) + 1e-5).all()


def test_gradients_are_exact():
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((6, 3), (11, 3), (11,)))
    target, temperature = torch.tensor([0, 1, -100, 9, 4, 9]), torch.rand(6, dtype=torch.float64) + 0.5

    def f(*leaves):
        out = linear_logprob(
            *leaves[:2], target, bias=leaves[2], vocab_size=10, temperature=temperature, softcap=2.0, logit_scale=0.7,
            stats=("entropy", "self_certainty"), workspace_bytes=2 * 8 * 11,
        )  # fmt: skip
        return out.logprob, out.stats["entropy"], out.stats["self_certainty"]

    assert torch.autograd.gradcheck(f, (hidden, weight, bias))


def test_half_precision_inputs_give_float32_logits():
    """Rounding the logits to bfloat16 would cost four orders of magnitude."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(9, 64).bfloat16(), (0.5 * torch.randn(3000, 64)).bfloat16()
    target = torch.randint(0, 3000, (9,))
    want = reference(hidden.double() @ weight.double().t(), target)["logprob"]
    got = linear_logprob(hidden, weight, target).logprob
    assert (
        (got - want).abs().max() < 1e-5 < 1e-3 < (reference(hidden @ weight.t(), target)["logprob"] - want).abs().max()
    )


def test_half_precision_weight_gradients_are_summed_in_float32():
    """1024 chunks of equal small contributions: a bfloat16 sum would stop growing at 256 of them."""
    hidden, weight = torch.ones(1024, 2).bfloat16(), torch.zeros(4, 2).bfloat16().requires_grad_()
    linear_logprob(hidden, weight, torch.zeros(1024, dtype=torch.int64), workspace_bytes=4 * 4).logprob.sum().backward()
    torch.testing.assert_close(weight.grad[:, 0].float(), torch.tensor([768.0, -256, -256, -256]), rtol=0, atol=0)


def both_passes(hidden, weight, target, upstream, **options):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = linear_logprob(hidden, weight, target, stats=ALL, **options)
    (out.logprob * upstream).sum().backward()
    return [out.logprob.detach(), *(out.stats[s].detach() for s in ALL), hidden.grad], weight.grad


def test_rows_do_not_depend_on_their_batch_and_runs_repeat():
    """Also on two threads, and where a chunk is a few rows."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(70, 96), torch.randn(2003, 96), torch.randint(0, 2003, (70,))
    upstream = torch.randn(70)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for options in ({}, {"workspace_bytes": 8 * 4 * 2003}):
            whole, d_weight = both_passes(hidden, weight, target, upstream, **options)
            again, d_again = both_passes(hidden, weight, target, upstream, **options)
            assert torch.equal(d_weight, d_again) and all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
            for rows in (slice(0, 1), slice(69, 70), slice(3, 20), torch.randperm(70)):
                part, _ = both_passes(hidden[rows], weight, target[rows], upstream[rows], **options)
                assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True))
    finally:
        torch.set_num_threads(threads)


def test_chunks_are_bounded_by_bytes_and_do_not_depend_on_the_batch():
    weight = torch.empty(1000, 2)
    assert chunk_rows(weight, 512 << 20) == 256
    assert chunk_rows(weight, 100 * 4000) == 96 and chunk_rows(weight, 5 * 4000) == 5
    with pytest.raises(ValueError, match="workspace_bytes=3999 holds no row of 1000 logits: set it to at least 4000"):
        chunk_rows(weight, 3999)
    meta = torch.empty(
        1000, 2, dtype=torch.bfloat16, device="meta"
    )  # an accelerator's logits have a gradient beside them
    assert chunk_rows(meta, 80 * 6000) == 80


def test_the_logits_never_exist_as_a_whole(monkeypatch):
    """No tensor of more elements than a chunk, the weight or hidden is made, in either pass."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.untyped_storage().nbytes())
            return out

    hidden, weight = torch.randn(400, 8, requires_grad=True), torch.randn(500, 8, requires_grad=True)
    workspace = 20 * 500 * 4
    with Watch():
        out = linear_logprob(hidden, weight, torch.zeros(400, dtype=torch.int64), stats=ALL, workspace_bytes=workspace)
        (out.logprob + out.stats["entropy"]).sum().backward()
    assert largest <= workspace < 400 * 500 * 4


def test_only_what_needs_a_gradient_gets_one():
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(5, 4), torch.randn(7, 4), torch.tensor([0, 1, 2, 3, 6])
    both = [x.clone().requires_grad_() for x in (hidden, weight)]
    linear_logprob(*both, target).logprob.sum().backward()
    for i in (0, 1):
        one = [hidden.clone(), weight.clone()]
        one[i].requires_grad_()
        linear_logprob(*one, target).logprob.sum().backward()
        assert torch.equal(one[i].grad, both[i].grad) and one[1 - i].grad is None
    with torch.no_grad():
        assert not linear_logprob(*both, target).logprob.requires_grad
    entropy_only = hidden.clone().requires_grad_()
    linear_logprob(entropy_only, weight, target).stats["entropy"].sum().backward()
    exact = hidden.double().requires_grad_()
    reference(exact @ weight.double().t(), target)["entropy"].sum().backward()
    assert cases.relative(entropy_only.grad, exact.grad) < 5e-5


def test_a_bias_of_minus_infinity_excludes_a_token():
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(3, 4), torch.randn(6, 4, requires_grad=True), torch.zeros(6)
    bias[[1, 5]] = -torch.inf
    out = linear_logprob(hidden, weight, torch.tensor([0, 2, 3]), bias=bias)
    few = linear_logprob(hidden, weight[[0, 2, 3, 4]], torch.tensor([0, 1, 2]))
    torch.testing.assert_close(out.logprob, few.logprob)
    torch.testing.assert_close(out.stats["entropy"], few.stats["entropy"])
    (out.logprob + out.stats["entropy"]).sum().backward()
    assert torch.isfinite(weight.grad).all() and not weight.grad[[1, 5]].any()


def test_case_h9_nothing_to_do():
    hidden, weight = torch.zeros(0, 4, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    out = linear_logprob(hidden, weight, torch.zeros(0, dtype=torch.int64))
    out.logprob.sum().backward()
    assert out.logprob.shape == (0,) and hidden.grad.shape == (0, 4) and not weight.grad.any()
    hidden, weight = torch.full((2, 4), torch.nan, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    out = linear_logprob(hidden, weight, torch.tensor([-100, -100]), stats=ALL)
    (out.logprob + out.stats["entropy"]).sum().backward()
    assert not out.logprob.any() and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": torch.tensor([0, 6])}, "target 6 is outside the vocabulary"),
        ({"target": torch.tensor([0])}, r"target\[1\] must be \[2\]"),
        ({"weight": torch.zeros(6, 3)}, r"hidden\[2, 4\] and weight\[6, 3\]"),
        ({"weight": torch.zeros(6, 4).double()}, "hidden is torch.float32 and weight torch.float64"),
        ({"bias": torch.zeros(5)}, r"bias\[5\]"),
        ({"vocab_size": 7}, "vocab_size=7"),
        ({"stats": ("varentropy",)}, "varentropy"),
        ({"backend": "cuda"}, "backend='cuda'.*auto, torch, triton, liger"),
        ({"workspace_bytes": 0}, "workspace_bytes=0"),
    ],
)
def test_errors(changes, words):
    arguments = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(6, 4), "target": torch.tensor([0, 1])} | changes
    with pytest.raises(ValueError, match=words):
        linear_logprob(**arguments)


def test_widened_slices_do_not_show(monkeypatch):
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(3, 8, generator=random).bfloat16(), torch.randn(50, 8, generator=random).bfloat16()
    whole, sliced = torch.empty(3, 50), torch.empty(3, 50)
    projection.fill_logits(hidden, weight, None, whole)
    monkeypatch.setattr(projection, "WIDENED_BYTES", 4 * 8 * 7)
    projection.fill_logits(hidden, weight, None, sliced)
    torch.testing.assert_close(whole, sliced, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(projection.hidden_gradient(whole, weight), whole @ weight.float(), atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_liger_where_it_is_not_installed():
    with pytest.raises(ValueError, match="liger-kernel is not installed"):
        linear_logprob(torch.zeros(2, 4), torch.zeros(6, 4), torch.tensor([0, 1]), backend="liger")


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="liger-kernel is not installed")
def test_liger():
    """By its CPU fallback; its CUDA kernels are held against float64 by the bench."""
    torch.manual_seed(0)
    hidden, weight, target = torch.randn(9, 24), torch.randn(100, 24), torch.randint(0, 100, (9,))
    target[3] = -100
    ours = linear_logprob(hidden, weight, target, temperature=0.7)
    theirs = linear_logprob(hidden, weight, target, temperature=0.7, backend="liger")
    torch.testing.assert_close(theirs.logprob, ours.logprob, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(theirs.stats["entropy"], ours.stats["entropy"], atol=1e-5, rtol=1e-5)
    for options in ({"softcap": 5.0}, {"vocab_size": 99}, {"stats": ("sum_p2",)}, {"bias": torch.zeros(100)}):
        with pytest.raises(ValueError, match="backend='liger' does not know"):
            linear_logprob(hidden, weight, target.clamp(max=98), backend="liger", **options)

"""The Triton kernels of the logprob functions on a CUDA device; tests/kernels holds the same checks without one."""

import pytest
import torch

from megarl_kernels import linear_logprob, vocab_parallel_logprob
from megarl_kernels.dispatch import pick
from tests.kernels import logprob_problems as cases
from tests.kernels.logprob_problems import ALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def free_gib() -> float:
    return torch.cuda.mem_get_info()[0] / 2**30 if torch.cuda.is_available() else 0.0


def test_auto_picks_triton():
    assert pick("linear_logprob", torch.empty(1, device="cuda"))[0] == "triton"
    assert pick("linear_logprob", torch.empty(1, device="cuda", dtype=torch.float64))[0] == "torch"


@pytest.mark.parametrize("backend", ("triton", "torch"))
@pytest.mark.parametrize("case", cases.logits_cases(9001), ids=lambda c: c.name)
def test_logits_against_float64(case, backend):
    cases.check_logits(case, backend, "cuda")


@pytest.mark.parametrize("backend", ("triton", "torch"))
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7, "softcap": 20.0}, {"dtype": torch.bfloat16}, {"rows": 1500, "workspace_bytes": 1 << 20}],
    ids=str,
)
def test_head_against_float64(options, backend):
    cases.check_head(backend, "cuda", **{"hidden_size": 64, **options})


def test_offsets_beyond_31_bits():
    from megarl_kernels import logprob_triton

    cases.far_rows("triton", "cuda")
    cases.far_gradient(logprob_triton, "cuda")


@pytest.mark.skipif(free_gib() < 40, reason="needs 40 GiB of GPU memory")
def test_more_than_2_to_the_31_elements():
    """20,000 rows of a vocabulary of 152,064: 3.04e9 logits; the last rows against float64."""
    torch.manual_seed(0)
    logits = torch.empty(20000, 152064, device="cuda", dtype=torch.bfloat16).normal_().mul_(4).requires_grad_()
    target = torch.randint(0, 151936, (20000,), device="cuda")
    out = vocab_parallel_logprob(logits, target, vocab_size=151936, stats=ALL)
    out.logprob.sum().backward()
    last = logits.detach()[-3:].double().requires_grad_()
    want = cases.reference(last, target[-3:], vocab_size=151936)
    want["logprob"].sum().backward()
    torch.testing.assert_close(out.logprob[-3:].double(), want["logprob"].detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.stats["entropy"][-3:].double(), want["entropy"].detach(), atol=1e-5, rtol=1e-5)
    assert cases.relative(logits.grad[-3:], last.grad) < 5e-3 and not logits.grad[:, 151936:].any()


def both_passes(hidden, weight, target, upstream):
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    out = linear_logprob(hidden, weight, target, stats=ALL)
    (out.logprob * upstream).sum().backward()
    return [out.logprob.detach(), *(out.stats[s].detach() for s in ALL), hidden.grad], weight.grad


def test_runs_repeat_and_rows_do_not_depend_on_their_batch():
    torch.manual_seed(0)
    hidden = torch.randn(2500, 512, device="cuda").bfloat16()
    weight = (0.1 * torch.randn(32016, 512, device="cuda")).bfloat16()
    target, upstream = torch.randint(0, 32016, (2500,), device="cuda"), torch.randn(2500, device="cuda")
    whole, d_weight = both_passes(hidden, weight, target, upstream)
    again, d_again = both_passes(hidden, weight, target, upstream)
    assert torch.equal(d_weight, d_again) and all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    for rows in (slice(0, 1), slice(1000, 1700), torch.randperm(2500, device="cuda")):
        part, _ = both_passes(hidden[rows], weight, target[rows], upstream[rows])
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True))
    logits = hidden[:700] @ weight.t()
    every = vocab_parallel_logprob(logits, target[:700], stats=ALL)
    one = vocab_parallel_logprob(logits[33:34], target[33:34], stats=ALL)
    assert torch.equal(one.logprob, every.logprob[33:34])


def test_half_precision_inputs_give_float32_logits():
    torch.manual_seed(0)
    hidden = torch.randn(300, 1024, device="cuda").bfloat16()
    weight = (0.3 * torch.randn(20000, 1024, device="cuda")).bfloat16()
    target = torch.randint(0, 20000, (300,), device="cuda")
    want = cases.reference(hidden.double() @ weight.double().t(), target)["logprob"]
    error = (linear_logprob(hidden, weight, target).logprob - want).abs().max()
    rounded = (vocab_parallel_logprob(hidden @ weight.t(), target).logprob - want).abs().max()
    assert error <= 2e-5 and rounded > 100 * error


def test_nothing_waits_for_the_device():
    """Labels, counts and temperatures stay on the device."""
    hidden = torch.randn(64, 128, device="cuda", requires_grad=True)
    weight = torch.randn(3000, 128, device="cuda", requires_grad=True)
    target = torch.randint(0, 3000, (64,), device="cuda")
    linear_logprob(hidden, weight, target).logprob.sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = linear_logprob(hidden, weight, target, temperature=0.7, stats=ALL)
        (out.logprob + out.stats["entropy"]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_peak_memory_is_the_workspace_not_the_logits():
    n, h, v, workspace = 8192, 256, 65536, 64 << 20
    hidden = torch.randn(n, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(v, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, v, (n,), device="cuda")
    linear_logprob(hidden[:8], weight, target[:8]).logprob.sum().backward()
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_logprob(hidden, weight, target, workspace_bytes=workspace).logprob.sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    gradients = weight.numel() * 6 + hidden.numel() * 2  # float32 sums, then bfloat16
    assert peak < gradients + 1.5 * workspace + (64 << 20) < n * v * 2

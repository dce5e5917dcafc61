"""Inputs for the logprob functions and float64 to hold them against; for torch, for Triton interpreted and on a GPU."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from megarl_kernels import linear_logprob, vocab_parallel_logprob

ALL = ("entropy", "self_certainty", "top1_probability", "sum_p2")
SMOOTH = ("logprob", "entropy", "self_certainty")  # what has a gradient


class Case(NamedTuple):
    """Logits[N, Vl] of one rank, and how to read them."""

    name: str
    logits: torch.Tensor
    target: torch.Tensor
    options: Mapping[str, Any] = MappingProxyType({})


def reference(logits, target, *, temperature=1.0, vocab_size=None, softcap=0.0, logit_scale=1.0):
    """All five quantities in float64 by the plain definition; differentiable."""
    z = logits.double()[:, :vocab_size] * logit_scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    t = torch.as_tensor(temperature, dtype=torch.float64, device=z.device)
    z = z / (t[:, None] if t.dim() else t)
    logp = z.log_softmax(1)
    p = logp.exp()
    plogp = torch.where(p == 0, torch.zeros_like(p), p * logp.clamp(min=-1e300))
    out = {
        "logprob": logp.gather(1, target.clamp(min=0)[:, None])[:, 0],
        "entropy": -plogp.sum(1),
        "self_certainty": -math.log(z.shape[1]) - logp.mean(1),
        "top1_probability": p.max(1).values,
        "sum_p2": p.square().sum(1),
    }
    return {k: torch.where(target == -100, torch.zeros_like(v), v) for k, v in out.items()}


def allowed(want):
    """max(1e-5, 4 float32 ulp of the result)."""
    finite = torch.where(torch.isfinite(want), want, torch.zeros_like(want)).float()
    ulp = torch.nextafter(finite.abs(), torch.full_like(finite, math.inf)) - finite.abs()
    return torch.clamp(4 * ulp.double(), min=1e-5)


def assert_values(got, want, name):
    for key, value in {"logprob": got.logprob, **got.stats}.items():
        expected = want[key].detach()
        same = (value.double() == expected) | ((value.double() - expected).abs() <= allowed(expected))
        assert bool(same.all()), f"{name}: {key} is {value[~same][:3]}, not {expected[~same][:3]}"
    assert bool((got.logprob <= 0).all()), name
    if "entropy" in got.stats:
        assert bool((got.stats["entropy"] >= -1e-6).all()), name


def relative(got, want):
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-300))


def weighted(values, weights):
    """A scalar whose upstream gradients differ from row to row; rows whose statistic is infinite are left out."""
    total = 0.0
    for name, weight in weights.items():
        value = values[name]
        total = total + torch.where(torch.isfinite(value), value, torch.zeros_like(value)).mul(weight.to(value)).sum()
    return total


def upstream(rows, device, seed=1):
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(rows, generator=random, dtype=torch.float64).to(device) for name in SMOOTH}


def check_logits(case, backend, device="cpu", bound=5e-5):
    """Values and gradients of ``vocab_parallel_logprob`` against float64."""
    logits = case.logits.to(device).requires_grad_()
    before = logits.detach().clone()
    target = case.target.to(device)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in case.options.items()}
    got = vocab_parallel_logprob(logits, target, stats=ALL, backend=backend, **options)
    exact = logits.detach().double().requires_grad_()
    want = reference(exact, target, **options)
    assert_values(got, want, case.name)
    weights = upstream(len(target), device)
    weighted({"logprob": got.logprob, **got.stats}, weights).backward()
    weighted(want, weights).backward()
    expected = torch.where(torch.isfinite(exact.grad) & (before > -math.inf), exact.grad, torch.zeros_like(exact.grad))
    expected[target == -100] = 0
    assert logits.grad.dtype == logits.dtype and bool(torch.isfinite(logits.grad).all()), case.name
    size = {torch.bfloat16: 5e-3, torch.float16: 5e-4}.get(logits.dtype, bound)  # the rounding of what is stored
    assert relative(logits.grad, expected) <= size, (case.name, relative(logits.grad, expected))
    valid = case.options.get("vocab_size", logits.shape[1])
    assert not logits.grad[:, valid:].any() and not logits.grad[target == -100].any(), case.name
    assert torch.equal(before.nan_to_num(7.0), logits.detach().nan_to_num(7.0)), f"{case.name}: input was written to"


def logits_cases(vocab=1537):
    """Random and adversarial logits. 1537 is divisible by no tile."""
    random = torch.Generator().manual_seed(0)

    def normal(rows, columns, scale=4.0):
        return scale * torch.randn(rows, columns, generator=random)

    def targets(rows, columns=vocab):
        return torch.randint(0, columns, (rows,), generator=random)

    some = targets(7)
    some[2] = -100
    padded = normal(6, vocab + 15)
    padded[:, vocab:] = torch.tensor([50.0, math.inf, math.nan] * 5)
    holes = normal(5, vocab)
    holes[:, 3::2] = -math.inf
    holes[4, 1024:] = -math.inf  # whole blocks of a tile
    certain = normal(6, vocab, 1.0)
    sure = targets(6)
    # 1 - p from 1e-2 down to 1e-6
    certain[torch.arange(6), sure] = certain.logsumexp(1) + torch.tensor([4.6, 6.9, 9.2, 11.5, 13.0, 13.8])
    tied = torch.zeros(3, vocab)
    tied[1, :700] = 5.0
    tied[2, 1200:] = 3.0
    extreme = torch.full((4, vocab), -1e4)
    extreme[0, 5], extreme[1, 7], extreme[2, 1500] = 1e4, 0.0, -9.99e3
    near = normal(4, vocab, 0.01) + 1e4  # differences of a few ulp decide
    return [
        Case("plain", normal(7, vocab), some),
        Case("temperature", normal(7, vocab), some, {"temperature": 0.7}),
        Case("temperatures", normal(7, vocab), some, {"temperature": torch.linspace(0.3, 1.7, 7)}),
        Case("soft-cap", normal(5, vocab, 30.0), targets(5), {"softcap": 30.0, "temperature": 0.9}),
        Case("scale", normal(5, vocab), targets(5), {"logit_scale": 0.125}),
        Case("scale and cap", normal(5, vocab), targets(5), {"logit_scale": 2.0, "softcap": 5.0}),
        Case("all negative", normal(4, vocab) - 300.0, targets(4)),
        Case("padded", padded, targets(6), {"vocab_size": vocab}),
        Case("-inf", holes, targets(5, 512) // 2 * 2, {"temperature": 1.3}),
        Case("nearly certain", certain, sure),
        Case("tied maxima", tied, torch.tensor([0, 3, 1400])),
        Case("extreme", extreme, torch.tensor([5, 9, 1500, 3])),
        Case("large offset", near, targets(4), {"temperature": 0.7}),
        Case("wide", normal(4, vocab, 60.0), targets(4)),
        Case("bfloat16", normal(5, vocab, 6.0).bfloat16(), targets(5), {"temperature": 0.9}),
        Case("float16", normal(3, vocab, 6.0).half(), targets(3)),
        Case("few columns", normal(3, 3), torch.tensor([0, 2, -100])),
        Case("nothing kept", normal(3, vocab), torch.full((3,), -100)),
        Case("strided", normal(vocab, 5).t(), targets(5)),
        Case("no rows", normal(0, vocab), targets(0)),
    ]


def check_head(backend, device="cpu", *, rows=21, hidden_size=24, vocab=1000, pad=24, dtype=torch.float32, **options):
    """Values and gradients of ``linear_logprob`` against float64 of the same inputs."""
    random = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, hidden_size, generator=random).to(device, dtype)
    weight = (torch.randn(vocab + pad, hidden_size, generator=random)).to(device, dtype)
    bias = torch.randn(vocab + pad, generator=random).to(device, dtype)
    target = torch.randint(0, vocab, (rows,), generator=random).to(device)
    target[1::5] = -100
    hidden[1] = math.nan  # an ignored row
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]
    got = linear_logprob(
        hidden, weight, target, bias=bias, vocab_size=vocab, stats=ALL, backend=backend, **options
    )  # fmt: skip
    exact = [x.detach().double().nan_to_num(0.0).requires_grad_() for x in leaves]
    plain = {k: v for k, v in options.items() if k != "workspace_bytes"}
    want = reference(exact[0] @ exact[1].t() + exact[2], target, vocab_size=vocab, **plain)
    assert_values(got, want, "head")
    weights = upstream(rows, device)
    poisoned = {name: torch.where(target == -100, math.nan, w) for name, w in weights.items()}
    outputs = {"logprob": got.logprob, **got.stats}
    torch.autograd.backward([outputs[n] for n in SMOOTH], [poisoned[n].to(got.logprob.dtype) for n in SMOOTH])
    weighted(want, weights).backward()
    bound = 5e-5 if dtype == torch.float32 else 6e-3
    for name, x, y in zip(("hidden", "weight", "bias"), leaves, exact, strict=True):
        assert x.grad.dtype == dtype and relative(x.grad, y.grad) <= bound, (name, relative(x.grad, y.grad))
    assert not weight.grad[vocab:].any() and not bias.grad[vocab:].any() and not hidden.grad[target == -100].any()
    return [got.logprob.detach(), *(got.stats[s].detach() for s in ALL), *(x.grad for x in leaves)]


def far_rows(backend, device="cpu"):
    """Rows whose offset passes 2^31 elements; few of the pages between are ever touched."""
    stride, vocab = (1 << 30) + 16, 400
    random = torch.Generator().manual_seed(0)
    near = torch.randn(3, vocab, generator=random).to(device, torch.bfloat16)
    far = torch.empty_strided((3, vocab), (stride, 1), dtype=torch.bfloat16, device=device)
    far.copy_(near)
    target = torch.tensor([0, 7, 399], device=device)
    found = []
    for logits in (near, far):
        logits = logits.detach().requires_grad_()
        out = vocab_parallel_logprob(logits, target, stats=ALL, backend=backend)
        (out.logprob.sum() + out.stats["entropy"].sum()).backward()
        found.append([out.logprob.detach(), *(out.stats[s].detach() for s in ALL), logits.grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert stride * 2 > 1 << 31


def far_gradient(kernels, device="cpu"):
    """``fill_gradient`` into rows whose offset passes 2^31 elements."""
    from megarl_kernels import moments

    stride, vocab = (1 << 30) + 16, 400
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(0)).to(device)
    target = torch.tensor([0, 7, 399], device=device)
    options = moments.Options.of(
        vocab, vocab_size=None, vocab_start=0, tp_group=None, softcap=0.0, logit_scale=1.0, ignore_index=-100, stats=()
    )
    factor = torch.ones(3, device=device)
    local = moments.empty_moments(3, options, torch.float32, logits.device)
    kernels.fill_moments(logits, target, factor, options, local)
    _, saved = moments.finish(local, target, factor, options)
    rows = moments.rows_of([torch.ones(3, device=device)], target, factor, saved, options)
    near = torch.empty(3, vocab, device=device, dtype=torch.bfloat16)
    far = torch.empty_strided((3, vocab), (stride, 1), dtype=torch.bfloat16, device=device)
    kernels.fill_gradient(logits, rows, options, near)
    kernels.fill_gradient(logits, rows, options, far)
    assert torch.equal(near, far) and bool(near.any())

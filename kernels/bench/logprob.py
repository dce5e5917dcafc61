"""The head: logprobs and entropies from hidden states, forward and backward, and the two kernels that read logits.

Every provider is first held against float64 on fresh data; one that fails is reported as failed. N rows, H hidden
size, V columns of a rank. Floors: forward 2 N H V operations, both passes 8 N H V with recomputation.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import measure
import torch
from providers import Provider, providers

from megarl_kernels import moments

Row = dict[str, Any]
CPU_SHAPE = (2048, 896, 151936)
DRY_SHAPE = (96, 32, 2003)
# (H, V) of heads, most telling first; V / 8 stands in for a rank of tensor parallel 8
GPU_HEADS = ((4096, 131072), (3584, 152064), (8192, 128256))
GPU_ROWS = (16384, 8192, 32768)
TOLERANCE = {"logprob": 1e-5, "gradient": {torch.float32: 5e-5, torch.bfloat16: 1e-2}}
NAIVE_LIMIT_BYTES = 100 << 30
BUDGET_S = 300.0  # of all providers on a GPU; shapes stand in the order of what they tell


def run(device: torch.device, dry: bool) -> Iterator[Row]:
    """Rows of the table, as they are measured."""
    end = time.monotonic() + BUDGET_S
    found, absent = providers(device)
    yield from ({"what": "absent", "provider": name, "note": why} for name, why in absent.items())
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    sound = {}
    for name, provider in found.items():
        row = checked(name, provider, device, dtype, dry)
        yield row
        if row["note"] in ("", "bounds exceeded"):
            sound[name] = provider
    if device.type == "cpu":
        yield from on_cpu(sound, DRY_SHAPE if dry else CPU_SHAPE)
    else:
        yield from from_logits(device)
        yield from on_gpu(sound, device, end)


def inputs(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype, scale: float = 0.02) -> tuple:
    n, h, v = shape
    torch.manual_seed(0)
    weight = torch.empty(v, h, device=device, dtype=dtype).normal_().mul_(scale)
    hidden = torch.randn(n, h, device=device, dtype=dtype)
    return hidden, weight, torch.randint(0, v, (n,), device=device), torch.randn(n, device=device)


def both_passes(provider: Provider, hidden: Any, weight: Any, target: Any, upstream: Any) -> tuple:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    logprob, entropy = provider(hidden, weight, target, 1.0)
    loss = (logprob * upstream).sum()
    if entropy is not None:
        loss = loss + 1e-2 * (entropy * upstream).sum()
    loss.backward()
    return logprob.detach(), hidden.grad, weight.grad, entropy


def checked(name: str, provider: Provider, device: torch.device, dtype: torch.dtype, dry: bool) -> Row:
    """Against float64 of the same inputs; a head whose logits reach 20 to 40."""
    hidden, weight, target, upstream = inputs((64, 128, 2003 if dry else 32000), device, dtype, scale=0.6)
    row: Row = {"what": "against float64", "provider": name}
    try:
        logprob, d_hidden, d_weight, entropy = both_passes(provider, hidden, weight, target, upstream)
    except (RuntimeError, ValueError, TypeError, ImportError, AttributeError) as error:  # other people's kernels
        return row | {"note": f"failed: {type(error).__name__} {str(error)[:80]}"}
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logp = torch.log_softmax(h @ w.t(), -1)
    exact = logp.gather(1, target[:, None])[:, 0]
    loss = (exact * upstream).sum()
    if entropy is not None:
        loss = loss - 1e-2 * ((logp.exp() * logp).sum(-1) * upstream).sum()
    loss.backward()
    errors = {
        "logprob error": float((logprob.double() - exact.detach()).abs().max()),
        "dH error": float((d_hidden.double() - h.grad).norm() / h.grad.norm()),
        "dW error": float((d_weight.double() - w.grad).norm() / w.grad.norm()),
    }
    limit = TOLERANCE["gradient"][dtype]
    fine = errors["logprob error"] <= TOLERANCE["logprob"] and max(errors["dH error"], errors["dW error"]) <= limit
    without = "" if entropy is not None else " (no entropy)"
    return row | errors | {"note": ("" if fine else "bounds exceeded") + without}


def prepared(name: str, shape: tuple[int, int, int]) -> Callable[[], Any]:
    """One forward and backward pass of a provider on CPU, in float32."""
    device = torch.device("cpu")
    provider = providers(device)[0][name]
    both_passes(provider, *inputs(DRY_SHAPE, device, torch.float32))  # imports, threads
    return functools.partial(both_passes, provider, *inputs(shape, device, torch.float32))


def on_cpu(found: dict[str, Provider], shape: tuple[int, int, int]) -> Iterator[Row]:
    """Seconds and peak extra memory (gradients included), each provider in a process of its own."""
    naive: Row = {}
    for name in found:
        one = measure.in_fresh_process(prepared, (name, shape), 1)
        naive = naive or one
        yield {
            "what": "forward and backward",
            "provider": name,
            "shape": shape,
            "seconds": one["seconds"],
            "cpu_seconds": one["cpu_seconds"],
            "peak_MiB": one["peak_bytes"] / 2**20,
            "time/naive": one["cpu_seconds"] / naive["cpu_seconds"],
            "memory/naive": one["peak_bytes"] / max(naive["peak_bytes"], 1),
        }


def on_gpu(found: dict[str, Provider], device: torch.device, end: float) -> Iterator[Row]:
    for n, (h, v), ranks in ((n, head, ranks) for n in GPU_ROWS for head in GPU_HEADS for ranks in (1, 8)):
        shape = (n, h, v // ranks)
        given = inputs(shape, device, torch.bfloat16)
        for name, provider in found.items():
            row: Row = {"what": "forward and backward", "provider": name, "shape": shape}
            if time.monotonic() > end:
                yield row | {"note": "not run: the time is up"}
                return
            if name == "naive" and n * shape[2] * 14 > NAIVE_LIMIT_BYTES:
                continue
            try:
                yield row | timed(provider, given, shape, device)
            except (RuntimeError, ValueError, TypeError) as error:  # out of memory, or other people's kernels
                yield row | {"note": f"failed: {type(error).__name__} {str(error)[:80]}"}
            torch.cuda.empty_cache()


def timed(provider: Provider, given: tuple, shape: tuple[int, int, int], device: torch.device) -> Row:
    work = shape[0] * shape[1] * shape[2]
    with torch.no_grad():
        forward = measure.seconds(lambda: provider(*given[:3], 1.0), device, 10)
    full = measure.seconds(lambda: both_passes(provider, *given), device, 10)
    return {
        "forward_ms": 1e3 * forward,
        "full_ms": 1e3 * full,
        "forward_TF": 2 * work / forward / 1e12,
        "full_TF": 8 * work / full / 1e12,
        "peak_MiB": measure.cuda_peak(lambda: both_passes(provider, *given)) / 2**20,
    }


def from_logits(device: torch.device, shape: tuple[int, int] = (16384, 152064)) -> Iterator[Row]:
    """Terabytes per second of the two Triton kernels, to be held against the copy in the facts."""
    from megarl_kernels import logprob_triton

    n, v = shape
    options = moments.Options.of(
        v, vocab_size=v - 128, vocab_start=0, tp_group=None, softcap=0.0, logit_scale=1.0, ignore_index=-100,
        stats=("entropy",),
    )  # fmt: skip
    target, factor = torch.randint(0, v - 128, (n,), device=device), torch.ones(n, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.empty(n, v, device=device, dtype=dtype).normal_().mul_(4)
        local = moments.empty_moments(n, options, torch.float32, device)
        forward = measure.seconds(
            lambda x=logits, m=local: logprob_triton.fill_moments(x, target, factor, options, m), device, 10
        )
        outputs, saved = moments.finish(local, target, factor, options)
        rows = moments.rows_of([torch.ones_like(x) for x in outputs], target, factor, saved, options)
        assert rows is not None
        backward = measure.seconds(lambda x=logits, r=rows: logprob_triton.fill_gradient(x, r, options, x), device, 10)
        yield {"what": "moments of logits", "provider": str(dtype), "shape": shape, "forward_ms": 1e3 * forward,
               "TBs": logits.nbytes / forward / 1e12}  # fmt: skip
        yield {"what": "gradient of logits", "provider": str(dtype), "shape": shape, "full_ms": 1e3 * backward,
               "TBs": 2 * logits.nbytes / backward / 1e12}  # fmt: skip
        del logits

"""Ways to get logprobs and entropies out of a head: ours, plain torch, and other libraries where they are installed.

A provider takes hidden[N, H], weight[V, H], target[N] and a temperature; it returns logprob[N] and entropy[N], or None
for an entropy it does not have.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megarl_kernels import linear_logprob

Provider = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor | None]]


def naive(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """All logits at once, derivatives by autograd."""
    logp = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def chunks512(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """512 rows at a time, recomputed in backward: what torch alone offers."""
    found = [
        checkpoint(naive, h, weight, t, temperature, use_reentrant=False)
        for h, t in zip(hidden.split(512), target.split(512), strict=True)
    ]
    return torch.cat([logprob for logprob, _ in found]), torch.cat([entropy for _, entropy in found])


def ours(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, *, backend: str, mebibytes: int
) -> tuple[Tensor, Tensor]:
    out = linear_logprob(
        hidden, weight, target, temperature=temperature, backend=backend, workspace_bytes=mebibytes << 20
    )
    return out.logprob, out.stats["entropy"]


def _liger(hidden: Tensor, weight: Tensor, target: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction

    loss, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, target, temperature, -100, 1, True)
    return -loss, entropy.float()


def _cce(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float, *, kind: str
) -> tuple[Tensor, Tensor | None]:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden / temperature, weight, target, reduction="none", impl=kind), None


def providers(device: torch.device) -> tuple[dict[str, Provider], dict[str, str]]:
    """(by name, why others are absent)"""
    found: dict[str, Provider] = {"naive": naive, "torch chunks 512": chunks512}
    for backend in ("torch",) if device.type == "cpu" else ("torch", "triton"):
        for mebibytes in (512,) if device.type == "cpu" or backend == "torch" else (256, 512, 1024):
            found[f"megarl {backend} {mebibytes}M"] = functools.partial(ours, backend=backend, mebibytes=mebibytes)
    absent = {}
    others: dict[str, dict[str, Provider]] = {
        "liger_kernel": {"liger": _liger},
        "cut_cross_entropy": {
            "cce": functools.partial(_cce, kind="cce"),
            "cce_exact": functools.partial(_cce, kind="cce_exact"),
        },
    }
    for package, made in others.items():
        if device.type == "cpu":
            absent[package] = "needs CUDA"
        elif importlib.util.find_spec(package) is None:
            absent[package] = "not installed"
        else:
            found |= made
    return found, absent

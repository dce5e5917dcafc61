"""Packs of tokens with trouble in them, and what their loss is by the plain definition."""

import torch
from torch import Tensor

from megarl_kernels import grpo_token_loss

NAN = float("nan")
PER_TOKEN = ("logprob", "old_logprob", "reference_logprob", "tis_weight", "sequence_ids", "mask")


def pack_of(tokens: int, sequences: int, seed: int = 0, spread: float = 0.3) -> dict[str, Tensor]:
    """float32 inputs by name, with NaN wherever the mask is off, and beyond every clamp here and there inside it."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.sort(torch.randint(0, sequences, (tokens,), generator=g)).values
    mask = torch.rand(tokens, generator=g) > 0.25
    logprob = -4 * torch.rand(tokens, generator=g)
    old = logprob + spread * torch.randn(tokens, generator=g)
    reference = logprob + spread * torch.randn(tokens, generator=g)
    corners = [(-30.0, -1.0, -1.0), (-1.0, -40.0, -2.0), (-1.0, -1.0, -1.0), (-25.0, -1.0, -0.5)]
    corners += [(-1.0, -1.0001, -1.0001), (-6.0, -6.0, -1.0)]
    for i, (new, before, anchor) in enumerate(corners):
        logprob[i::97], old[i::97], reference[i::97] = new, before, anchor
    vectors = {"logprob": logprob, "old_logprob": old, "reference_logprob": reference}
    vectors["tis_weight"] = 2 * torch.rand(tokens, generator=g)
    for values in vectors.values():
        values[~mask] = NAN
    advantage = torch.randn(sequences, generator=g)
    advantage[::5] = 0.0
    return {**vectors, "advantage": advantage, "sequence_ids": ids, "mask": mask}


def run(pack, backend, dtype=None, upstream=1.7, **options):
    """(loss, metrics, gradient); in float64 by torch and float32 by Triton unless told."""
    dtype = dtype or (torch.float64 if backend == "torch" else torch.float32)
    tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in pack.items() if k not in options}
    logprob = tensors.pop("logprob").clone().requires_grad_()
    loss, metrics = grpo_token_loss(logprob, **tensors, **options, backend=backend)
    (loss * upstream).backward()
    return loss.detach(), metrics, logprob.grad


def by_definition(pack, upstream=1.7, **options):
    """(loss, gradient) in float64, sequence by sequence, on the masked tokens alone."""
    o = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "kl_coef": 0.0, "kl": "k3", "ratio_level": "token"}
    o |= {"aggregation": "token-mean"} | options
    x = pack["logprob"].double().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for s, a in enumerate(pack["advantage"].double()):
        at = (pack["sequence_ids"] == s) & pack["mask"]
        n = int(at.sum())
        if n == 0:
            continue
        new, old = x[at], pack["old_logprob"].double()[at]
        log_ratio = new - old if o["ratio_level"] == "token" else (new - old).mean().expand(n)
        rho = log_ratio.clamp(-20, 20).exp()
        value = torch.maximum(-a * rho, -a * rho.clamp(1 - o["clip_low"], 1 + o["clip_high"]))
        if o["dual_clip"] is not None and a < 0:
            value = torch.minimum(value, -a * o["dual_clip"])
        if "tis_weight" in pack:
            value = value * pack["tis_weight"].double()[at]
        if "reference_logprob" in pack:
            d = (pack["reference_logprob"].double()[at] - new).clamp(-20, 20)
            kl = {"k1": -d, "k2": d**2 / 2, "k3": (d.expm1() - d).clamp(-10, 10)}[o["kl"]]
            value = value + o["kl_coef"] * kl
        weight = {
            "token-mean": 1 / o["num_tokens"],
            "seq-mean-token-mean": 1 / (o["num_sequences"] * n),
            "seq-mean-token-sum": 1 / o["num_sequences"],
            "seq-mean-token-sum-norm": 1 / (o["num_sequences"] * (o.get("max_tokens") or 1)),
        }[o["aggregation"]]
        loss = loss + weight * value.sum()
    (loss * upstream).backward()
    return loss.detach(), x.grad

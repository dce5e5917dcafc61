"""The token loss with everything on (KL, importance weights, dual clip): forward, and forward with backward."""

from collections.abc import Callable

import torch
from measure import seconds
from torch import Tensor

from megarl_kernels import grpo_token_loss
from megarl_kernels.dispatch import pick

OPTIONS = {"clip_high": 0.28, "dual_clip": 3.0, "kl_coef": 1e-3}
SIZES = ((16, 1024), (256, 4096), (4096, 4096))  # sequences, tokens of each: one microbatch, RL-Kernel's case, a step
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 5e-5  # relative to the sum of the absolute terms, and per token
BYTES_FORWARD, BYTES_BACKWARD = 29, 8  # of a token: 4 float32 + id + mask in, slope out; slope in, gradient out

Pack = dict[str, Tensor]
Loss = Callable[[Tensor, Pack], Tensor]


def pack_of(sequences: int, tokens: int, device: torch.device) -> tuple[Tensor, Pack]:
    """(logprob[T], everything else); a quarter of the tokens is masked."""
    g = torch.Generator(device).manual_seed(0)
    total = sequences * tokens

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(total, generator=g, device=device)

    logprob = -noise(2.0).abs()
    return logprob, {
        "old_logprob": logprob + noise(0.1),
        "advantage": torch.randn(sequences, generator=g, device=device),
        "sequence_ids": torch.arange(sequences, device=device).repeat_interleave(tokens),
        "mask": torch.rand(total, generator=g, device=device) > 0.25,
        "reference_logprob": logprob + noise(0.1),
        "tis_weight": noise(0.1).exp().clamp(max=2.0),
    }


def ours(logprob: Tensor, pack: Pack, *, backend: str, ratio_level: str) -> Tensor:
    count = pack["mask"].numel()
    return grpo_token_loss(
        logprob,
        **pack,
        **OPTIONS,
        num_tokens=count,
        num_sequences=pack["advantage"].numel(),
        ratio_level=ratio_level,  # pyright: ignore[reportArgumentType]
        backend=backend,
    )[0]


def plain(logprob: Tensor, pack: Pack) -> Tensor:
    """What a training loop writes down: the loss alone, no metrics."""
    a = pack["advantage"][pack["sequence_ids"]]
    ratio = (logprob - pack["old_logprob"]).clamp(-20, 20).exp()
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.28))
    loss = torch.where(a < 0, torch.minimum(loss, -a * 3.0), loss) * pack["tis_weight"]
    d = (pack["reference_logprob"] - logprob).clamp(-20, 20)
    loss = loss + 1e-3 * (d.exp() - d - 1).clamp(-10, 10)
    return (loss * pack["mask"]).sum() / pack["mask"].numel()


def providers(device: torch.device) -> dict[str, Loss]:
    def of(backend: str, level: str) -> Loss:
        return lambda x, pack: ours(x, pack, backend=backend, ratio_level=level)

    chosen, _ = pick("grpo_token_loss", torch.empty(0, device=device))
    found = {f"ours ({chosen})": of(chosen, "token"), f"ours ({chosen}), GSPO": of(chosen, "sequence")}
    if chosen != "torch":
        found |= {"ours (torch)": of("torch", "token"), "plain, compiled": torch.compile(plain)}
    return found | {"plain": plain}


def run(device: torch.device, dry: bool) -> list[dict]:
    """One row per size and provider; GB/s counts the bytes that must move at least."""
    sizes = ((4, 64),) if dry else SIZES if device.type == "cuda" else SIZES[:2]
    rows = []
    for sequences, tokens in sizes:
        logprob, pack = pack_of(sequences, tokens, device)
        exact = {k: v.double() if v.is_floating_point() else v for k, v in pack.items()}
        for name, loss in providers(device).items():
            level = "sequence" if "GSPO" in name else "token"
            x, y = logprob.clone().requires_grad_(), logprob.double().requires_grad_()
            value, want = loss(x, pack), ours(y, exact, backend="torch", ratio_level=level)
            value.backward()
            want.backward()
            errors = _errors(value, want, x, y, pack["mask"])
            repeats = 1 if dry else 20 if device.type == "cuda" else 5
            forward = seconds(lambda x=x, f=loss, p=pack: f(x, p), device, repeats)
            both = seconds(lambda x=x, f=loss, p=pack: torch.autograd.grad(f(x, p), x), device, repeats)
            rows.append(
                {
                    "shape": (sequences, tokens),
                    "provider": name,
                    "loss_error": errors[0],
                    "gradient_error": errors[1],
                    "ok": errors[0] <= LOSS_TOLERANCE and errors[1] <= GRADIENT_TOLERANCE,
                    "forward_ms": 1e3 * forward,
                    "ms": 1e3 * both,
                    "GBs": logprob.numel() * (BYTES_FORWARD + BYTES_BACKWARD) / both / 1e9,
                }
            )
    return rows


def _errors(value: Tensor, want: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> tuple[float, float]:
    """Of the loss, on the scale of its terms (about 1 each), and of the gradient on the scale of the largest one."""
    assert x.grad is not None and y.grad is not None
    gradient = (x.grad.double() - y.grad)[mask].abs().max() / y.grad.abs().max()
    return abs(float(value.detach().double() - want.detach())), float(gradient)

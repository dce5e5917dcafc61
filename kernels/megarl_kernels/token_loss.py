"""The clipped policy-gradient loss of one pack of tokens, as a share of a global mean.

Sources: PPO (arXiv 1707.06347), GRPO (2402.03300), dual clip (1912.09729), DAPO (2503.14476), Dr.GRPO (2503.20783),
GSPO (2507.18071), KL estimators (joschu.net/blog/kl-approx.html). Axes: T tokens, S sequences.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

Kl = Literal["k1", "k2", "k3"]
RatioLevel = Literal["token", "sequence"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
BACKENDS = ("auto", "torch")

LOG_RATIO_BOUND = 20.0  # of log rho and of the KL's exponent; beyond it the gradient is zero
K3_BOUND = 10.0


def grpo_token_loss(  # noqa: PLR0913
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    sequence_ids: Tensor,
    mask: Tensor,
    *,
    num_tokens: int | Tensor,
    num_sequences: int | Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    reference_logprob: Tensor | None = None,
    kl_coef: float = 0.0,
    kl: Kl = "k3",
    ratio_level: RatioLevel = "token",
    aggregation: Aggregation = "token-mean",
    max_tokens: int | None = None,
    tis_weight: Tensor | None = None,
    sequence_tokens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (a scalar) of logprob[T], and sums for the log.

    With rho = exp(clamp(logprob - old, -20, 20)) and A = advantage[sequence_ids]:

        l = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high));  where A < 0 and dual_clip = c: min(l, -A c)
        loss = sum over mask of weight * (tis_weight * l + kl_coef * kl)

    weight by aggregation: token-mean 1 / num_tokens; seq-mean-token-mean 1 / (num_sequences * tokens of the sequence);
    seq-mean-token-sum 1 / num_sequences; seq-mean-token-sum-norm 1 / (num_sequences * max_tokens). The two counts are
    those of the whole optimizer step over all ranks, so the losses of all packs and ranks *add up* to the mean.

    ``sequence_tokens`` [S] are response tokens of the whole sequences (null: counted from ``mask``, right where no
    sequence is cut by context parallelism). ratio_level="sequence" (GSPO, rho = exp(mean log-ratio)) needs uncut
    sequences. KL, by d = clamp(reference - logprob, -20, 20): k1 = -d, k2 = d^2 / 2, k3 = clamp(e^d - d - 1, -10, 10).
    Positions outside ``mask`` contribute exactly 0 to loss and gradient, even where they hold NaN.

    Metrics are detached sums over this pack's masked tokens; add them up over packs and ranks, then divide by the
    tokens:

        tokens; policy_loss and kl_loss (already weighted: they add up to the parts of the loss); ratio_sum;
        log_ratio_sum (logprob - old); clip_low_tokens and clip_high_tokens (where clipping decides the loss);
        dual_clip_tokens; kl_sum (0 without a reference); tis_weight_sum (= tokens without weights)
    """
    _check(kl, ratio_level, aggregation, backend, max_tokens, kl_coef, reference_logprob)
    mask = mask.bool()
    zero = torch.zeros((), dtype=logprob.dtype, device=logprob.device)
    # masked values are replaced before any arithmetic: 0 * NaN is NaN, in backward as well
    new = torch.where(mask, logprob, zero)
    log_ratio = new - torch.where(mask, old_logprob.detach(), zero)
    tokens_of = _sequence_tokens(sequence_tokens, mask, sequence_ids, advantage, new.dtype)
    if ratio_level == "sequence":
        sums = torch.zeros_like(tokens_of).index_add(0, sequence_ids, log_ratio)
        ratio = (sums / tokens_of).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()[sequence_ids]
    else:
        ratio = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()

    a = torch.where(mask, advantage.detach().to(new.dtype)[sequence_ids], zero)
    plain, clipped = -a * ratio, -a * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, clipped)
    bounded = torch.zeros_like(mask)
    if dual_clip is not None:
        bounded = (a < 0) & (loss > -a * dual_clip)
        loss = torch.where(bounded, -a * dual_clip, loss)
    tis = torch.ones_like(new) if tis_weight is None else torch.where(mask, tis_weight.detach().to(new.dtype), zero)

    weight = _weights(aggregation, num_tokens, num_sequences, max_tokens, tokens_of, sequence_ids, new)
    weight = torch.where(mask, weight, zero)
    kl_t = (
        torch.zeros_like(new) if reference_logprob is None else _kl(kl, new, torch.where(mask, reference_logprob, zero))
    )
    policy_loss = (weight * tis * loss).sum()
    kl_loss = kl_coef * (weight * kl_t).sum() if reference_logprob is not None else torch.zeros_like(policy_loss)

    with torch.no_grad():
        metrics = {
            "tokens": mask.sum().to(new.dtype),
            "policy_loss": policy_loss.detach(),
            "kl_loss": kl_loss.detach(),
            "ratio_sum": torch.where(mask, ratio, zero).sum(),
            "log_ratio_sum": log_ratio.sum(),
            "clip_low_tokens": (mask & (a < 0) & (ratio < 1 - clip_low)).sum().to(new.dtype),
            "clip_high_tokens": (mask & (a > 0) & (ratio > 1 + clip_high)).sum().to(new.dtype),
            "dual_clip_tokens": (mask & bounded).sum().to(new.dtype),
            "kl_sum": torch.where(mask, kl_t, zero).sum(),
            "tis_weight_sum": torch.where(mask, tis, zero).sum(),
        }
    return policy_loss + kl_loss, metrics


def _sequence_tokens(given: Tensor | None, mask: Tensor, ids: Tensor, advantage: Tensor, dtype: torch.dtype) -> Tensor:
    """Response tokens of each sequence [S], at least 1 (a sequence without any has weight nowhere)."""
    if given is None:
        zeros = torch.zeros(advantage.shape[0], dtype=dtype, device=mask.device)
        return zeros.index_add(0, ids, mask.to(dtype)).clamp(min=1)
    return given.to(dtype).clamp(min=1)


def _weights(
    aggregation: Aggregation,
    num_tokens: int | Tensor,
    num_sequences: int | Tensor,
    max_tokens: int | None,
    tokens_of: Tensor,
    sequence_ids: Tensor,
    like: Tensor,
) -> Tensor:
    # an empty update has counts of 0 and nothing to divide
    tokens = torch.as_tensor(num_tokens, dtype=like.dtype, device=like.device).clamp(min=1)
    sequences = torch.as_tensor(num_sequences, dtype=like.dtype, device=like.device).clamp(min=1)
    if aggregation == "token-mean":
        return (1 / tokens).expand_as(like)
    if aggregation == "seq-mean-token-mean":
        return (1 / (sequences * tokens_of))[sequence_ids]
    if aggregation == "seq-mean-token-sum":
        return (1 / sequences).expand_as(like)
    assert max_tokens is not None
    return (1 / (sequences * max_tokens)).expand_as(like)


def _kl(kind: Kl, logprob: Tensor, reference: Tensor) -> Tensor:
    d = (reference.detach() - logprob).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if kind == "k1":
        return -d
    if kind == "k2":
        return d.square() / 2
    return (torch.expm1(d) - d).clamp(-K3_BOUND, K3_BOUND)


def _check(
    kl: str,
    ratio_level: str,
    aggregation: str,
    backend: str,
    max_tokens: int | None,
    kl_coef: float,
    reference: Tensor | None,
) -> None:
    for name, value, known in (
        ("kl", kl, get_args(Kl)),
        ("ratio_level", ratio_level, get_args(RatioLevel)),
        ("aggregation", aggregation, get_args(Aggregation)),
        ("backend", backend, BACKENDS),
    ):
        if value not in known:
            raise ValueError(f"{name}={value!r}: there are {', '.join(known)}")
    if aggregation == "seq-mean-token-sum-norm" and not max_tokens:
        raise ValueError("aggregation=seq-mean-token-sum-norm needs max_tokens, a constant of the run")
    if kl_coef > 0 and reference is None:
        raise ValueError(f"kl_coef={kl_coef} needs reference_logprob")

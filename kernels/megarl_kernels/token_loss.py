"""The clipped policy-gradient loss of one pack of tokens, as a share of a global mean.

Sources: PPO (arXiv 1707.06347), GRPO (2402.03300), dual clip (1912.09729), DAPO (2503.14476), Dr.GRPO (2503.20783),
GSPO (2507.18071), KL estimators (joschu.net/blog/kl-approx.html). Axes: T tokens, S sequences.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from megarl_kernels.dispatch import resolve
from megarl_kernels.token_loss_terms import METRICS, Aggregation, Kl, Pack, RatioLevel, Terms, check_pack, check_terms
from megarl_kernels.token_loss_torch import token_loss


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
    context_sum: Callable[[Tensor], Tensor] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss (a scalar) of logprob[T], and sums for the log.

    With rho = exp(clamp(logprob - old, -20, 20)) and A = advantage[sequence_ids]:

        l = max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high));  where A < 0 and dual_clip = c: min(l, -A c)
        loss = sum over mask of weight * (tis_weight * l + kl_coef * kl)

    weight by aggregation: token-mean 1 / num_tokens; seq-mean-token-mean 1 / (num_sequences * tokens of the sequence);
    seq-mean-token-sum 1 / num_sequences; seq-mean-token-sum-norm 1 / (num_sequences * max_tokens). The two counts are
    those of the whole optimizer step over all ranks, so the losses of all packs and ranks *add up* to the mean.
    KL, by d = clamp(reference - logprob, -20, 20): k1 = -d, k2 = d^2 / 2, k3 = clamp(e^d - d - 1, -10, 10).

    ratio_level="sequence" (GSPO): rho of a token is exp(clamp(mean of its sequence's log-ratios)), over the sequence's
    masked tokens, and its derivative reaches each of them. ``sequence_tokens`` [S] are those of the whole sequences
    (null: counted from ``mask``, right where no sequence is cut). Where context parallelism cuts sequences over ranks,
    ``context_sum`` adds a tensor up over those ranks, which all call it once per pack; the value may be the input.
    ratio_level="token" never calls it.

    Positions outside ``mask`` contribute exactly 0 to loss and gradient, even where they hold NaN; a NaN inside it
    makes loss and gradient NaN. Arithmetic, loss and metrics are float32 (float64 where ``logprob`` is). The Triton
    backend wants ascending ``sequence_ids`` for ratio_level="sequence" and answers NaN to others.

    Metrics are detached sums over this pack's masked tokens, views of one vector; add them up over packs and ranks,
    then divide by the tokens:

        tokens; policy_loss and kl_loss (already weighted: they add up to the parts of the loss); ratio_sum;
        log_ratio_sum (logprob - old); clip_low_tokens and clip_high_tokens (where clipping decides the loss);
        dual_clip_tokens; kl_sum (0 without a reference); tis_weight_sum (= tokens without weights)
    """
    terms = Terms(
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kl_coef=kl_coef,
        kl=kl,
        ratio_level=ratio_level,
        aggregation=aggregation,
        max_tokens=max_tokens,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        context_sum=context_sum,
    )
    check_terms(terms, reference_logprob is not None, sequence_tokens is not None)
    pack = Pack(
        logprob=logprob,
        old_logprob=old_logprob,
        advantage=advantage,
        sequence_ids=sequence_ids,
        mask=mask.bool(),
        reference_logprob=reference_logprob,
        tis_weight=tis_weight,
        sequence_tokens=sequence_tokens,
    )
    check_pack(pack)
    if sequence_tokens is None and terms.needs_sequence_tokens:
        pack = replace(pack, sequence_tokens=_counted(pack))
    if resolve("grpo_token_loss", backend, logprob) == "triton":
        from megarl_kernels.token_loss_triton import token_loss as fused

        loss, metrics = fused(pack, terms)
    else:
        loss, metrics = token_loss(pack, terms)
    return loss, dict(zip(METRICS, metrics.unbind(), strict=True))


def _counted(pack: Pack) -> Tensor:
    """Masked tokens [S]; whole numbers, so the order in which a GPU adds them does not matter."""
    zeros = torch.zeros(pack.advantage.shape[0], dtype=torch.int64, device=pack.mask.device)
    return zeros.index_add(0, pack.sequence_ids, pack.mask.to(torch.int64))

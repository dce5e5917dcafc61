"""The loss of one microbatch, as its share of the mean over a whole optimizer step (torch only)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megarl.settings import LossConfig
from megarl.types import Metrics, Microbatch
from megarl_kernels import grpo_token_loss

LOG_WEIGHT_BOUND = 20.0  # of the importance weight's exponent, as the kernels bound that of the ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """A ``Microbatch`` in torch; see there for the meaning and the shift of the fields."""

    token_ids: Tensor  # int64[T]
    labels: Tensor  # int64[T]
    positions: Tensor  # int64[T]
    mask: Tensor  # bool[T]
    sequence_ids: Tensor  # int64[T]
    rollout_logprobs: Tensor  # float32[T]
    policy_logprobs: Tensor  # float32[T]
    reference_logprobs: Tensor | None  # float32[T]
    advantages: Tensor  # float32[S]
    sequence_tokens: Tensor  # int64[S]
    cu_seqlens: Tensor  # int32[S + 1]

    @classmethod
    def of(cls, microbatch: Microbatch, device: torch.device | str = "cpu") -> "TokenBatch":
        """The microbatch on ``device``; copied, because arrays that came through Ray are read-only."""
        m = microbatch
        reference = m.reference_logprobs
        return cls(
            token_ids=torch.tensor(m.token_ids, device=device),
            labels=torch.tensor(m.labels, device=device),
            positions=torch.tensor(m.positions, device=device),
            mask=torch.tensor(m.mask, device=device),
            sequence_ids=torch.tensor(m.sequence_ids, device=device),
            rollout_logprobs=torch.tensor(m.rollout_logprobs, device=device),
            policy_logprobs=torch.tensor(m.policy_logprobs, device=device),
            reference_logprobs=None if reference is None else torch.tensor(reference, device=device),
            advantages=torch.tensor(m.advantages, device=device),
            sequence_tokens=torch.tensor(m.sequence_tokens, device=device),
            cu_seqlens=torch.tensor(m.cu_seqlens, device=device),
        )

    def at(self, index: Tensor) -> "TokenBatch":
        """The tokens at int64[n] positions only, e.g. a context-parallel rank's; per-sequence fields stay whole."""
        return replace(
            self,
            token_ids=self.token_ids[index],
            labels=self.labels[index],
            positions=self.positions[index],
            mask=self.mask[index],
            sequence_ids=self.sequence_ids[index],
            rollout_logprobs=self.rollout_logprobs[index],
            policy_logprobs=self.policy_logprobs[index],
            reference_logprobs=None if self.reference_logprobs is None else self.reference_logprobs[index],
        )


def pg_loss(
    policy_logprobs_T: Tensor,
    batch: TokenBatch,
    cfg: LossConfig,
    *,
    num_tokens: int,
    num_sequences: int,
    kl_coef: float,
    context_sum: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Scalar loss of the present policy's logprobs[T], and detached sums for ``summarize``.

    The counts are of all response tokens and all training sequences of the optimizer step, on all ranks and before
    packing (``packing.response_tokens``, ``packing.num_sequences``): then the losses of microbatches and ranks add up
    to the step's loss, and gradients must be *summed* over data-parallel ranks, whatever the packing.

    cfg.ratio_level=sequence (GSPO) needs whole sequences. Packing never cuts one; context parallelism does, and there
    ``context_sum`` adds a tensor up over the ranks that share the pack (``TokenBatch.at``), in one collective per pack.

    Truncated importance sampling: each token's policy loss (not its KL) is multiplied by
    min(exp(policy before the update - engine), cfg.tis_cap); where the engine gave no logprob the weight is 1.
    """
    weight, sums = _importance_weight(batch, cfg.tis_cap)
    loss, metrics = grpo_token_loss(
        policy_logprobs_T,
        batch.policy_logprobs,
        batch.advantages,
        batch.sequence_ids,
        batch.mask,
        num_tokens=num_tokens,
        num_sequences=num_sequences,
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        dual_clip=cfg.dual_clip,
        reference_logprob=batch.reference_logprobs,
        kl_coef=kl_coef,
        kl=cfg.kl,
        ratio_level=cfg.ratio_level,
        aggregation=cfg.aggregation,
        max_tokens=cfg.max_tokens,
        tis_weight=weight,
        sequence_tokens=batch.sequence_tokens,
        context_sum=context_sum,
    )
    return loss, metrics | sums


def _importance_weight(batch: TokenBatch, cap: float | None) -> tuple[Tensor | None, dict[str, Tensor]]:
    if cap is None:
        zero = torch.zeros((), device=batch.mask.device)
        return None, {"tis_capped_tokens": zero, "tis_missing_tokens": zero}
    log_weight = batch.policy_logprobs - batch.rollout_logprobs
    missing = torch.isnan(log_weight)
    weight = log_weight.clamp(-LOG_WEIGHT_BOUND, LOG_WEIGHT_BOUND).exp()
    capped = weight > cap  # false for NaN
    weight = torch.where(missing, torch.ones_like(weight), weight.clamp(max=cap))
    return weight, {
        "tis_capped_tokens": (capped & batch.mask).sum().float(),
        "tis_missing_tokens": (missing & batch.mask).sum().float(),
    }


def summarize(sums: Mapping[str, float]) -> Metrics:
    """Readable averages of ``pg_loss`` metrics that were added up over all microbatches and ranks of one update."""
    tokens = max(sums["tokens"], 1.0)
    return {
        "loss": sums["policy_loss"] + sums["kl_loss"],
        "policy_loss": sums["policy_loss"],
        "kl_loss": sums["kl_loss"],
        "kl": sums["kl_sum"] / tokens,
        "ratio": sums["ratio_sum"] / tokens,
        "log_ratio": sums["log_ratio_sum"] / tokens,
        "clip_share": (sums["clip_low_tokens"] + sums["clip_high_tokens"]) / tokens,
        "clip_low_share": sums["clip_low_tokens"] / tokens,
        "clip_high_share": sums["clip_high_tokens"] / tokens,
        "dual_clip_share": sums["dual_clip_tokens"] / tokens,
        "tis_weight": sums["tis_weight_sum"] / tokens,
        "tis_capped_share": sums["tis_capped_tokens"] / tokens,
        "tis_missing_tokens": sums["tis_missing_tokens"],
    }

"""Group-relative advantages over ragged, interleaved groups.

Sources: GRPO (arXiv 2402.03300), Dr.GRPO (2503.20783), RLOO (2402.14740). Axes: R rewards, G groups.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from megarl_kernels.advantage_host import advantages
from megarl_kernels.dispatch import resolve

Mode = Literal["grpo", "dr_grpo", "rloo", "batch"]


def grouped_advantage(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    mode: Mode = "grpo",
    ddof: int = 1,
    eps: float = 1e-6,
    valid: Tensor | None = None,
) -> Tensor:
    """Advantages[R] of rewards[R] whose baseline is the mean of their group, in the dtype of the rewards.

    grpo: (r - mean) / (std + eps); dr_grpo: r - mean; rloo: (r - mean) K / (K - 1), which is the reward minus the
    mean of the others; batch: the group's mean, but the standard deviation of all valid rewards.

    A group is the members with one id (int64[R], any values), wherever they stand; answer-anchored groups (CoVerRL) are
    a choice of ids. Members that are NaN, infinite or not ``valid`` (bool[R]) enter no statistic and get 0. Groups
    whose valid rewards are all equal, and groups of one, get exactly 0. The arithmetic is float64, two-pass and
    relative to one of the group's own rewards, whatever the dtype: in float32 seven equal rewards of 0.1 would earn
    -0.007 each from rounding alone.

    Where Triton serves the rewards' device, one sort of the ids and one launch for all groups, without waiting for the
    device; elsewhere the host computes. Ids in ascending runs are fastest on the host.
    """
    _check(rewards, group_ids, mode, ddof, eps, valid)
    rewards = rewards.detach()
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    if resolve("grouped_advantage", "auto", rewards) == "triton":
        from megarl_kernels.advantage_triton import advantages as fused

        return fused(rewards, group_ids, mode, ddof, eps, valid)
    out = advantages(
        rewards.to("cpu", torch.float64).numpy(),
        group_ids.cpu().numpy(),
        mode=mode,
        ddof=ddof,
        eps=eps,
        valid=None if valid is None else valid.bool().cpu().numpy(),
    )
    return torch.from_numpy(out).to(rewards.device, rewards.dtype)


def _check(rewards: Tensor, group_ids: Tensor, mode: str, ddof: int, eps: float, valid: Tensor | None) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r}: there are {', '.join(get_args(Mode))}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof!r}: 0 (population) or 1 (sample)")
    if not rewards.is_floating_point():
        raise ValueError(f"rewards are {rewards.dtype}: a floating dtype is needed")
    if not (math.isfinite(eps) and eps >= 0):
        raise ValueError(f"eps={eps!r} must be finite and not negative")
    if group_ids.is_floating_point() or group_ids.is_complex():
        raise ValueError(f"group_ids are {group_ids.dtype}: an integer dtype is needed")
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards{list(rewards.shape)} and group_ids{list(group_ids.shape)} must be vectors of one length"
        )
    if valid is not None and valid.shape != rewards.shape:
        raise ValueError(f"valid{list(valid.shape)} must be [R] like rewards{list(rewards.shape)}")

"""Group-relative advantages over ragged, interleaved groups.

Sources: GRPO (arXiv 2402.03300), Dr.GRPO (2503.20783), RLOO (2402.14740). Axes: R rewards, G groups.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

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

    A group is the members with one id, wherever they stand. Members that are NaN or not ``valid`` (bool[R]) enter no
    statistic and get 0. Groups whose valid rewards are all equal, and groups of one, get exactly 0. The arithmetic is
    float64 and two-pass: in float32 seven equal rewards of 0.1 would earn -0.007 each from rounding alone.
    """
    _check(rewards, group_ids, mode, ddof)
    usable = ~torch.isnan(rewards) if valid is None else valid.bool() & ~torch.isnan(rewards)
    out = torch.zeros_like(rewards)
    kept = rewards[usable].to(torch.float64)
    if kept.numel() == 0:
        return out

    _, group, size = torch.unique(group_ids[usable], return_inverse=True, return_counts=True)
    count = size.to(torch.float64)  # an integer quotient would be float32
    # sorted segments, not scatter-adds: those sum in no fixed order on a GPU
    order = torch.argsort(group, stable=True)
    mean = _segment(kept[order], size, "sum") / count
    spread = _segment(kept[order], size, "max") - _segment(kept[order], size, "min")
    centred = kept - mean[group]

    if mode == "grpo":
        variance = _segment(centred[order].square(), size, "sum") / (count - ddof).clamp(min=1)
        advantage = centred / (variance.sqrt() + eps)[group]
    elif mode == "batch":
        variance = (kept - kept.mean()).square().sum() / max(kept.numel() - ddof, 1)
        advantage = centred / (variance.sqrt() + eps)
    elif mode == "rloo":
        advantage = centred * (count / (count - 1).clamp(min=1))[group]
    else:
        advantage = centred

    # equal rewards and groups of one: the compare is exact, so rounding in the mean cannot leak through
    advantage = torch.where((spread == 0)[group], torch.zeros_like(advantage), advantage)
    out[usable] = advantage.to(rewards.dtype)
    return out


def _segment(values: Tensor, lengths: Tensor, reduce: str) -> Tensor:
    return torch.segment_reduce(values, reduce, lengths=lengths)


def _check(rewards: Tensor, group_ids: Tensor, mode: str, ddof: int) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r}: there are {', '.join(get_args(Mode))}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof={ddof!r}: 0 (population) or 1 (sample)")
    if not rewards.is_floating_point():
        raise ValueError(f"rewards are {rewards.dtype}: a floating dtype is needed")
    if rewards.dim() != 1 or rewards.shape != group_ids.shape:
        raise ValueError(
            f"rewards{list(rewards.shape)} and group_ids{list(group_ids.shape)} must be vectors of one length"
        )

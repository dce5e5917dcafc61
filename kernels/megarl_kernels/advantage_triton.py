"""Grouped advantages on a GPU: one launch for all groups of a cohort.

Axes: R rewards, in the order of their ids; a tile looks at STARTS places and serves the groups that begin there.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportInvalidTypeForm=false
# a kernel is launched with a grid and options, and its constants are annotated: Triton is no Python to a type checker

import torch
import triton
import triton.language as tl
from torch import Tensor

from megarl_kernels.dispatch import launching_on
from megarl_kernels.offline import Specimen

STARTS, MEMBERS = 32, 16  # a tile: places looked at, members of each group taken at once

_MODES = {"grpo": 0, "dr_grpo": 1, "rloo": 2, "batch": 3}
_GRPO = tl.constexpr(0)
_RLOO = tl.constexpr(2)
_BATCH = tl.constexpr(3)


@triton.jit
def _members(REWARDS, ORDER, VALID, first, length, j, MEMBERS: tl.constexpr):
    """Chunk j of every group: rewards float64[STARTS, MEMBERS], where they stand, which belong, which count."""
    k = j + tl.arange(0, MEMBERS)[None, :]
    belongs = k < length[:, None]
    where = tl.load(ORDER + first[:, None] + k, mask=belongs, other=0)
    reward = tl.load(REWARDS + where, mask=belongs, other=0.0).to(tl.float64)
    counts = belongs & (reward - reward == 0)  # neither NaN nor infinite
    if VALID is not None:
        counts = counts & (tl.load(VALID + where, mask=belongs, other=0) != 0)
    return reward, where, belongs, counts


@triton.jit
def _lengths(IDS, first, own, growing, rewards, STARTS: tl.constexpr, MEMBERS: tl.constexpr):
    """int64[STARTS]: how far each group reaches from where it begins; 0 where none begins."""
    length = tl.zeros([STARTS], tl.int64)
    j = tl.zeros([], tl.int64)
    while tl.max(growing.to(tl.int32), 0) > 0:
        place = first[:, None] + j + tl.arange(0, MEMBERS)[None, :]
        looked = growing[:, None] & (place < rewards)
        same = looked & (tl.load(IDS + place, mask=looked, other=0) == own[:, None])
        found = tl.sum(same.to(tl.int64), 1)
        length += found
        growing = growing & (found == MEMBERS)
        j += MEMBERS
    return length


@triton.jit
def grouped_advantage_kernel(  # noqa: PLR0913
    REWARDS,
    IDS,
    ORDER,
    VALID,
    SCALE,
    OUT,
    rewards,
    ddof: tl.constexpr,
    eps: tl.constexpr,
    MODE: tl.constexpr,
    STARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    """IDS ascending, ORDER where each stood; SCALE float64[1] is the batch mode's 1 / (std + eps). No two programs
    write one place, and each sums in the order of the members: the same bits in every run."""
    first = tl.program_id(0).to(tl.int64) * STARTS + tl.arange(0, STARTS)
    inside = first < rewards
    own = tl.load(IDS + first, mask=inside, other=0)
    before = tl.load(IDS + first - 1, mask=inside & (first > 0), other=0)
    length = _lengths(IDS, first, own, inside & ((first == 0) | (own != before)), rewards, STARTS, MEMBERS)
    longest = tl.max(length, 0)

    # relative to one of the group's own rewards: equal ones are 0 exactly, and so is whatever follows from them
    base = tl.full([STARTS], float("inf"), tl.float64)
    for j in range(0, longest, MEMBERS):
        reward, _, _, counts = _members(REWARDS, ORDER, VALID, first, length, j, MEMBERS)
        base = tl.minimum(base, tl.min(tl.where(counts, reward, float("inf")), 1))
    total = tl.zeros([STARTS], tl.float64)
    size = tl.zeros([STARTS], tl.float64)
    for j in range(0, longest, MEMBERS):
        reward, _, _, counts = _members(REWARDS, ORDER, VALID, first, length, j, MEMBERS)
        total += tl.sum(tl.where(counts, reward - base[:, None], 0.0), 1)
        size += tl.sum(counts.to(tl.float64), 1)
    mean = total / tl.maximum(size, 1.0)

    factor = tl.full([STARTS], 1.0, tl.float64)
    if MODE == _GRPO:
        squares = tl.zeros([STARTS], tl.float64)
        for j in range(0, longest, MEMBERS):
            reward, _, _, counts = _members(REWARDS, ORDER, VALID, first, length, j, MEMBERS)
            apart = (reward - base[:, None]) - mean[:, None]
            squares += tl.sum(tl.where(counts, apart * apart, 0.0), 1)
        deviation = tl.sqrt(squares / tl.maximum(size - ddof, 1.0)) + eps
        factor = tl.where(deviation > 0, 1.0 / deviation, 0.0)  # no spread and eps=0: what it multiplies is 0
    if MODE == _RLOO:
        factor = size / tl.maximum(size - 1.0, 1.0)
    if MODE == _BATCH:
        factor = factor * tl.load(SCALE)

    for j in range(0, longest, MEMBERS):
        reward, where, belongs, counts = _members(REWARDS, ORDER, VALID, first, length, j, MEMBERS)
        value = ((reward - base[:, None]) - mean[:, None]) * factor[:, None]
        tl.store(OUT + where, tl.where(counts, value, 0.0), mask=belongs)


def advantages(rewards: Tensor, group_ids: Tensor, mode: str, ddof: int, eps: float, valid: Tensor | None) -> Tensor:
    """See ``grouped_advantage``; nothing here waits for the device."""
    rewards = rewards.contiguous()
    ids, order = torch.sort(group_ids, stable=True)
    valid = None if valid is None else valid.bool().contiguous()
    scale = _batch_scale(rewards, ddof, eps, valid) if mode == "batch" else None
    out = torch.empty_like(rewards)
    with launching_on(rewards):
        grouped_advantage_kernel[(triton.cdiv(rewards.numel(), STARTS),)](
            rewards,
            ids,
            order,
            None if valid is None else valid.view(torch.uint8),
            scale,
            out,
            rewards.numel(),
            ddof=ddof,
            eps=eps,
            MODE=_MODES[mode],
            STARTS=STARTS,
            MEMBERS=MEMBERS,
        )
    return out


def _batch_scale(rewards: Tensor, ddof: int, eps: float, valid: Tensor | None) -> Tensor:
    """1 / (std + eps) of all usable rewards, float64[1] on their device."""
    usable = torch.isfinite(rewards) if valid is None else valid & torch.isfinite(rewards)
    kept = torch.where(usable, rewards.double(), 0.0)
    size = usable.sum()
    apart = torch.where(usable, kept - kept.sum() / size.clamp(min=1), 0.0)
    deviation = (apart.square().sum() / (size - ddof).clamp(min=1)).sqrt() + eps
    return torch.where(deviation > 0, 1 / deviation, 0.0).reshape(1)


KERNELS = [
    Specimen(
        kernel=grouped_advantage_kernel,
        arguments={
            "REWARDS": "*fp32",
            "IDS": "*i64",
            "ORDER": "*i64",
            "OUT": "*fp32",
            "rewards": "i32",
            **({"VALID": "*u8"} if masked else {}),
            **({"SCALE": "*fp64"} if mode == "batch" else {}),
        },
        constants={
            **({} if masked else {"VALID": None}),
            **({} if mode == "batch" else {"SCALE": None}),
            "ddof": 1,
            "eps": 1e-6,
            "MODE": _MODES[mode],
            "STARTS": STARTS,
            "MEMBERS": MEMBERS,
        },
        wide_loads=False,  # rewards are gathered
        label=mode,
    )
    for mode, masked in (("grpo", False), ("batch", True))
]

"""Grouped advantages: the whole cohort at once against a loop over groups and against scatter operations."""

from collections.abc import Callable

import torch
from measure import seconds
from torch import Tensor

from megarl_kernels import grouped_advantage

SAMPLES, GROUPS = 131_072, 8_192
TOLERANCE = 1e-9  # of float64 advantages, which are about 1


def ragged(samples: int, groups: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """0/1 rewards float64[R] and ids of ascending runs, of random lengths from 1."""
    g = torch.Generator().manual_seed(seed)
    cuts = torch.sort(torch.randperm(samples - 1, generator=g)[: groups - 1] + 1).values
    ids = torch.zeros(samples, dtype=torch.int64)
    ids[cuts] = 1
    return torch.randint(0, 2, (samples,), generator=g).double(), ids.cumsum(0)


def loop(rewards: Tensor, ids: Tensor) -> Tensor:
    """Group after group, each a slice: what the sorted ids allow a loop at best."""
    out = torch.zeros_like(rewards)
    start = 0
    for size in torch.unique_consecutive(ids, return_counts=True)[1].tolist():
        r = rewards[start : start + size]
        if size > 1 and r.max() > r.min():
            out[start : start + size] = (r - r.mean()) / (r.std() + 1e-6)
        start += size
    return out


def scatter(rewards: Tensor, ids: Tensor) -> Tensor:
    """Scatter operations over whatever ids there are, as ``grouped_advantage`` takes them."""
    names, index = torch.unique(ids, return_inverse=True)
    return scatter_numbered(rewards, index, len(names))


def scatter_numbered(rewards: Tensor, index: Tensor, groups: int) -> Tensor:
    """The same where somebody has already numbered the groups 0 .. G - 1."""
    zeros = rewards.new_zeros(groups)
    count = zeros.scatter_add(0, index, torch.ones_like(rewards))
    centred = rewards - (zeros.scatter_add(0, index, rewards) / count)[index]
    std = (zeros.scatter_add(0, index, centred.square()) / (count - 1).clamp(min=1)).sqrt()
    top = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    bottom = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    return torch.where((top == bottom)[index], 0.0, centred / (std[index] + 1e-6))


def run(device: torch.device, dry: bool) -> list[dict]:
    """One row per way of doing it, on (R, G); ``ratio`` is its time over that of ours on ascending ids."""
    samples, groups = (4_096, 256) if dry else (SAMPLES, GROUPS)
    rewards, ids = (x.to(device) for x in ragged(samples, groups))
    mixed = torch.randperm(samples, generator=torch.Generator().manual_seed(1)).to(device)
    mixed_rewards, mixed_ids = rewards[mixed], ids[mixed]
    want = loop(rewards.cpu(), ids.cpu()).to(device)
    ways: dict[str, tuple[Callable[[], Tensor], Tensor, int]] = {
        "ours": (lambda: grouped_advantage(rewards, ids), want, 20),
        "ours, interleaved": (lambda: grouped_advantage(mixed_rewards, mixed_ids), want[mixed], 20),
        "loop over groups": (lambda: loop(rewards, ids), want, 3),
        "scatter": (lambda: scatter(rewards, ids), want, 20),
        "scatter, interleaved": (lambda: scatter(mixed_rewards, mixed_ids), want[mixed], 20),
        "scatter, groups numbered": (lambda: scatter_numbered(rewards, ids, groups), want, 20),
    }
    rows = []
    for name, (call, expected, repeats) in ways.items():
        error = float((call() - expected).abs().max())
        row = {
            "shape": (samples, groups),
            "provider": name,
            "max_error": error,
            "ok": error <= TOLERANCE,
            "ms": 1e3 * seconds(call, device, 1 if dry else repeats),
        }
        rows.append(row | {"ratio": row["ms"] / rows[0]["ms"] if rows else 1.0})
    return rows

"""Checksums that two layouts of one tensor can be compared by, whichever way each of them has cut it.

fingerprint(T) = sum over elements i of bits(T[i]) * mix(i), modulo 2^64, where i is the element's place in the whole
tensor. Over disjoint boxes it adds up, so nobody needs a whole tensor; elements that have changed places change it.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from megarl.backends.exchange import region
from megarl.backends.shards.boxes import Box, sizes
from megarl.backends.shards.layout import Shard, View

MODULUS = 1 << 64
CHUNK = 1 << 22  # elements: what is widened to 64 bits at a time
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _SECOND = 0x9E3779B97F4A7C15 - MODULUS, 0xBF58476D1CE4E5B9 - MODULUS  # splitmix64's, as signed integers


class RefitMismatch(RuntimeError):
    """An engine does not hold what its policy holds; the message names tensors."""


@torch.no_grad()
def fingerprint(values: torch.Tensor, box: Box, shape: Sequence[int]) -> int:
    """Of the box of a tensor of that shape whose elements are ``values`` (of the box's shape)."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    rows = max(1, CHUNK // max(1, prod(sizes(box)[1:])))
    total = 0
    for first in range(0, values.shape[0], rows):
        part = values[first : first + rows].contiguous()
        index = torch.zeros((), dtype=torch.int64, device=values.device)
        for axis, ((start, _), stride) in enumerate(zip(box, strides, strict=True)):
            begin = start + (first if axis == 0 else 0)
            along = torch.arange(begin, begin + part.shape[axis], dtype=torch.int64, device=values.device) * stride
            index = index[..., None] + along
        total += int((part.view(_BITS[part.itemsize]).to(torch.int64) * _mix(index)).sum())
    return total % MODULUS


def _mix(index: torch.Tensor) -> torch.Tensor:
    """An odd number per place, in no simple relation to its neighbors'."""
    mixed = (index + 1) * _FIRST
    mixed = (mixed ^ (mixed >> 30)) * _SECOND
    return (mixed ^ (mixed >> 27)) | 1


def of_view(param: torch.Tensor, view: View, box: Box, shape: Sequence[int]) -> int:
    return fingerprint(region(param, view, sizes(box)), box, shape)


def stray(param: torch.Tensor, shards: Sequence[Shard]) -> int:
    """Elements of a parameter that belong to no tensor and are not zero."""
    owned = sum(int(region(param, s.view(s.box), sizes(s.box)).count_nonzero()) for s in shards)
    return int(param.count_nonzero()) - owned


def compare(
    expected: Sequence[Mapping[tuple[int, str], int]],
    found: Sequence[Mapping[str, int]],
    strays: Sequence[Mapping[str, int]],
) -> None:
    """Raise RefitMismatch, naming tensors and ranks, unless every engine rank holds what training ranks hold.

    ``expected``: per training rank (engine rank, tensor) -> fingerprint of what it holds of that; ``found`` and
    ``strays``: per engine rank tensor -> fingerprint, and parameter -> elements of no tensor that are not zero.
    """
    sums: dict[tuple[int, str], int] = {}
    for part in expected:
        for place, value in part.items():
            sums[place] = (sums.get(place, 0) + value) % MODULUS
    held = {(rank, name): value for rank, of_rank in enumerate(found) for name, value in of_rank.items()}
    places = sorted(sums.keys() | held.keys())
    wrong = [f"{name} at rank {rank}" for rank, name in places if sums.get((rank, name)) != held.get((rank, name))]
    wrong += [
        f"{count} elements of padding in {name} at rank {rank}"
        for rank, of_rank in enumerate(strays)
        for name, count in of_rank.items()
        if count
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise RefitMismatch(f"after the refit the engine does not hold the policy's {', '.join(wrong[:5])}{more}")

"""Checksums of parameters that add up over their regions, and what they say of an engine after a refit.

fingerprint = sum over elements i of bits(values[i]) * mix(place(i)), modulo 2^64, where place(i) is the element's
place in the whole parameter. Over disjoint regions it adds up, and zeros add nothing; elements that have changed places
change it.
"""

from collections.abc import Mapping, Sequence

import torch

MODULUS = 1 << 64
CHUNK = 1 << 19  # elements: what is widened to 64 bits at a time, in five arrays of 4 MiB
Prints = dict[str, dict[str, int]]  # parameter -> tensor -> fingerprint of the regions that it fills
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_FIRST, _SECOND = 0x9E3779B97F4A7C15 - MODULUS, 0xBF58476D1CE4E5B9 - MODULUS  # splitmix64's, as signed integers


class RefitMismatch(RuntimeError):
    """An engine does not hold what its policy holds; the message names tensors."""


@torch.no_grad()
def fingerprint(values: torch.Tensor, offset: int, strides: Sequence[int]) -> int:
    """Of the region of a parameter at ``offset`` with ``strides``, in elements, that holds ``values``."""
    if values.dim() == 0:
        values, strides = values[None], (1,)
    rows = max(1, CHUNK // max(1, values[0].numel()))
    total = 0
    for first in range(0, values.shape[0], rows):
        part = values[first : first + rows].contiguous()
        place = torch.full((), offset + first * strides[0], dtype=torch.int64, device=values.device)
        for size, stride in zip(part.shape, strides, strict=True):
            place = place[..., None] + torch.arange(size, dtype=torch.int64, device=values.device) * stride
        total += int((part.view(_BITS[part.itemsize]).to(torch.int64) * _mix(place)).sum())
    return total % MODULUS


def _mix(place: torch.Tensor) -> torch.Tensor:
    """An odd number per place, in no simple relation to its neighbors'."""
    mixed = (place + 1) * _FIRST
    mixed = (mixed ^ (mixed >> 30)) * _SECOND
    return (mixed ^ (mixed >> 27)) | 1


def faults(wholes: Mapping[str, int], held: Prints, loaded: Prints) -> list[str]:
    """What an engine rank does not hold as vLLM's own loaders would have it: names of tensors, or of padding.

    ``wholes``: of each of the rank's parameters; ``held``: of the regions where a plan put each tensor; ``loaded``: of
    the regions where the loaders put the tensors of the policy's export. The verdict rests on ``wholes`` and
    ``loaded`` alone, which no plan has a part in; ``held`` tells which tensor it is.
    """
    found = []
    for param in sorted(wholes.keys() | loaded.keys()):
        right, had = loaded.get(param, {}), held.get(param, {})
        if param in wholes and sum(right.values()) % MODULUS == wholes[param]:
            continue
        names = [tensor for tensor in sorted(right.keys() | had.keys()) if right.get(tensor) != had.get(tensor)]
        if wholes.get(param, 0) != sum(had.values()) % MODULUS:
            names.append(f"padding of {param}")
        found += names
    return found


def complain(by_rank: Sequence[Sequence[str]]) -> None:
    """Raise RefitMismatch where any engine rank has faults."""
    wrong = [f"{name} at rank {rank}" for rank, names in enumerate(by_rank) for name in names]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise RefitMismatch(f"after the refit the engine does not hold the policy's {', '.join(wrong[:5])}{more}")

"""Which rows of a packed microbatch a rank holds, and how attention finds its sequences in them (numpy and torch).

Axes: S sequences, T tokens of the pack on all context-parallel ranks, of which each holds T / cp.
"""

from dataclasses import dataclass, field

import numpy as np
import torch


def context_rows(cu_seqlens: np.ndarray, cp_size: int, cp_rank: int) -> np.ndarray:
    """int64[T / cp]: chunks r and 2 cp - 1 - r of each sequence's 2 cp, which gives every rank the same causal work.

    Example: one sequence of 8 tokens, cp=2: rank 0 holds 0 1 6 7, rank 1 holds 2 3 4 5.
    """
    starts, lengths = cu_seqlens[:-1].astype(np.int64), np.diff(cu_seqlens).astype(np.int64)
    if cp_size == 1:
        return np.arange(int(cu_seqlens[-1]))
    if np.any(lengths % (2 * cp_size)):
        raise ValueError(f"context parallelism over {cp_size} ranks needs sequence lengths divisible by {2 * cp_size}")
    chunk = lengths // (2 * cp_size)
    firsts = np.stack([starts + cp_rank * chunk, starts + (2 * cp_size - 1 - cp_rank) * chunk], axis=1).ravel()
    sizes = np.repeat(chunk, 2)
    return np.repeat(firsts, sizes) + _ranges(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Some sequences padded to one length. The padding stands behind every real token: a causal mask hides it."""

    sequences: int
    query_length: int
    key_length: int
    query_rows: torch.Tensor  # int64[n], of this rank's rows
    query_cells: torch.Tensor  # int64[n], into sequences * query_length
    key_rows: torch.Tensor  # int64[m], of the T rows in sequence order
    key_cells: torch.Tensor  # int64[m], into sequences * key_length
    at: (
        torch.Tensor | None
    )  # int64[sequences, query_length], of each query in its sequence; None: its place in the grid
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # made so far, by window

    def visible(self, window: int | None) -> torch.Tensor | None:
        """bool[sequences or 1, 1, query_length, key_length]: which keys a query sees, those of the last ``window``
        tokens, its own included. None: all up to its own, and the queries are in order.
        """
        narrow = window is not None and window < self.key_length
        return self.mask(window) if narrow or self.at is not None else None

    def mask(self, window: int | None) -> torch.Tensor:
        """As ``visible``, written out in every case."""
        if window not in self.masks:
            keys = torch.arange(self.key_length, device=self.query_rows.device)
            at = torch.arange(self.query_length, device=keys.device)[None] if self.at is None else self.at
            at = at[:, None, :, None]
            self.masks[window] = keys <= at if window is None else (keys <= at) & (keys > at - window)
        return self.masks[window]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How attention sees a pack, the same for every layer."""

    gather: torch.Tensor | None  # int64[T], rows all-gathered over cp -> sequence order; None: they are in order
    grids: tuple[Grid, ...]  # every sequence is in one

    @classmethod
    def of(cls, cu_seqlens: np.ndarray, cp_size: int, cp_rank: int, device: torch.device | str = "cpu") -> "Order":
        """The order of the pack with whole sequences ``cu_seqlens`` int[S + 1], for one context-parallel rank."""
        lengths = np.diff(cu_seqlens).astype(np.int64)
        held = context_rows(cu_seqlens, cp_size, cp_rank)
        position = held - np.repeat(cu_seqlens[:-1].astype(np.int64), lengths // cp_size)
        # lengths within a factor of two share a grid: little padding, few calls
        size_class = np.where(lengths > 0, np.log2(np.maximum(lengths, 1)).astype(np.int64), -1)
        grids = tuple(
            _grid(cu_seqlens, np.flatnonzero(size_class == c), cp_size, position, device)
            for c in np.unique(size_class[lengths > 0]).tolist()
        )
        if cp_size == 1:
            return cls(gather=None, grids=grids)
        gathered = np.concatenate([context_rows(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
        return cls(gather=torch.from_numpy(np.argsort(gathered)).to(device), grids=grids)


def _grid(
    cu_seqlens: np.ndarray, members: np.ndarray, cp_size: int, position: np.ndarray, device: torch.device | str
) -> Grid:
    starts = cu_seqlens[members].astype(np.int64)
    lengths = cu_seqlens[members + 1].astype(np.int64) - starts
    held = lengths // cp_size
    key_length, query_length = int(lengths.max()), int(held.max())
    query_rows, query_cells = _cells(starts // cp_size, held, query_length)
    key_rows, key_cells = _cells(starts, lengths, key_length)
    at = None
    if cp_size > 1:
        places = np.zeros(len(members) * query_length, np.int64)
        places[query_cells] = position[query_rows]
        at = torch.from_numpy(places.reshape(len(members), query_length)).to(device)
    rows = (torch.from_numpy(a).to(device) for a in (query_rows, query_cells, key_rows, key_cells))
    return Grid(
        sequences=len(members),
        query_length=query_length,
        key_length=key_length,
        **dict(zip(("query_rows", "query_cells", "key_rows", "key_cells"), rows, strict=True)),
        at=at,
    )


def _cells(starts: np.ndarray, lengths: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of sequences that begin at ``starts``, and their cells in a grid [sequences, longest]."""
    within = _ranges(lengths)
    return np.repeat(starts, lengths) + within, np.repeat(np.arange(len(lengths)) * longest, lengths) + within


def _ranges(sizes: np.ndarray) -> np.ndarray:
    """0 .. n - 1 for each n, end to end."""
    return np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)

"""Rows of context-parallel ranks and the grids of attention, against brute force."""

import itertools

import numpy as np
import pytest
import torch

from megarl.backends.megatron.order import Order, context_rows


def test_context_rows_by_hand():
    one = np.array([0, 8])
    assert context_rows(one, 2, 0).tolist() == [0, 1, 6, 7]
    assert context_rows(one, 2, 1).tolist() == [2, 3, 4, 5]
    two = np.array([0, 4, 12])
    assert context_rows(two, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert context_rows(two, 1, 0).tolist() == list(range(12))


def test_context_rows_cover_the_pack_once():
    cu = np.array([0, 12, 12, 36, 42])
    assert sorted(np.concatenate([context_rows(cu, 3, r) for r in range(3)]).tolist()) == list(range(42))


def test_indivisible_sequence_is_refused():
    with pytest.raises(ValueError, match="divisible by 4"):
        context_rows(np.array([0, 4, 10]), 2, 0)


@pytest.mark.parametrize("window", (None, 5, 12))
@pytest.mark.parametrize("cp", (1, 2, 4))
def test_grids_are_causal_attention_within_sequences(cp, window):
    """For every rank the (query, key) pairs that the grids admit are those of causal attention, each once."""
    cu = np.array([0, 8, 8, 40, 48, 64])
    wide = window or 64
    wanted = {
        (q, k) for a, b in itertools.pairwise(cu) for q in range(a, b) for k in range(max(a, q + 1 - wide), q + 1)
    }
    found: list[tuple[int, int]] = []
    for rank in range(cp):
        order, held = Order.of(cu, cp, rank), context_rows(cu, cp, rank)
        for grid in order.grids:
            queries = torch.full((grid.sequences * grid.query_length,), -1)
            queries[grid.query_cells] = torch.from_numpy(held)[grid.query_rows]
            keys = torch.full((grid.sequences * grid.key_length,), -1)
            keys[grid.key_cells] = grid.key_rows
            mask = grid.visible(window)
            if mask is None:
                mask = torch.ones(1, 1, grid.query_length, grid.key_length).tril().bool()
            mask = mask.expand(grid.sequences, -1, -1, -1)
            for s in range(grid.sequences):
                for i in range(grid.query_length):
                    for j in range(grid.key_length):
                        q = int(queries[s * grid.query_length + i])
                        k = int(keys[s * grid.key_length + j])
                        if mask[s, 0, i, j] and q >= 0:
                            found.append((q, k))
    assert len(found) == len(set(found)) and set(found) == wanted


def test_gather_restores_sequence_order():
    cu = np.array([0, 8, 24])
    gathered = torch.from_numpy(np.concatenate([context_rows(cu, 2, r) for r in range(2)]))
    gather = Order.of(cu, 2, 0).gather
    assert gather is not None and gathered[gather].tolist() == list(range(24))

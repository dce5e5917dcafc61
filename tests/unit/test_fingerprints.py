"""Fingerprints of parameters, whichever way they are cut, and the verdict over planted faults."""

import numpy as np
import pytest
import torch

from megarl.backends.fingerprints import MODULUS, RefitMismatch, complain, faults, fingerprint
from megarl.backends.shards.boxes import whole, without

SHAPE = (6, 10)
STRIDES = (10, 1)


def values(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


def of_box(tensor: torch.Tensor, box) -> int:
    """Of a box of the tensor at its place in it."""
    offset = sum(start * stride for (start, _), stride in zip(box, STRIDES, strict=True))
    return fingerprint(tensor[tuple(slice(*edge) for edge in box)], offset, STRIDES)


def mix(place: int) -> int:
    """In plain integers, signed shifts included."""

    def signed(x: int) -> int:
        x %= MODULUS
        return x - MODULUS if x >= MODULUS // 2 else x

    x = signed((place + 1) * 0x9E3779B97F4A7C15)
    x = signed((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9)
    return (x ^ (x >> 27)) | 1


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_by_hand(dtype):
    """In place and in the flat, with strides of another order, and of no axis at all."""
    tensor = values(dtype)
    bits = tensor.view(torch.int32 if dtype == torch.float32 else torch.int16).flatten().tolist()
    by_hand = sum(b * mix(i) for i, b in enumerate(bits)) % MODULUS
    assert fingerprint(tensor, 0, STRIDES) == fingerprint(tensor.flatten(), 0, (1,)) == by_hand
    assert fingerprint(tensor.T, 0, (1, 10)) == by_hand
    assert fingerprint(tensor[2, 3], 23, ()) == bits[23] * mix(23) % MODULUS


def test_parts_add_up_to_the_whole(monkeypatch):
    """Every way of cutting off a box; the second time in chunks of one row."""
    tensor = values()
    total = fingerprint(tensor, 0, STRIDES)
    random = np.random.default_rng(1)
    for chunk in (1 << 19, 4):
        monkeypatch.setattr("megarl.backends.fingerprints.CHUNK", chunk)
        for _ in range(40):
            box = tuple(tuple(sorted(random.choice(n + 1, 2, replace=False).tolist())) for n in SHAPE)
            boxes = [box, *without(whole(SHAPE), [box])]
            assert sum(of_box(tensor, b) for b in boxes) % MODULUS == total


@pytest.mark.parametrize("change", ("swapped rows", "transposed", "one bit", "zeroed", "negative zero"))
def test_any_change_shows(change):
    tensor = values()
    tensor[3, 3] = 0.0
    before = fingerprint(tensor, 0, STRIDES)
    other = tensor.clone()
    if change == "swapped rows":
        other[[1, 2]] = tensor[[2, 1]]
    elif change == "transposed":
        other = tensor.T.contiguous().view(SHAPE)
    elif change == "one bit":
        other.view(torch.int32)[5, 9] ^= 1
    elif change == "zeroed":
        other[0] = 0.0
    else:
        other[3, 3] = -0.0
    assert fingerprint(other, 0, STRIDES) != before
    assert fingerprint(tensor.clone(), 0, STRIDES) == before


def told() -> tuple[dict, dict, dict]:
    """A fused parameter of two tensors with a row of padding, and a norm: as sealed, and as loaded."""
    fused = values()
    fused[5] = 0.0
    parts = {"q": of_box(fused, ((0, 3), (0, 10))), "k": of_box(fused, ((3, 5), (0, 10)))}
    norm = fingerprint(torch.arange(10.0), 0, (1,))
    wholes = {"qk": fingerprint(fused, 0, STRIDES), "norm": norm}
    return wholes, {"qk": dict(parts), "norm": {"n": norm}}, {"qk": dict(parts), "norm": {"n": norm}}


def test_equal_is_without_fault():
    assert faults(*told()) == []
    complain([[], []])


def test_the_plans_own_parts_have_no_say():
    """Whatever a plan believes of where tensors are: what counts is what stands in the parameter."""
    wholes, held, loaded = told()
    held["qk"] = {"q": 1, "k": 2}
    assert faults(wholes, held, loaded) == []


@pytest.mark.parametrize(
    ("fault", "named"),
    (
        ("never loaded", ["n"]),
        ("other values", ["q"]),
        ("padded row", ["padding of qk"]),
        ("swapped by the plan", ["k", "q"]),
        ("no such parameter", ["m"]),
    ),
)
def test_a_fault_is_named(fault, named):
    wholes, held, loaded = told()
    if fault == "never loaded":
        loaded["norm"] = {}
    elif fault == "other values":
        wholes["qk"] += 1
        held["qk"]["q"] += 1
    elif fault == "padded row":
        wholes["qk"] += fingerprint(torch.ones(1), 55, (1,))
    elif fault == "swapped by the plan":
        swapped = values()[[3, 4, 0, 1, 2, 5]]
        wholes["qk"] = fingerprint(swapped[:5], 0, STRIDES)
        held["qk"] = {"q": of_box(swapped, ((0, 3), (0, 10))), "k": of_box(swapped, ((3, 5), (0, 10)))}
    else:
        loaded["other"] = {"m": 5}
    assert faults(wholes, held, loaded) == named


def test_the_message_names_ranks_and_is_bounded():
    with pytest.raises(RefitMismatch, match=r"hold the policy's a at rank 1, b at rank 1$"):
        complain([[], ["a", "b"]])
    with pytest.raises(RefitMismatch, match=r"g at rank 0 and 2 more$"):
        complain([["c", "d", "e", "f", "g", "h", "i"]])

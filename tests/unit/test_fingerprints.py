"""Fingerprints of tensors, whichever way they are cut, and what a verifier says of planted faults."""

import numpy as np
import pytest
import torch

from megarl.backends.fingerprints import MODULUS, RefitMismatch, compare, fingerprint, stray
from megarl.backends.shards.boxes import whole, without
from megarl.backends.shards.layout import Shard

SHAPE = (6, 10)
NAME = "model.layers.0.self_attn.q_proj.weight"


def values(dtype=torch.float32) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


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
    tensor = values(dtype)
    bits = tensor.view(torch.int32 if dtype == torch.float32 else torch.int16).flatten().tolist()
    assert fingerprint(tensor, whole(SHAPE), SHAPE) == sum(b * mix(i) for i, b in enumerate(bits)) % MODULUS


def test_parts_add_up_to_the_whole(monkeypatch):
    """Every way of cutting off a box; the second time in chunks of one row."""
    tensor = values()
    total = fingerprint(tensor, whole(SHAPE), SHAPE)
    random = np.random.default_rng(1)
    for chunk in (1 << 22, 4):
        monkeypatch.setattr("megarl.backends.fingerprints.CHUNK", chunk)
        for _ in range(40):
            box = tuple(tuple(sorted(random.choice(n + 1, 2, replace=False).tolist())) for n in SHAPE)
            boxes = [box, *without(whole(SHAPE), [box])]
            cut = [fingerprint(tensor[tuple(slice(*e) for e in b)], b, SHAPE) for b in boxes]
            assert sum(cut) % MODULUS == total


@pytest.mark.parametrize("change", ("swapped rows", "transposed", "one bit", "zeroed", "negative zero"))
def test_any_change_shows(change):
    tensor = values()
    tensor[3, 3] = 0.0
    before = fingerprint(tensor, whole(SHAPE), SHAPE)
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
    assert fingerprint(other, whole(SHAPE), SHAPE) != before
    assert fingerprint(tensor.clone(), whole(SHAPE), SHAPE) == before


def told() -> tuple[list[dict], list[dict], list[dict]]:
    """Two training ranks with the halves of a matrix and a norm each, two engine ranks with other halves of it."""
    tensor, norm = values(), torch.arange(10.0)
    box = lambda a, b, c, d: ((a, b), (c, d))  # noqa: E731
    part = lambda b: fingerprint(tensor[tuple(slice(*e) for e in b)], b, SHAPE)  # noqa: E731
    whole_norm = fingerprint(norm, ((0, 10),), (10,))
    expected = [
        {(0, NAME): part(box(0, 3, 0, 5)), (1, NAME): part(box(0, 3, 5, 10)), (0, "norm"): whole_norm},
        {(0, NAME): part(box(3, 6, 0, 5)), (1, NAME): part(box(3, 6, 5, 10)), (1, "norm"): whole_norm},
    ]
    found = [
        {NAME: part(box(0, 6, 0, 5)), "norm": whole_norm},
        {NAME: part(box(0, 6, 5, 10)), "norm": whole_norm},
    ]
    return expected, found, [{"embed": 0}, {"embed": 0}]


def test_layouts_that_cut_otherwise_agree():
    compare(*told())


@pytest.mark.parametrize(
    ("fault", "message"),
    (
        ("missing norm", r"policy's norm at rank 1$"),
        ("other values", rf"policy's {NAME} at rank 0$"),
        ("padded row", r"policy's 3 elements of padding in embed at rank 1$"),
        ("never sent", rf"policy's {NAME} at rank 0, {NAME} at rank 1$"),
    ),
)
def test_a_fault_is_named(fault, message):
    expected, found, strays = told()
    if fault == "missing norm":
        del found[1]["norm"]
    elif fault == "other values":
        found[0][NAME] += 1
    elif fault == "padded row":
        strays[1]["embed"] = 3
    else:
        del expected[1][0, NAME], expected[1][1, NAME]
    with pytest.raises(RefitMismatch, match=message):
        compare(expected, found, strays)


def test_padding_that_is_not_zero_is_counted():
    param = torch.zeros(8, 10)
    param[:6] = values()
    shard = Shard(NAME, whole(SHAPE), "p", 0, (10, 1))
    assert stray(param, [shard]) == 0
    param[6, 2:5] = 1.0
    assert stray(param, [shard]) == 3

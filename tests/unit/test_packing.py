import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl import packing
from tests.unit.records import rollout, sample


def test_minibatches_are_even_and_lose_nothing():
    parts = packing.minibatches([sample(i) for i in range(10)], 4)
    assert [[s.key.index for s in p] for p in parts] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert [len(p) for p in packing.minibatches([sample(0)], 3)] == [1, 0, 0]
    with pytest.raises(ValueError, match="updates=0"):
        packing.minibatches([], 0)


def test_mask_is_by_position_where_the_end_token_is_the_padding_token():
    # case-C11: ids 5 6 2, then padding that equals the end token 2; the rollout carries what was sampled
    r = rollout(response=(5, 6, 2), prompt=(2, 2))
    assert packing.response_mask(r).tolist() == [False, False, True, True, True]
    [s] = packing.from_rollouts([r])
    assert packing.response_tokens([s]) == 3
    [[m]] = packing.pack([s], dp=1, tokens_per_microbatch=16, total_multiple=8)
    assert m.mask.tolist() == [False, True, True, True, False, False, False, False]


def test_shift_by_hand():
    s = dataclasses.replace(
        sample(0, prompt=2, response=2),
        token_ids=np.array([10, 11, 12, 13], np.int32),
        rollout_logprobs=np.array([0, 0, -1, -2], np.float32),
        policy_logprobs=np.array([0, 0, -3, -4], np.float32),
        advantage=0.5,
    )
    [[m]] = packing.pack([s], dp=1, tokens_per_microbatch=12, sequence_multiple=3, total_multiple=12)
    assert m.token_ids.tolist() == [10, 11, 12, 13] + [0] * 8
    assert m.labels.tolist() == [11, 12, 13] + [0] * 9
    assert m.mask.tolist() == [False, True, True] + [False] * 9
    assert m.rollout_logprobs.tolist() == [0, -1, -2] + [0] * 9
    assert m.policy_logprobs.tolist() == [0, -3, -4] + [0] * 9
    assert m.reference_logprobs is None
    assert m.positions.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert m.sequence_ids.tolist() == [0] * 6 + [1] * 6
    assert m.cu_seqlens.tolist() == [0, 6, 12]
    assert m.sample_index.tolist() == [0, packing.PADDING]
    assert m.sequence_tokens.tolist() == [2, 0]
    assert m.advantages.tolist() == [0.5, 0]


def test_every_rank_gets_the_same_number_of_microbatches():
    # case-F7: two long samples fill two microbatches of one rank, three short ones the other's
    samples = [sample(i, response=n) for i, n in enumerate([998, 998, 8, 8, 8])]
    ranks = packing.pack(samples, dp=2, tokens_per_microbatch=1000)
    assert len({len(r) for r in ranks}) == 1
    ranks = packing.pack([sample(0)], dp=3, tokens_per_microbatch=64, sequence_multiple=2, total_multiple=4)
    assert [len(r) for r in ranks] == [1, 1, 1]
    empty = ranks[2][0]
    assert empty.sample_index.tolist() == [packing.PADDING] and not empty.mask.any() and empty.tokens == 4


def test_nothing_is_dropped_where_counts_do_not_divide():
    # case-B9: 10 samples, 4 ranks
    ranks = packing.pack([sample(i) for i in range(10)], dp=4, tokens_per_microbatch=10)
    found = sorted(i for r in ranks for m in r for i in m.sample_index.tolist() if i != packing.PADDING)
    assert found == list(range(10))
    assert sum(int(m.mask.sum()) for r in ranks for m in r) == 30


def test_no_samples_give_no_microbatches():
    assert packing.pack([], dp=2, tokens_per_microbatch=8) == [[], []]


def test_errors_name_the_sample_and_what_would_be_right():
    with pytest.raises(ValueError, match=r"index=3.*22 tokens.*24 padded.*budget|index=3.*tokens_per_microbatch=20"):
        packing.pack([sample(3, response=20)], dp=1, tokens_per_microbatch=20, sequence_multiple=4, total_multiple=4)
    with pytest.raises(ValueError, match="nothing predicts it"):
        packing.pack([sample(0, prompt=0)], dp=1, tokens_per_microbatch=20)
    with pytest.raises(ValueError, match="reference_logprobs"):
        packing.pack([sample(0), sample(1, reference=True)], dp=1, tokens_per_microbatch=20)
    with pytest.raises(ValueError, match="no multiple"):
        packing.pack([], dp=1, tokens_per_microbatch=20, sequence_multiple=4, total_multiple=6)


def test_num_sequences_leaves_out_masked_members():
    masked = dataclasses.replace(sample(1), mask=np.zeros(5, bool))
    assert packing.num_sequences([sample(0), masked]) == 1
    assert packing.response_tokens([sample(0), masked]) == 3


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), max_size=25),
    dp=st.integers(1, 5),
    sequence_multiple=st.sampled_from([1, 2, 4]),
    factor=st.sampled_from([1, 2, 3]),
    slack=st.integers(0, 40),
)
def test_packing_invariants(shapes, dp, sequence_multiple, factor, slack):
    samples = [sample(i, prompt=p, response=r, advantage=i / 7, reference=True) for i, (p, r) in enumerate(shapes)]
    total_multiple = sequence_multiple * factor
    budget = 40 + slack
    options = dict(
        dp=dp, tokens_per_microbatch=budget, sequence_multiple=sequence_multiple, total_multiple=total_multiple
    )
    ranks = packing.pack(samples, **options)
    again = packing.pack(samples, **options)
    assert len(ranks) == dp and len({len(r) for r in ranks}) == 1
    flat = [m for r in ranks for m in r]
    for m, n in zip(flat, [m for r in again for m in r], strict=True):
        assert all(np.array_equal(getattr(m, f), getattr(n, f)) for f in m.__slots__)
        assert m.tokens <= budget and m.tokens % total_multiple == 0 and m.cu_seqlens[-1] == m.tokens
        assert not (np.diff(m.cu_seqlens) % sequence_multiple).any()
        ends = m.cu_seqlens[1:] - 1
        assert not m.mask[ends].any() and not m.labels[ends].any()
        assert np.array_equal(m.positions, np.arange(m.tokens) - m.cu_seqlens[m.sequence_ids])

    # what a token is and what is said of it come back, in order
    for field in ("token_ids", "rollout_logprobs", "policy_logprobs", "reference_logprobs"):
        values = [m.labels if field == "token_ids" else getattr(m, field) for m in flat]
        back = packing.unpack(flat, values)
        assert sorted(back) == list(range(len(samples)))
        for i, s in enumerate(samples):
            assert np.array_equal(back[i], getattr(s, field)[s.mask].astype(np.float32))
    advantage = {int(i): a for m in flat for i, a in zip(m.sample_index, m.advantages, strict=True)}
    assert all(advantage[i] == np.float32(s.advantage) for i, s in enumerate(samples))


def test_balance():
    rng = np.random.default_rng(0)
    samples = [sample(i, response=int(n)) for i, n in enumerate(rng.integers(1, 100, 400))]
    ranks = packing.pack(samples, dp=4, tokens_per_microbatch=1000)
    loads = [sum(m.tokens for m in r) for r in ranks]
    assert max(loads) - min(loads) <= 4
    assert len(ranks[0]) <= -(-max(loads) // 1000) + 1

"""Samples -> data-parallel shards -> packed microbatches, and back. Pads, never drops; numpy only.

The denominators of a loss come from ``response_tokens(samples)`` and ``num_sequences(samples)`` of the *whole*
optimizer step, taken before packing: then neither microbatch size nor data-parallel size nor packing changes the loss.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from megarl.types import Microbatch, Rollout, Sample

PADDING = -1  # sample_index of a padding sequence


def response_tokens(samples: Sequence[Sample]) -> int:
    """Response tokens that train: the denominator of a token mean."""
    return sum(int(s.mask.sum()) for s in samples)


def num_sequences(samples: Sequence[Sample]) -> int:
    """Samples with at least one token that trains: the denominator of a sequence mean."""
    return sum(bool(s.mask.any()) for s in samples)


def minibatches(samples: Sequence[Sample], updates: int) -> list[list[Sample]]:
    """Exactly ``updates`` runs of neighbouring samples whose sizes differ by one at most, larger ones first.

    With fewer samples than updates the last ones are empty.
    """
    if updates < 1:
        raise ValueError(f"updates={updates}: at least 1")
    size, larger = divmod(len(samples), updates)
    ends = [size * (i + 1) + min(i + 1, larger) for i in range(updates)]
    return [list(samples[a:b]) for a, b in zip([0, *ends[:-1]], ends, strict=True)]


def from_rollouts(rollouts: Sequence[Rollout]) -> list[Sample]:
    """Samples for measuring: in rollout order, policy logprobs 0 (not known yet), advantage 0."""
    return [
        Sample(
            key=r.key,
            token_ids=np.concatenate([r.prompt_ids, r.token_ids]).astype(np.int32),
            mask=response_mask(r),
            rollout_logprobs=at_response(r, r.logprobs),
            policy_logprobs=np.zeros(len(r.prompt_ids) + len(r.token_ids), np.float32),
        )
        for r in rollouts
    ]


def response_mask(rollout: Rollout) -> np.ndarray:
    """bool[L], true at response tokens. By position: a mask by token value would drop a real end token that is
    the padding token too."""
    return np.repeat([False, True], [len(rollout.prompt_ids), len(rollout.token_ids)])


def at_response(rollout: Rollout, values: np.ndarray) -> np.ndarray:
    """float32[L] with the response tokens' values float32[Lc] at their places and 0 at the prompt."""
    if len(values) != len(rollout.token_ids):
        raise ValueError(f"{rollout.key}: {len(values)} values for {len(rollout.token_ids)} response tokens")
    return np.concatenate([np.zeros(len(rollout.prompt_ids)), values]).astype(np.float32)


def pack(
    samples: Sequence[Sample],
    *,
    dp: int,
    tokens_per_microbatch: int,
    sequence_multiple: int = 1,
    total_multiple: int = 1,
) -> list[list[Microbatch]]:
    """[dp rank][microbatch]; the same number of microbatches on every rank, balanced by tokens, deterministic.

    Every sequence is padded to ``sequence_multiple`` inside its own stretch, every microbatch to ``total_multiple`` by
    a padding sequence; a rank with too few samples gets microbatches of padding alone. No sample fits into less than
    one microbatch: one that is longer than the budget raises. No samples: no microbatches.
    """
    if total_multiple % sequence_multiple:
        raise ValueError(f"total_multiple={total_multiple} is no multiple of sequence_multiple={sequence_multiple}")
    budget = tokens_per_microbatch // total_multiple * total_multiple
    lengths = [_padded(len(s.token_ids), sequence_multiple) for s in samples]
    for sample, length in zip(samples, lengths, strict=True):
        _check(sample, length, budget, tokens_per_microbatch)
    if len({s.reference_logprobs is None for s in samples}) > 1:
        raise ValueError("some samples have reference_logprobs and some have none")

    shards = _spread(range(len(samples)), lengths, dp)
    count = max(-(-sum(lengths[i] for i in shard) // budget) if shard else 0 for shard in shards)
    while True:
        packed = [_spread(shard, lengths, count) for shard in shards]
        if all(sum(lengths[i] for i in indices) <= budget for rank in packed for indices in rank):
            break
        count += 1  # ends: with as many microbatches as samples each stands alone

    with_reference = bool(samples) and samples[0].reference_logprobs is not None
    return [
        [_lay(samples, indices, lengths, total_multiple, with_reference) for indices in _real_first(rank)]
        for rank in packed
    ]


def unpack(microbatches: Sequence[Microbatch], values: Sequence[np.ndarray]) -> dict[int, np.ndarray]:
    """sample index -> float32[Lc], the values[T] of each microbatch at that sample's response tokens, in order."""
    out: dict[int, np.ndarray] = {}
    for microbatch, value in zip(microbatches, values, strict=True):
        if value.shape != microbatch.mask.shape:
            raise ValueError(f"values{list(value.shape)} for a microbatch of {microbatch.tokens} tokens")
        for s, sample in enumerate(microbatch.sample_index.tolist()):
            if sample != PADDING:
                here = slice(microbatch.cu_seqlens[s], microbatch.cu_seqlens[s + 1])
                out[sample] = value[here][microbatch.mask[here]].astype(np.float32)
    return out


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _check(sample: Sample, padded: int, budget: int, configured: int) -> None:
    if padded > budget:
        raise ValueError(
            f"{sample.key}: {len(sample.token_ids)} tokens ({padded} padded) do not fit into a microbatch of {budget} "
            f"tokens (batch.tokens_per_microbatch={configured}): raise it or lower sampling.max_tokens"
        )
    if len(sample.token_ids) == 0 or sample.mask[0]:
        raise ValueError(f"{sample.key}: no prompt token stands before the response, so nothing predicts it")


def _spread(indices: Sequence[int], lengths: Sequence[int], bins: int) -> list[list[int]]:
    """``bins`` lists of indices, each ascending, filled longest first into the emptiest (lowest-numbered) one."""
    out: list[list[int]] = [[] for _ in range(bins)]
    loads = [(0, b) for b in range(bins)]
    for i in sorted(indices, key=lambda i: (-lengths[i], i)):
        load, b = loads[0]
        out[b].append(i)
        heapq.heapreplace(loads, (load + lengths[i], b))
    return [sorted(b) for b in out]


def _real_first(bins: list[list[int]]) -> list[list[int]]:
    return sorted(bins, key=lambda b: (not b, b))


def _lay(
    samples: Sequence[Sample], indices: Sequence[int], lengths: Sequence[int], total_multiple: int, reference: bool
) -> Microbatch:
    widths = [lengths[i] for i in indices]
    total = max(_padded(sum(widths), total_multiple), total_multiple)
    sample_index = list(indices)
    if total > sum(widths):
        widths.append(total - sum(widths))
        sample_index.append(PADDING)
    starts = np.concatenate([[0], np.cumsum(widths)]).astype(np.int32)

    token_ids, labels = np.zeros(total, np.int64), np.zeros(total, np.int64)
    mask = np.zeros(total, bool)
    logprobs = {name: np.zeros(total, np.float32) for name in ("rollout", "policy", "reference")}
    for start, i in zip(starts.tolist(), indices, strict=False):  # starts has the end and the padding's too
        s = samples[i]
        token_ids[start : start + len(s.token_ids)] = s.token_ids
        predicting = slice(start, start + len(s.token_ids) - 1)
        labels[predicting] = s.token_ids[1:]
        mask[predicting] = s.mask[1:]
        logprobs["rollout"][predicting] = s.rollout_logprobs[1:]
        logprobs["policy"][predicting] = s.policy_logprobs[1:]
        if s.reference_logprobs is not None:
            logprobs["reference"][predicting] = s.reference_logprobs[1:]

    real = [samples[i] for i in indices]
    pad = [0] * (len(sample_index) - len(real))
    return Microbatch(
        token_ids=token_ids,
        labels=labels,
        positions=np.concatenate([np.arange(w) for w in widths]).astype(np.int64),
        mask=mask,
        sequence_ids=np.repeat(np.arange(len(widths)), widths).astype(np.int64),
        rollout_logprobs=logprobs["rollout"],
        policy_logprobs=logprobs["policy"],
        reference_logprobs=logprobs["reference"] if reference else None,
        advantages=np.array([s.advantage for s in real] + pad, np.float32),
        sequence_tokens=np.array([int(s.mask.sum()) for s in real] + pad, np.int64),
        sample_index=np.array(sample_index, np.int64),
        cu_seqlens=starts,
    )

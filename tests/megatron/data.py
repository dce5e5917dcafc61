"""Random rollouts and samples, and what transformers says of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl import packing
from megarl.backends.megatron.policy import MegatronPolicy
from megarl.settings import BatchConfig, LossConfig
from megarl.types import Metrics, Prompt, Rollout, RolloutKey, Sample, TokenStats


def rollouts(count: int = 12, vocabulary: int = 128, seed: int = 0, longest: int = 24) -> list[Rollout]:
    """Random prompts of 1-15 tokens, each with one response of 1 to ``longest`` tokens."""
    random = np.random.default_rng(seed)
    made = []
    for i in range(count):
        length = int(random.integers(1, longest + 1))
        made.append(
            Rollout(
                prompt=Prompt(agent="a", uid=str(i), role="solve", messages=(), n=1),
                index=0,
                prompt_ids=random.integers(0, vocabulary, int(random.integers(1, 16))).astype(np.int32),
                token_ids=random.integers(0, vocabulary, length).astype(np.int32),
                logprobs=np.full(length, -3.0, np.float32),
                text="",
                stop="end",
                version=0,
            )
        )
    return made


def samples(
    seen: Sequence[Rollout], stats: Mapping[RolloutKey, TokenStats], seed: int = 0, reference: bool = False
) -> list[Sample]:
    """Training samples: the measured logprobs moved by noise, so that ratios and importance weights are not 1."""
    random = np.random.default_rng(seed)
    made = []
    for base, r in zip(packing.from_rollouts(seen), seen, strict=True):
        noise = random.normal(0, 0.2, (2, len(r.token_ids))).astype(np.float32)
        measured = stats[r.key]
        made.append(
            Sample(
                key=base.key,
                token_ids=base.token_ids,
                mask=base.mask,
                rollout_logprobs=packing.at_response(r, measured.logprobs + noise[0]),
                policy_logprobs=packing.at_response(r, measured.logprobs + noise[1]),
                reference_logprobs=packing.at_response(r, measured.reference) if reference else None,
                advantage=float(random.normal()),
            )
        )
    return made


def train(
    policy: MegatronPolicy, batch: Sequence[Sample], lr: float, updates: int = 3, tokens: int = 128
) -> list[Metrics]:
    """The metrics of ``updates`` updates on one batch."""
    cfg = BatchConfig(tokens_per_microbatch=tokens)
    return [policy.update(batch, LossConfig(), cfg, [lr]) for _ in range(updates)]


def weights(policy: MegatronPolicy, bucket_bytes: int = 1 << 30) -> dict[str, torch.Tensor]:
    """All exported weights; a name that comes twice fails."""
    found: dict[str, torch.Tensor] = {}
    for bucket in policy.weights(bucket_bytes):
        part = load_file(bucket.path)
        assert tuple(sorted(part)) == tuple(sorted(bucket.names)) and not found.keys() & part.keys()
        assert sum(t.nbytes for t in part.values()) == bucket.nbytes
        found |= part
    return found


def transformers_stats(model: Path, seen: Sequence[Rollout], temperature: float) -> dict[RolloutKey, TokenStats]:
    """The same statistics by transformers, one unpadded sequence at a time, in float64 after the logits."""
    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")  # capped
    found = {}
    for r in seen:
        ids = torch.from_numpy(np.concatenate([r.prompt_ids, r.token_ids])).long()
        with torch.no_grad():
            logits = net(ids[None]).logits[0, len(r.prompt_ids) - 1 : -1].double() / temperature
        logp = torch.log_softmax(logits, -1)
        found[r.key] = TokenStats(
            logprobs=logp.gather(-1, ids[len(r.prompt_ids) :, None])[:, 0].float().numpy(),
            entropy=-(logp.exp() * logp).sum(-1).float().numpy(),
            certainty=(-logp.mean(-1) - np.log(logp.shape[-1])).float().numpy(),
        )
    return found


def worst(a: Mapping, b: Mapping) -> float:
    """Largest absolute difference between two sets of tensors, or of statistics, under the same keys."""
    assert a.keys() == b.keys()
    return max(_difference(a[key], b[key]) for key in a)


def _difference(a: torch.Tensor | TokenStats, b: torch.Tensor | TokenStats) -> float:
    if isinstance(a, torch.Tensor):
        return float((a.double() - b.double()).abs().max())
    pairs = [(getattr(a, n), getattr(b, n)) for n in ("logprobs", "entropy", "certainty", "reference")]
    return max(float(np.abs(x - y).max()) for x, y in pairs if x is not None and y is not None)

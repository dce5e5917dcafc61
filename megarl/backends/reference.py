"""Policy and engine over transformers, in one process on CPU: the oracle of the parity tests and a laptop's fallback.

Axes: R rollouts of a batch, V vocabulary, Lp prompt tokens, Lc response tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import batched

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from megarl.backends.phase import EnginePhase
from megarl.backends.protocols import WeightBucket
from megarl.chat import Chat
from megarl.settings import AgentConfig, SamplingConfig
from megarl.types import Prompt, Rollout, RolloutKey, Seed

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(slots=True, kw_only=True)
class _Sampling:
    """One rollout in the making."""

    prompt: Prompt
    index: int
    prompt_ids: np.ndarray  # int32[Lp]
    uniforms: Tensor  # float64[limit]: one number per token decides which is drawn
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False

    @property
    def open(self) -> bool:
        return not self.ended and len(self.tokens) < len(self.uniforms)


class ReferenceEngine:
    """Batched sampling with a KV cache. Rounding apart, a rollout does not depend on what else is in its batch."""

    def __init__(self, agent: AgentConfig, chat: Chat) -> None:
        self.version = -1
        self._chat = chat
        self._stream = None if agent.seed is None else str(agent.seed)
        self._max_sequences = agent.engine.max_sequences
        self._model = _empty_model(agent)
        self._max_positions: int = self._model.config.max_position_embeddings
        self._weights = dict(self._model.named_parameters())  # tied ones once
        self._missing: set[str] = set()
        self._phase = EnginePhase()

    @torch.no_grad()
    def generate(self, prompts: Sequence[Prompt], seed: Seed, sampling: SamplingConfig) -> list[Rollout]:
        """See Engine. A response ends at the model's last position at the latest."""
        self._phase.check_can_generate()
        started = [self._start(p, i, seed, sampling) for p in prompts for i in range(p.n)]
        for batch in batched(started, self._max_sequences):
            self._sample(batch, sampling)
        return [self._finish(one) for one in started]

    def _start(self, prompt: Prompt, index: int, seed: Seed, sampling: SamplingConfig) -> _Sampling:
        prompt_ids = self._chat.render(prompt.messages)
        room = self._max_positions - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"prompt {prompt.uid} of {prompt.agent} has {len(prompt_ids)} tokens, its model {self._max_positions} "
                "positions: lower data.max_prompt_tokens"
            )
        key = RolloutKey(prompt.agent, prompt.uid, prompt.role, prompt.parent, index)
        random = torch.Generator().manual_seed(seed.sample(key, self._stream))
        uniforms = torch.rand(min(sampling.max_tokens, room), generator=random, dtype=torch.float64)
        return _Sampling(prompt=prompt, index=index, prompt_ids=prompt_ids, uniforms=uniforms)

    def _sample(self, batch: Sequence[_Sampling], sampling: SamplingConfig) -> None:
        """Run the batch until every response has ended; rows that ended leave it."""
        stop_ids = set(self._chat.stop_ids)
        rows = list(batch)
        cache = DynamicCache(config=self._model.config)
        logits, mask = self._prefill(rows, cache)
        while True:
            draws = torch.stack([one.uniforms[len(one.tokens)] for one in rows])
            tokens, logprobs = draw(logits, draws, sampling)
            for one, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
                one.tokens.append(token)
                one.logprobs.append(logprob)
                one.ended = token in stop_ids
            kept = torch.tensor([i for i, one in enumerate(rows) if one.open], dtype=torch.int64)
            if not len(kept):
                return
            if len(kept) < len(rows):
                rows = [rows[i] for i in kept.tolist()]
                cache.batch_select_indices(kept)
            mask = torch.cat([mask[kept], torch.ones(len(kept), 1, dtype=mask.dtype)], dim=1)
            logits = self._step(tokens[kept, None], mask, cache)

    def _prefill(self, rows: Sequence[_Sampling], cache: DynamicCache) -> tuple[Tensor, Tensor]:
        """Logits[R, V] after the prompts and the mask[R, L] of their left padding; equal prompts run once."""
        ids: dict[bytes, np.ndarray] = {one.prompt_ids.tobytes(): one.prompt_ids for one in rows}
        place = {key: i for i, key in enumerate(ids)}
        width = max(len(a) for a in ids.values())
        tokens = torch.zeros(len(ids), width, dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for i, a in enumerate(ids.values()):
            tokens[i, width - len(a) :] = torch.from_numpy(a.astype(np.int64))
            mask[i, width - len(a) :] = 1
        logits = self._step(tokens, mask, cache)
        row_of = torch.tensor([place[one.prompt_ids.tobytes()] for one in rows])
        cache.batch_select_indices(row_of)
        return logits[row_of], mask[row_of]

    def _step(self, tokens: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Logits[R, V] after the last of tokens[R, n]; the mask covers the cached ones too."""
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def _finish(self, one: _Sampling) -> Rollout:
        token_ids = np.array(one.tokens, dtype=np.int32)
        return Rollout(
            prompt=one.prompt,
            index=one.index,
            prompt_ids=one.prompt_ids,
            token_ids=token_ids,
            logprobs=np.array(one.logprobs, dtype=np.float32),
            text=self._chat.decode(token_ids),
            stop="end" if one.ended else "length",
            version=self.version,
        )

    def begin_refit(self) -> None:
        self._phase.begin_refit()
        self._missing = set(self._weights)

    @torch.no_grad()
    def load_weights(self, bucket: WeightBucket) -> None:
        self._phase.check_refitting()
        for name, tensor in load_file(bucket.path).items():
            own = self._weights.get(name)
            if own is None:
                raise ValueError(f"refit: the engine's model has no weight named {name}")
            if own.shape != tensor.shape:
                raise ValueError(f"refit: {name} has shape {list(tensor.shape)}, the engine wants {list(own.shape)}")
            own.copy_(tensor)
            self._missing.discard(name)

    def finish_refit(self, version: int) -> None:
        self._phase.check_refitting()
        if self._missing:
            some = ", ".join(sorted(self._missing)[:5])
            raise ValueError(f"refit: {len(self._missing)} of {len(self._weights)} weights did not come: {some} ...")
        self._phase.finish_refit()
        self.version = version

    def wake(self) -> None:
        self._phase.wake()

    def sleep(self) -> None:
        self._phase.sleep()

    def close(self) -> None:
        self._weights = {}
        del self._model


def draw(logits: Tensor, uniforms: Tensor, sampling: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Token ids int64[R] drawn from logits[R, V], and their logprobs float32[R] under the distribution drawn from.

    By inversion: the first token whose cumulated probability exceeds uniforms[R], float64 in [0, 1).
    """
    z = logits.float() / sampling.temperature
    if sampling.top_k:
        least = z.topk(min(sampling.top_k, z.shape[1])).values[:, -1:]
        z = z.masked_fill(z < least, -torch.inf)
    if sampling.top_p < 1:
        p, order = z.softmax(dim=-1).sort(dim=-1, descending=True)
        beyond = p.cumsum(dim=-1) - p >= sampling.top_p
        z = z.masked_fill(torch.zeros_like(beyond).scatter_(1, order, beyond), -torch.inf)
    logprobs = z.log_softmax(dim=-1)
    below = logprobs.double().exp().cumsum(dim=-1)
    total = below[:, -1:]
    # never as far as the total: what lies there has probability 0
    mark = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(below, mark, right=True)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _empty_model(agent: AgentConfig) -> PreTrainedModel:
    """The agent's architecture with weights that mean nothing; no code of the model's is run."""
    with torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(agent.model), dtype=DTYPES[agent.dtype])
    return model.eval()

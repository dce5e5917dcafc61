"""Policy and engine over transformers, in one process on CPU: the oracle of the parity tests and a laptop's fallback.

Axes: T packed tokens, M of them with mask, S sequences, R rollouts of a batch, V vocabulary, Lp prompt tokens, Lc
response tokens.
"""

import json
import math
import threading
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from itertools import batched
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from megarl.backends.buckets import write_buckets
from megarl.backends.phase import EnginePhase
from megarl.backends.protocols import WeightBucket
from megarl.backends.updates import take_steps
from megarl.backends.vocabulary import check_prompt, check_rollouts
from megarl.chat import Chat
from megarl.loss import TokenBatch, pg_loss, summarize
from megarl.packing import from_rollouts, num_sequences, pack, response_tokens, unpack
from megarl.settings import AgentConfig, BatchConfig, LossConfig, OptimizerConfig, SamplingConfig
from megarl.types import Metrics, Microbatch, Need, Prompt, Rollout, RolloutKey, Sample, Seed, TokenStats

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# transformers swaps PreTrainedModel.tie_weights out, for the whole process, while it loads a model: two that load at
# once leave a random head behind in every tied model made from then on
_MAKING_A_MODEL = threading.Lock()


class ReferencePolicy:
    """A transformers model, its Adam or SGD, and the frozen initial weights where ``kl_coef`` asks for them.

    In bfloat16 the optimizer works on float32 master weights, as Megatron's does.
    """

    def __init__(
        self, agent: AgentConfig, *, temperature: float, kl_coef: float = 0.0, tokens_per_microbatch: int = 16384
    ) -> None:
        self.version = 0
        self._temperature = temperature
        self._tokens_per_microbatch = tokens_per_microbatch  # of measure; update is told
        self._clip_grad = agent.optimizer.clip_grad
        self._model = _load_model(agent)
        self._reference = _load_model(agent).requires_grad_(False) if kl_coef > 0 else None
        _check_head(self._model, agent.model)
        self._vocab_size = _head(self._model).weight.shape[0]
        self._weights = dict(self._model.named_parameters())  # tied ones once
        self._masters = {
            name: w if w.dtype == torch.float32 else w.detach().float().requires_grad_()
            for name, w in self._weights.items()
        }
        self._optimizer = _build_optimizer(self._masters, agent.optimizer)
        self._resident = True

    @torch.no_grad()
    def measure(self, rollouts: Sequence[Rollout], needs: frozenset[Need]) -> dict[RolloutKey, TokenStats]:
        """See Policy."""
        self._check_resident("measure")
        if "reference" in needs and self._reference is None:
            raise ValueError("reference logprobs are wanted, but the policy was built with kl_coef=0")
        check_rollouts(rollouts, self._vocab_size)
        microbatches = self._pack(from_rollouts(rollouts), self._tokens_per_microbatch)
        named: dict[str, list[np.ndarray]] = {}
        for batch in map(TokenBatch.of, microbatches):
            logprobs_MV = self._log_softmax(self._model, batch)
            found = {"logprobs": _of_labels(logprobs_MV, batch)}
            if "entropy" in needs:
                found["entropy"] = torch.special.entr(logprobs_MV.exp()).sum(-1)
            if "certainty" in needs:
                found["certainty"] = -logprobs_MV.mean(-1) - np.log(logprobs_MV.shape[1])
            if self._reference is not None and "reference" in needs:
                found["reference"] = _of_labels(self._log_softmax(self._reference, batch), batch)
            for name, values_M in found.items():
                named.setdefault(name, []).append(_at_mask(values_M, batch).numpy())
        unpacked = {name: unpack(microbatches, values) for name, values in named.items()}
        return {r.key: TokenStats(**{name: of[i] for name, of in unpacked.items()}) for i, r in enumerate(rollouts)}

    def update(
        self, samples: Sequence[Sample], loss: LossConfig, batch: BatchConfig, learning_rates: Sequence[float]
    ) -> Metrics:
        """See Policy."""
        self._check_resident("update")

        def step(part: Sequence[Sample], lr: float) -> Metrics:
            tokens, microbatches = response_tokens(part), self._pack(part, batch.tokens_per_microbatch)
            report = self._backward(microbatches, loss, tokens, num_sequences(part))
            norm = self._optimize(lr)
            return report | {
                "grad_norm": norm,
                "skipped_steps": 0.0 if math.isfinite(norm) else 1.0,
                "tokens": float(tokens),
                "microbatches": float(len(microbatches)),
            }

        report = take_steps(samples, learning_rates, step)
        self.version += 1
        return report

    def _backward(
        self, microbatches: Sequence[Microbatch], loss: LossConfig, num_tokens: int, num_sequences: int
    ) -> Metrics:
        """Metrics of one optimizer step's loss, whose gradient is left at the weights."""
        sums = Counter[str]()
        for batch in map(TokenBatch.of, microbatches):
            logprobs_T = _at_mask(_of_labels(self._log_softmax(self._model, batch), batch), batch)
            value, metrics = pg_loss(
                logprobs_T, batch, loss, num_tokens=num_tokens, num_sequences=num_sequences, kl_coef=loss.kl_coef
            )
            value.backward()
            sums.update({name: float(x) for name, x in metrics.items()})
        return summarize(sums)

    def _optimize(self, lr: float) -> float:
        """Global norm of the gradient before clipping; one step is taken, if it is finite, and the gradient cleared."""
        for name, master in self._masters.items():
            weight = self._weights[name]
            if master is not weight and weight.grad is not None:
                master.grad, weight.grad = weight.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters.values(), self._clip_grad or torch.inf))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._publish()
        return norm

    @torch.no_grad()
    def _publish(self) -> None:
        for name, master in self._masters.items():
            if master is not self._weights[name]:
                self._weights[name].copy_(master)

    def _pack(self, samples: Sequence[Sample], tokens_per_microbatch: int) -> list[Microbatch]:
        (shard,) = pack(samples, dp=1, tokens_per_microbatch=tokens_per_microbatch)
        return shard

    def _log_softmax(self, model: PreTrainedModel, batch: TokenBatch) -> Tensor:
        """float32[M, V] at the sampling temperature, at the masked positions in order.

        Sequences become rows padded on the right: causal attention lets no real token see the padding.
        """
        ends = batch.cu_seqlens[1:-1].tolist()
        token_ids, mask = (torch.tensor_split(x, ends) for x in (batch.token_ids, batch.mask))
        rows = torch.nn.utils.rnn.pad_sequence(list(token_ids), batch_first=True)
        where = torch.nn.utils.rnn.pad_sequence(list(mask), batch_first=True)
        hidden = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
        logits = _head(model)(hidden[where])
        return (logits.float() / self._temperature).log_softmax(dim=-1)

    def weights(self, bucket_bytes: int) -> Generator[WeightBucket, None, None]:
        """See Policy; in the agent's dtype, a tied head left out."""
        self._check_resident("export")
        return write_buckets(self._weights.items(), bucket_bytes)

    def save(self, path: Path) -> None:
        """Master weights, optimizer state and version, as safetensors and JSON."""
        self._check_resident("save")
        path.mkdir(parents=True, exist_ok=True)
        save_file({name: w.detach() for name, w in self._masters.items()}, path / "weights.safetensors")
        state = self._optimizer.state
        moments = {f"{name}:{k}": v for name, w in self._masters.items() for k, v in state.get(w, {}).items()}
        save_file(moments, path / "optimizer.safetensors")
        (path / "state.json").write_text(json.dumps({"version": self.version}), encoding="utf-8")

    def begin_save(self, path: Path) -> None:
        """Nothing is gained by waiting with so little."""
        self.save(path)

    def end_save(self) -> None: ...

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """What ``save`` wrote; the model must be the same."""
        self._check_resident("load")
        weights = load_file(path / "weights.safetensors")
        if weights.keys() != self._masters.keys():
            odd = sorted(weights.keys() ^ self._masters.keys())
            raise ValueError(f"{path}: another model's checkpoint; {len(odd)} weights differ, e.g. {odd[0]}")
        moments: dict[str, dict[str, Tensor]] = {}
        for spelled, value in load_file(path / "optimizer.safetensors").items():
            name, _, kind = spelled.rpartition(":")
            moments.setdefault(name, {})[kind] = value
        self._optimizer.state.clear()
        for name, master in self._masters.items():
            master.copy_(weights[name])
            if name in moments:
                self._optimizer.state[master] = moments[name]
        self._publish()
        self.version = json.loads((path / "state.json").read_text(encoding="utf-8"))["version"]

    def onload(self) -> None:
        """Undo ``offload``."""
        if self._resident:
            raise RuntimeError("onload: the policy is loaded already")
        self._resident = True

    def offload(self) -> None:
        """Nothing moves on CPU, but nothing works until ``onload``, as where the memory is given away."""
        self._check_resident("offload")
        self._resident = False

    def _check_resident(self, doing: str) -> None:
        if not self._resident:
            raise RuntimeError(f"{doing}: the policy is offloaded; onload it first")

    def close(self) -> None:
        self._resident = False
        self._weights, self._masters = {}, {}
        del self._model, self._reference, self._optimizer


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
        check_prompt(prompt, prompt_ids, self._chat.vocab_size)
        room = self._max_positions - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"prompt {prompt.uid} of {prompt.agent} has {len(prompt_ids)} tokens, its model {self._max_positions} "
                "positions: lower data.max_prompt_tokens"
            )
        random = torch.Generator().manual_seed(seed.sample(prompt.key(index), self._stream))
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
    if not torch.isfinite(total).all():
        raise FloatingPointError("the engine's logits are no numbers: the weights are spoilt")
    # never as far as the total: what lies there has probability 0
    mark = torch.minimum(uniforms[:, None] * total, total.nextafter(torch.zeros_like(total)))
    tokens = torch.searchsorted(below, mark, right=True)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]


def _empty_model(agent: AgentConfig) -> PreTrainedModel:
    """The agent's architecture with weights that mean nothing; no code of the model's is run."""
    with _MAKING_A_MODEL, torch.random.fork_rng():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(agent.model), dtype=DTYPES[agent.dtype])
    return model.eval()


def _load_model(agent: AgentConfig) -> PreTrainedModel:
    with _MAKING_A_MODEL:
        return AutoModelForCausalLM.from_pretrained(agent.model, dtype=DTYPES[agent.dtype]).eval()


def _head(model: PreTrainedModel) -> torch.nn.Linear:
    head = model.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear), f"{type(model).__name__} is no language model"
    return head


@torch.no_grad()
def _check_head(model: PreTrainedModel, name: str) -> None:
    """Refuse models that do more to their logits than multiply (soft-caps, scales): the policy computes them itself."""
    tokens = torch.tensor([[0, 1]])  # one of them may be the padding token, whose embedding is zero
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    if not torch.equal(_head(model)(hidden), model(input_ids=tokens, use_cache=False).logits):
        raise ValueError(f"model={name}: its {type(model).__name__} changes logits after the head; not supported")


def _build_optimizer(weights: dict[str, Tensor], cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """Weight decay is decoupled and spares biases and norms, as in Megatron."""
    plain = [w for name, w in weights.items() if w.ndim == 1 or name.endswith(".bias")]
    decayed = [w for name, w in weights.items() if not (w.ndim == 1 or name.endswith(".bias"))]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    if cfg.name == "sgd":
        return torch.optim.SGD(groups, lr=cfg.lr)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps)


def _of_labels(logprobs_MV: Tensor, batch: TokenBatch) -> Tensor:
    return logprobs_MV.gather(1, batch.labels[batch.mask, None])[:, 0]


def _at_mask(values_M: Tensor, batch: TokenBatch) -> Tensor:
    """[T]: the values at the masked positions, 0 elsewhere."""
    return torch.zeros(batch.mask.shape).masked_scatter(batch.mask, values_M)

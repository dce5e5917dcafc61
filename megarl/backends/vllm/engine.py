"""The driver's handle on an agent's vLLM engine: its replicas, their share of the work, and their phases."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from megarl.backends.phase import EnginePhase
from megarl.backends.placement import Placement
from megarl.backends.protocols import WeightBucket
from megarl.backends.shards.layout import Layout, Tensor
from megarl.backends.vllm.worker import Request, Response, VllmWorker, process_env
from megarl.backends.vocabulary import check_prompt
from megarl.backends.workers import WorkerGroup
from megarl.chat import Chat
from megarl.settings import AgentConfig, SamplingConfig
from megarl.types import Message, Prompt, Rollout, Seed

CLOSE_TIMEOUT_S = 30.0  # vLLM itself gives its processes 5 s to end, and as much after a signal


class VllmEngine:
    """An ``Engine`` of one vLLM actor per replica, on the agent's own slots.

    Phases as in EnginePhase, on CPU too, where sleeping would lose nothing: what is wrong on a GPU fails everywhere.
    """

    def __init__(
        self,
        name: str,
        agent: AgentConfig,
        placement: Placement,
        chat: Chat,
        max_model_len: int,
        overrides: Mapping[str, Any],
    ) -> None:
        """``max_model_len``: longest prompt plus response, in tokens. ``overrides``: native engine arguments."""
        self.version = -1
        self._name = name
        self._chat = chat
        self._max_model_len = max_model_len
        self._stream = None if agent.seed is None else str(agent.seed)
        self._phase = EnginePhase()
        kwargs = {
            "model": agent.model,
            "dtype": agent.dtype,
            "device": placement.cluster.device,
            "config": agent.engine,
            "max_model_len": max_model_len,
            "stop_ids": chat.stop_ids,
            "overrides": dict(overrides),
        }
        self._start = partial(
            WorkerGroup,
            placement,
            f"{name}/engine",
            VllmWorker,
            [kwargs] * agent.replicas,
            slots_per_rank=agent.engine.tp,
            env=process_env(placement.cluster.device),
            owns_slots=False,
        )
        self._workers = self._start()

    def restart(self) -> None:
        """New processes in place of all replicas', awake and without weights; nothing is asked of the old ones."""
        self.version = -1
        self._phase = EnginePhase()
        self._workers.close()
        self._workers = self._start()

    def generate(self, prompts: Sequence[Prompt], seed: Seed, sampling: SamplingConfig) -> list[Rollout]:
        """``n`` rollouts of every prompt, in prompt order then index order; one seed each, so that neither the order of
        the prompts nor the number of replicas matters."""
        self._phase.check_can_generate()
        wanted: list[tuple[Prompt, int]] = []
        requests: list[Request] = []
        for prompt in prompts:
            ids = self._render(prompt, sampling.max_tokens)
            for index in range(prompt.n):
                wanted.append((prompt, index))
                requests.append(Request(ids, seed.sample(prompt.key(index), self._stream)))
        shares = split(requests, self._workers.world)
        answered = self._workers.call_each("generate", [(share, sampling) for share in shares])
        responses = [response for share in answered for response in share]
        return [
            self._rollout(prompt, index, request, response)
            for (prompt, index), request, response in zip(wanted, requests, responses, strict=True)
        ]

    def score(self, prompt_ids: np.ndarray, token_ids: np.ndarray, temperature: float) -> list[np.ndarray]:
        """Per replica float32[Lc], logprobs of given tokens after a prompt, through the caches that sampling uses."""
        self._phase.check_can_generate()
        return self._workers.call_all("score", prompt_ids, token_ids, temperature)

    def begin_refit(self) -> None:
        """Start anew, also after a refit that failed; an engine asleep takes back the memory of its weights only."""
        self._phase.begin_refit()
        self._workers.call_all("begin_refit")

    def load_weights(self, bucket: WeightBucket) -> None:
        self._phase.check_refitting()
        self._workers.call_all("load_weights", bucket.path, bucket.names)

    def finish_refit(self, version: int) -> None:
        """Raise ValueError unless every weight has come; drop cached prefixes; stamp the version."""
        self._phase.check_refitting()
        self._workers.call_all("finish_refit")
        self._phase.finish_refit()
        self.version = version

    def layout(self, tensors: Mapping[str, Tensor]) -> Layout:
        """Where vLLM's own loaders put each tensor, of every rank of every replica in slot order.

        Raises ValueError for a tensor whose loading is no copy of boxes, and for a parameter that none of them fills.
        """
        recorded = [rank for ranks in self._workers.call_all("record", list(tensors.values())) for rank in ranks]
        for _, _, failed in recorded:
            for name, why in failed.items():
                raise ValueError(f"{name} cannot be planned ({why}): use reshard.method=gathered for this model")
        filled = {shard.param for shards, _, _ in recorded for shard in shards}
        for _, shapes, _ in recorded:
            if lacking := sorted(shapes.keys() - filled):
                raise ValueError(f"nothing fills the engine's {lacking[0]}: use reshard.method=gathered for this model")
        return Layout(dict(tensors), tuple(tuple(s) for s, _, _ in recorded), tuple(p for _, p, _ in recorded))

    def begin_boxes(self, layout: Layout, *, verify: bool) -> None:
        """As begin_refit, for a planned refit of that layout; ``verify``: a verdict follows."""
        self._phase.begin_refit()
        wanted = [layout.elements(rank) for rank in range(layout.world)]
        pairs = zip(self._per_replica(layout.params), self._per_replica(wanted), strict=True)
        self._workers.call_each("begin_boxes", [(*pair, verify) for pair in pairs])

    def take(self, files: Sequence[Any]) -> None:
        """One round's buckets: per slot the files and what they hold."""
        self._phase.check_refitting()
        self._workers.call_each("take", [(part,) for part in self._per_replica(files)])

    def finish_boxes(self) -> None:
        """Raise ValueError unless all of every parameter has come; drop cached prefixes."""
        self._phase.check_refitting()
        self._workers.call_all("finish_boxes")

    def admit(self, version: int) -> None:
        """A planned refit is over: stamp the version, let the engine generate."""
        self._phase.check_refitting()
        self._phase.finish_refit()
        self.version = version

    def begin_judging(self) -> None:
        self._workers.call_all("begin_judging")

    def judge(self, bucket: WeightBucket) -> None:
        """Take one bucket of the policy's own export, for ``verdict``."""
        self._workers.call_all("judge", bucket.path, bucket.names)

    def verdict(self) -> list[list[str]]:
        """Per slot what it does not hold of the export as vLLM would have loaded it, since the last verified refit."""
        return [rank for replica in self._workers.call_all("verdict") for rank in replica]

    def _per_replica(self, per_slot: Sequence[Any]) -> list[list[Any]]:
        size = len(per_slot) // self._workers.world
        return [list(per_slot[start : start + size]) for start in range(0, len(per_slot), size)]

    def wake(self) -> None:
        self._phase.wake()
        self._workers.call_all("wake")

    def sleep(self) -> None:
        """Free the GPU, weights included (vLLM's level 2)."""
        self._phase.sleep()
        self._workers.call_all("sleep")

    def close(self) -> None:
        """End the replicas and vLLM's processes below them."""
        self._workers.close(farewell="close", timeout_s=CLOSE_TIMEOUT_S)

    def familiar_ids(self, count: int) -> np.ndarray:
        """int32[count], or as many as this engine takes with one more: a conversation about sums in its own tokens."""
        sums = "\n".join(f"{a} + {b} = {a + b}" for a in range(10) for b in range(10))
        return np.resize(self._chat.render((Message("user", sums),)), min(count, self._max_model_len - 1))

    def _render(self, prompt: Prompt, max_tokens: int) -> np.ndarray:
        ids = self._chat.render(prompt.messages)
        if len(ids) + max_tokens > self._max_model_len:
            raise ValueError(
                f"{self._name}: prompt {prompt.uid} of {len(ids)} tokens and max_tokens={max_tokens} exceed the "
                f"engine's {self._max_model_len} tokens"
            )
        check_prompt(prompt, ids, self._chat.vocab_size)
        return ids

    def _rollout(self, prompt: Prompt, index: int, request: Request, response: Response) -> Rollout:
        return Rollout(
            prompt=prompt,
            index=index,
            prompt_ids=request.prompt_ids,
            token_ids=response.token_ids,
            logprobs=response.logprobs,
            text=self._chat.decode(response.token_ids),
            stop=response.stop,
            version=self.version,
        )


def split(requests: Sequence[Request], replicas: int) -> list[list[Request]]:
    """Contiguous shares, sizes differing by at most one: a prompt's rollouts mostly meet in one prefix cache."""
    base, extra = divmod(len(requests), replicas)
    cuts = [rank * base + min(rank, extra) for rank in range(replicas + 1)]
    return [list(requests[start:stop]) for start, stop in pairwise(cuts)]

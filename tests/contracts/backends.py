"""Who is put to the contract tests: one entry per backend, each a way to open it and close it again.

A new backend adds an entry to POLICIES or SAMPLERS and inherits every test here.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.backends.buckets import write_buckets
from megarl.backends.cluster import Cluster, connect
from megarl.backends.megatron.policy import MegatronPolicy
from megarl.backends.placement import place
from megarl.backends.protocols import Engine, Policy
from megarl.backends.reference import ReferenceEngine, ReferencePolicy
from megarl.backends.vllm.engine import VllmEngine
from megarl.chat import Chat, open_chat
from megarl.settings import AgentConfig, ClusterConfig, SamplingConfig
from megarl.types import Message, Prompt, Rollout, Seed
from tests.megatron.ranks import LocalRanks


class PolicyArgs(NamedTuple):
    temperature: float = 1.0
    kl_coef: float = 0.0
    tokens_per_microbatch: int = 512


@dataclass
class Host:
    """The Ray cluster of one file's tests, started when first asked for."""

    run_dir: Path
    names: Iterator[int] = field(default_factory=count)

    @cached_property
    def cluster(self) -> Cluster:
        return connect(ClusterConfig(nodes=1, gpus_per_node=16), self.run_dir)

    def close(self) -> None:
        if "cluster" in self.__dict__:
            self.cluster.close()


@contextmanager
def reference_policy(agent: AgentConfig, args: PolicyArgs, host: Host) -> Iterator[Policy]:
    policy = ReferencePolicy(agent, **args._asdict())
    yield policy
    policy.close()


@contextmanager
def megatron_policy(agent: AgentConfig, args: PolicyArgs, host: Host) -> Iterator[Policy]:
    """One rank; layouts are compared with one another in tests/megatron."""
    ranks = LocalRanks(agent=agent, temperature=args.temperature, keep_reference=args.kl_coef > 0)
    policy = MegatronPolicy(agent, ranks, tokens_per_microbatch=args.tokens_per_microbatch)
    yield policy
    policy.close()


@contextmanager
def reference_engine(agent: AgentConfig, chat: Chat, host: Host) -> Iterator[Engine]:
    engine = ReferenceEngine(agent, chat)
    yield engine
    engine.close()


@contextmanager
def vllm_engine(agent: AgentConfig, chat: Chat, host: Host) -> Iterator[Engine]:
    name = f"agent{next(host.names)}"
    placement = place(host.cluster, {name: 1}, one_node={name: 1}, timeout_s=60)[name]
    engine = VllmEngine(name, agent, placement, chat, LONGEST, {})
    yield engine
    engine.close()


class PolicyEntry(NamedTuple):
    open: Callable[[AgentConfig, PolicyArgs, Host], AbstractContextManager[Policy]]
    families: tuple[str, ...]  # of tests/tiny.py


class EngineEntry(NamedTuple):
    open: Callable[[AgentConfig, Chat, Host], AbstractContextManager[Engine]]
    families: tuple[str, ...]


POLICIES = {
    "reference": PolicyEntry(reference_policy, ("qwen3", "llama")),  # tied and untied
    "megatron": PolicyEntry(megatron_policy, ("qwen3",)),  # every family and layout: tests/megatron
}
SAMPLERS = {
    "reference": EngineEntry(reference_engine, ("qwen3", "llama")),
    "vllm": EngineEntry(vllm_engine, ("qwen3",)),  # tied, the harder one; one, since engines start slowly
}

MODEL = {"scale": 2.0, "head_dim": 32}  # of tests/tiny.py: varied samples; vLLM's CPU attention has no smaller heads
LONGEST = 256  # tokens of a prompt with its response
SEED = Seed(run=11, step=0)
SAMPLING = SamplingConfig(temperature=1.0, max_tokens=24)
PROMPTS = [
    Prompt(agent="ann", uid=str(i), role="solve", messages=(Message("user", text),), n=6)
    for i, text in enumerate(["2+2=", "What is seven times eight, in words?", "x", "12-5="])
]


def agent_of(model: Path, **changes) -> AgentConfig:
    """A float32 agent with plain settings; ``changes`` go over them."""
    return AgentConfig.model_validate({"model": str(model), "dtype": "float32", **changes})


def chat_of(model: Path) -> Chat:
    return open_chat(str(model))


def oracle(model: Path) -> PreTrainedModel:
    """The model as transformers runs it: what every backend is held against."""
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def named_weights(model: PreTrainedModel) -> list[tuple[str, Tensor]]:
    """What a policy of this model sends: Hugging Face names, a tied head once, under the embedding's name."""
    return [(name, p.detach()) for name, p in model.named_parameters()]


def refit(engine: Engine, weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
    """Load the weights in several small buckets."""
    engine.begin_refit()
    for bucket in write_buckets(weights, 100_000):
        engine.load_weights(bucket)
    engine.finish_refit(version)


def oracle_logprobs(model: PreTrainedModel, prompt_ids, token_ids, temperature: float) -> Tensor:
    """float32[Lc, V]: log-softmax at each response token, the sequence alone and without padding."""
    ids = torch.tensor([[*prompt_ids.tolist(), *token_ids.tolist()]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    return (logits / temperature).log_softmax(-1)[len(prompt_ids) - 1 : -1]


def logprob_gap(model: PreTrainedModel, rollouts: Sequence[Rollout], temperature: float) -> float:
    """Mean |logprob by the engine - by the model| over all response tokens."""
    return float(logprob_gaps(model, rollouts, temperature).mean())


def logprob_gaps(model: PreTrainedModel, rollouts: Sequence[Rollout], temperature: float) -> Tensor:
    """|logprob by the engine - by the model| of every response token."""
    gaps = []
    for r in rollouts:
        all_logprobs = oracle_logprobs(model, r.prompt_ids, r.token_ids, temperature)
        wanted = all_logprobs.gather(1, torch.tensor(r.token_ids)[:, None].long())[:, 0]
        gaps.append((wanted - torch.tensor(r.logprobs)).abs())
    return torch.cat(gaps).double()

"""Who is put to the contract tests: one entry per backend, each a way to open it and close it again.

A new backend adds an entry to POLICIES or SAMPLERS and inherits every test here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from megarl.backends.buckets import write_buckets
from megarl.backends.megatron.policy import MegatronPolicy
from megarl.backends.protocols import Engine, Policy
from megarl.backends.reference import ReferenceEngine, ReferencePolicy
from megarl.chat import Chat, open_chat
from megarl.settings import AgentConfig, SamplingConfig
from megarl.types import Message, Prompt, Seed
from tests.megatron.ranks import Pool


class PolicyArgs(NamedTuple):
    temperature: float = 1.0
    kl_coef: float = 0.0
    tokens_per_microbatch: int = 512


OpenPolicy = Callable[[AgentConfig, PolicyArgs], AbstractContextManager[Policy]]
OpenEngine = Callable[[AgentConfig, Chat], AbstractContextManager[Engine]]


@contextmanager
def reference_policy(agent: AgentConfig, args: PolicyArgs) -> Iterator[Policy]:
    policy = ReferencePolicy(agent, **args._asdict())
    yield policy
    policy.close()


@contextmanager
def reference_engine(agent: AgentConfig, chat: Chat) -> Iterator[Engine]:
    engine = ReferenceEngine(agent, chat)
    yield engine
    engine.close()


IDLE_PROCESSES: list[Pool] = []  # their imports are paid once; daemons, so they end with the tests


@contextmanager
def megatron_policy(agent: AgentConfig, args: PolicyArgs) -> Iterator[Policy]:
    """One rank in a process of its own; layouts are compared with one another in tests/megatron."""
    pool = IDLE_PROCESSES.pop() if IDLE_PROCESSES else Pool(1)
    ranks = pool.ranks(agent=agent, temperature=args.temperature, keep_reference=args.kl_coef > 0)
    policy = MegatronPolicy(agent, ranks, tokens_per_microbatch=args.tokens_per_microbatch)
    yield policy
    policy.close()
    IDLE_PROCESSES.append(pool)


POLICIES: dict[str, OpenPolicy] = {"reference": reference_policy, "megatron": megatron_policy}
SAMPLERS: dict[str, OpenEngine] = {"reference": reference_engine}

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

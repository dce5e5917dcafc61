"""What the vLLM tests share: tiny models, engines of them, and transformers as the judge."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megarl.backends.buckets import write_buckets
from megarl.backends.placement import Placement
from megarl.backends.protocols import WeightBucket
from megarl.backends.vllm.engine import VllmEngine
from megarl.chat import open_chat
from megarl.settings import AgentConfig, EngineConfig, LayoutConfig
from megarl.types import Message, Prompt, Rollout
from tests import tiny

# Heads of 32 (vLLM's CPU attention takes no smaller), and a vocabulary that vLLM pads (to a multiple of 64).
SHAPE = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 130}
LONGEST = 120
BUCKET = 60_000  # bytes: cuts layers in two
# the first names are of one length, so the prompts fill whole blocks of the prefix cache alike
QUESTIONS = tuple(f"Tom has {i} apples and buys {i + 3} more of them. How many?" for i in range(10, 18))


class Weights:
    """The part of a policy that ``reshard`` asks for, over a transformers model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        tied = model.config.tie_word_embeddings
        self.named: dict[str, Tensor] = {
            name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")
        }

    def weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        return write_buckets(self.named.items(), bucket_bytes)


def random_model(family: str, seed: int, scale: float = 4.0) -> torch.nn.Module:
    return tiny.model(family, seed, scale, **SHAPE)


def build(folder: Path, placements: dict[str, Placement], wanted: dict[str, tuple[str, dict]]) -> dict[str, VllmEngine]:
    """Engines by agent name, started side by side; ``wanted``: name -> (family, changes to its engine section)."""

    def start(name: str) -> VllmEngine:
        family, changes = wanted[name]
        agent = AgentConfig(
            model=str(tiny.write(folder / name, family, **SHAPE)),
            dtype="float32",
            layout=LayoutConfig(dp=len(placements[name].bundles)),
            seed=5 if family == "qwen2" else None,
            engine=EngineConfig(**{"kv_cache_gib": 0.05, "max_sequences": 64, "replicas": 1, **changes}),
        )
        return VllmEngine(name, agent, placements[name], open_chat(agent.model), LONGEST, {})

    with ThreadPoolExecutor() as pool:
        return dict(zip(wanted, pool.map(start, wanted), strict=True))


def prompts(n: int = 1, agent: str = "ann") -> list[Prompt]:
    return [
        Prompt(agent=agent, uid=f"q{i}", role="solve", messages=(Message("user", text),), n=n)
        for i, text in enumerate(QUESTIONS)
    ]


@torch.no_grad()
def greedy(model: torch.nn.Module, prompt_ids: np.ndarray, tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """transformers' most likely response, without a cache."""
    ids = prompt_ids.tolist()
    for _ in range(tokens):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop_ids:
            break
    return ids[len(prompt_ids) :]


@torch.no_grad()
def drift(model: torch.nn.Module, rollouts: Sequence[Rollout], temperature: float) -> np.ndarray:
    """|logprob by the engine - logprob by transformers| of every sampled token."""
    found = []
    for r in rollouts:
        ids = torch.from_numpy(np.concatenate([r.prompt_ids, r.token_ids]).astype(np.int64))
        logprobs = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)[len(r.prompt_ids) - 1 : -1]
        own = logprobs.gather(1, ids[len(r.prompt_ids) :, None])[:, 0]
        found.append(np.abs(own.numpy() - r.logprobs))
    return np.concatenate(found)

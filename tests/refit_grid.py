"""The grid of planned refits: families x training layouts x engines, on real Megatron ranks and real vLLM models.

Weights are whole numbers, every element another, so that a tensor in the wrong place or order shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megarl.backends.shards.engine import engine_layout
from megarl.backends.shards.layout import Layout
from megarl.planning.models import read_shape
from megarl.settings import AgentConfig, LayoutConfig
from tests.megatron import refits
from tests.megatron.ranks import LocalRanks

# 4 query and 2 key/value heads of 32, 130 rows of vocabulary, which vLLM pads to 192
SIZES = {
    "vocab_size": 130,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS = {
    "llama": {"num_hidden_layers": 7},
    "mistral": {"num_hidden_layers": 2, "sliding_window": None},
    "qwen2": {"head_dim": 16},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"num_hidden_layers": 2, "tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    "gemma3_text": {"num_hidden_layers": 2, "tie_word_embeddings": True, "query_pre_attn_scalar": 32},
    "qwen3_moe": {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
BUCKET = 80_000  # bytes: several rounds, and the largest matrices are cut
LAYOUTS = (
    *(LayoutConfig(), LayoutConfig(tp=2), LayoutConfig(tp=4), LayoutConfig(pp=2), LayoutConfig(dp=2)),
    *(LayoutConfig(tp=2, pp=2), LayoutConfig(tp=2, dp=2), LayoutConfig(pp=3)),
)
EXPERTS = (LayoutConfig(dp=2, ep=2), LayoutConfig(pp=2, dp=2, ep=2))  # of the family with experts alone
Loaded = Mapping[tuple[Path, int], list[dict[str, Any]]]  # (model, engine's tp) -> what each rank loaded and recorded


def write_models(folder: Path) -> dict[str, Path]:
    """Checkpoints of all families."""
    made = {}
    for kind, changes in MODELS.items():
        made[kind] = folder / kind
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | changes)), dtype=torch.float32)
        start = 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.arange(start, start + parameter.numel()).view_as(parameter))
                start += parameter.numel()
        assert start < 1 << 24, "float32 holds no more whole numbers"
        model.save_pretrained(made[kind])
    return made


def engines_of(model: Path, world: int, loaded: Loaded) -> list[tuple[int, Layout]]:
    """(tp, recorded layout) of the engines that so many ranks can host."""
    tensors = engine_layout(read_shape(str(model)), 1, 1, 4).tensors
    made = []
    for tp in (1, 2):
        ranks = loaded[model, tp] * (world // tp)
        if ranks:
            shards = tuple(tuple(rank["shards"]) for rank in ranks)
            made.append((tp, Layout(tensors, shards, tuple(rank["shapes"] for rank in ranks))))
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One refit of one model. ``wrong``: training parameters that are not as described, engine parameters that are not
    what vLLM's own load_weights makes of the checkpoint, counts of bytes that are not those of the plan."""

    kind: str
    layout: LayoutConfig
    tp: int
    wrong: tuple[str, ...] = ()
    wire: int = 0  # bytes counted at the collectives, over all ranks
    plan: int = 0
    bound: int = 0
    exported: int = 0  # bytes counted at the collectives of Bridge's whole export
    seconds: float = 0.0
    export_seconds: float = 0.0
    largest: int = 0  # bytes of the fullest bucket
    forwarded: int = 0
    absent: str = ""  # why Megatron builds no such model

    @property
    def ratio(self) -> float:
        """1.0: nothing travels that need not."""
        return self.wire / self.bound if self.bound else 1.0 + self.wire


def rows(layout: LayoutConfig, models: Mapping[str, Path], loaded: Loaded) -> Iterator[Row]:
    """Of every model under one layout, in one launch of its ranks; two GPUs a node where ranks pass on bytes."""
    jobs = [(path, [engine for _, engine in engines_of(path, layout.world, loaded)]) for path in models.values()]
    gpus = 2 if layout.pp == 2 and layout.tp == 2 else 8
    # the ranks hold a small model of their own, and build those of the grid beside it
    own = models["qwen3_moe" if layout.ep > 1 else "llama" if "llama" in models else next(iter(models))]
    try:
        opened = LocalRanks(agent=AgentConfig(model=str(own), dtype="float32", layout=layout), temperature=1.0)
    except ValueError as refused:  # of the ranks' own model: nothing can be built under this layout
        for kind, path in models.items():
            for tp, _ in engines_of(path, layout.world, loaded):
                yield Row(kind=kind, layout=layout, tp=tp, absent=str(refused))
        return
    try:
        by_rank = opened.run(refits.refit, layout, jobs, gpus, BUCKET)
    finally:
        opened.close()
    at = 0
    for kind, path in models.items():
        for tp, engine in engines_of(path, layout.world, loaded):
            results = [found[at] for found in by_rank]
            at += 1
            if why := next((r["absent"] for r in results if "absent" in r), ""):
                yield Row(kind=kind, layout=layout, tp=tp, absent=why)
            else:
                yield _row(kind, layout, tp, results, loaded[path, tp], engine.world)


def _row(
    kind: str, layout: LayoutConfig, tp: int, results: Sequence[dict[str, Any]], wanted: Sequence[dict], world: int
) -> Row:
    wrong = [f"rank {rank}: {name}" for rank, r in enumerate(results) for name in r["wrong"]]
    for rank, result in enumerate(results[:world]):
        params = wanted[rank % tp]["params"]
        wrong += [f"engine rank {rank}: {name}" for name in sorted(params.keys() ^ result["params"].keys())]
        wrong += [
            f"engine rank {rank}: {name}"
            for name in params.keys() & result["params"].keys()
            if not torch.equal(params[name], result["params"][name])
        ]
    for rank, r in enumerate(results):
        if not r["counted"] == r["plan"] == r["moved"].received:
            wrong.append(f"rank {rank}: {r['counted']} bytes counted, {r['moved'].received} told, {r['plan']} planned")
    if len({r["key"] for r in results}) > 1:
        wrong.append("ranks made different plans")
    return Row(
        kind=kind,
        layout=layout,
        tp=tp,
        wrong=tuple(wrong),
        wire=sum(r["counted"] for r in results),
        plan=results[0]["wire"],
        bound=results[0]["bound"],
        exported=sum(r["exported"] for r in results),
        seconds=max(r["seconds"] for r in results),
        export_seconds=max(r["export_seconds"] for r in results),
        largest=max(r["largest"] for r in results),
        forwarded=results[0]["forwarded"],
    )

"""From a run's configuration to what the search is given: which settings are the user's, and which it may choose."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from megarl.config import RunConfig
from megarl.planning.devices import Device
from megarl.planning.memory import Layout, Recompute
from megarl.planning.models import read_shape
from megarl.planning.options import Choice, Machine, Need, Setting
from megarl.planning.steptime import Rates, Refit
from megarl.planning.workload import Expectations, workload
from megarl.settings import LayoutConfig

Taken = Literal["none", "stated", "all"]
MOST_SEQUENCES = 1024  # in flight: vLLM's own default on GPUs of this size
MICROBATCHES = (4096, 8192, 16384, 32768)  # tokens
RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def needs_of(cfg: RunConfig, expect: Expectations, *, layouts: Taken = "stated") -> list[Need]:
    """The agents, with the layouts and engine sizes that the configuration states; all: defaults count as stated."""
    found = []
    for name, agent in cfg.agents.items():
        given = layouts == "all" or (layouts == "stated" and "layout" in agent.model_fields_set)
        engine_given = given or (layouts == "stated" and "tp" in agent.engine.model_fields_set)
        sequences_given = engine_given or (layouts == "stated" and "max_sequences" in agent.engine.model_fields_set)
        layout = agent.layout
        found.append(
            Need(
                name=name,
                shape=read_shape(agent.model),
                work=workload(cfg, name, expect),
                longest=cfg.max_prompt_tokens + cfg.sampling_of(name).max_tokens,
                itemsize=2 if agent.dtype == "bfloat16" else 4,
                keep_reference=cfg.kl_coef(name) > 0,
                optimizer=agent.optimizer.name,
                memory_share=agent.engine.memory_share,
                max_sequences=agent.engine.max_sequences if sequences_given else MOST_SEQUENCES,
                layout=layout_of(layout) if given else None,
                engine_tp=agent.engine.tp if engine_given else None,
                gpus=agent.slots if given else None,
            )
        )
    return found


def layout_of(layout: LayoutConfig) -> Layout:
    return Layout(tp=layout.tp, pp=layout.pp, cp=layout.cp, dp=layout.dp, ep=layout.ep, sp=layout.sp)


def choices_of(cfg: RunConfig, needs: Sequence[Need], *, free: bool = False) -> list[Choice]:
    """Cohort-wide settings to try: the user's own alone where they are stated, or where every layout is."""
    all_given = all(need.layout is not None for need in needs)
    tokens: Sequence[int] = (cfg.batch.tokens_per_microbatch,)
    if free or not (all_given or "tokens_per_microbatch" in cfg.batch.model_fields_set):
        tokens = sorted({*MICROBATCHES, *tokens})
    recompute: Sequence[Recompute] = (recompute_of(cfg.megatron),)
    if free or not (all_given or "recompute_granularity" in cfg.megatron):
        recompute = tuple(RECOMPUTE)
    return [Choice(tokens_per_microbatch=t, recompute=r) for r in recompute for t in tokens]


def recompute_of(megatron: Mapping[str, Any]) -> Recompute:
    """What the ``megatron:`` map recomputes; recompute of attention alone saves nothing with flash kernels."""
    granularity = megatron.get("recompute_granularity")
    if granularity == "full":
        return "full"
    return "mlp" if granularity == "selective" and "mlp" in (megatron.get("recompute_modules") or ()) else "none"


def setting_of(cfg: RunConfig, device: Device, rates: Rates, *, refit: Refit = "gathered", nodes: int = 0) -> Setting:
    return Setting(
        machine=Machine(device=device, nodes=nodes or cfg.cluster.nodes, gpus_per_node=cfg.cluster.gpus_per_node),
        rates=rates,
        bucket_bytes=cfg.reshard.bucket_bytes,
        logits="chunked" if cfg.kernels.fused_head else "whole",
        workspace_bytes=cfg.kernels.workspace_bytes,
        refit=refit,
    )

"""Step times that others published for runs of their own: what the step-time model is fitted on and judged by.

Rows: NVIDIA NeMo RL, synchronous (on-policy) GRPO, Megatron training and vLLM rollouts in BF16 on DGX-H100:
docs/about/performance-summary.md at releases 0.5 to 0.7, with the recipes beside it for what the table leaves out
(recompute; force_on_policy_ratio, which since 0.7 saves the policy's own logprob pass); phase splits from issue 959,
which quotes the release 0.3 blog and an outside rerun. Mean prompts follow from tokens/s/GPU x GPUs x seconds.
Left out: off-policy and FP8 rows (another schedule, another precision), DeepSeek-V3 (latent attention, speculative
decoding), GB200 rows (four GPUs a node).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megarl.planning.devices import DEVICES
from megarl.planning.lengths import Lengths
from megarl.planning.memory import Layout, Overheads, Recompute, kv_tokens, rollout_memory
from megarl.planning.models import read_shape
from megarl.planning.steptime import (
    Engine,
    Rates,
    Turn,
    Workload,
    handover_seconds,
    measure_seconds,
    refit_seconds,
    rollout_seconds,
    train_seconds,
)

Split = Mapping[str, float]  # phase -> seconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published run. ``split`` holds published seconds by phase, and always "step"."""

    name: str
    model: str
    gpus: int
    release: str
    limit: int  # longest sequence
    response: float  # mean
    prompt: float
    samples: int
    engine_tp: int
    layout: Layout
    split: Split
    updates: int
    passes: int = 2
    recompute: Recompute = "none"
    fitted: bool = False


def _grpo(
    model: str,
    gpus: int,
    release: str,
    lengths: tuple[int, float, float],
    engine_tp: int,
    layout: tuple[int, int, int, int],
    seconds: float,
    split: tuple[float, float, float, float] | None = None,
    **rest: object,
) -> Row:
    """Lengths are (limit, mean response, mean prompt); layout is (tp, cp, ep, pp), the rest is data parallel; the
    split is (train, refit, rollout, measure).
    """
    tp, cp, ep, pp = layout
    dp = gpus // (tp * cp * pp)
    phases = dict(zip(("train", "refit", "rollout", "measure"), split, strict=True)) if split else {}
    samples = int(str(rest.pop("samples", 2048)))
    updates = 1 if release == "0.7" and rest.get("passes") == 1 else samples // 512
    row = Row(
        name=f"{model} on {gpus}, {release}",
        model=model,
        gpus=gpus,
        release=release,
        limit=lengths[0],
        response=lengths[1],
        prompt=lengths[2],
        samples=samples,
        engine_tp=engine_tp,
        layout=Layout(tp=tp, cp=cp, ep=ep, pp=pp, dp=dp, sp=tp > 1),
        split={"step": seconds, **phases},
        updates=updates,
    )
    return replace(row, **rest)  # pyright: ignore[reportArgumentType] - keyword arguments of Row


ROWS: tuple[Row, ...] = (
    _grpo("llama-3.1-8b", 8, "0.3 blog", (4096, 795, 127), 1, (1, 1, 1, 2), 112, (28, 5, 58, 18), fitted=True),
    _grpo("llama-3.1-8b", 8, "0.3 rerun", (4096, 811, 127), 1, (1, 1, 1, 2), 116, (27, 8, 56, 18), fitted=True),
    _grpo("llama-3.1-70b", 64, "0.3 blog", (4096, 398, 127), 8, (4, 1, 1, 4), 147, (28, 14, 84, 18)),
    _grpo("llama-3.1-70b", 64, "0.3 rerun", (4096, 396, 127), 8, (4, 1, 1, 4), 178, (31, 26, 87, 20)),
    _grpo("llama-3.1-8b", 16, "0.5", (4096, 1019, 127), 1, (1, 1, 1, 2), 92.8, recompute="full"),
    _grpo("qwen3-32b", 32, "0.5", (4096, 3251, 103), 4, (4, 1, 1, 4), 376, fitted=True),
    _grpo("qwen3-32b", 32, "0.7", (4096, 3256, 103), 4, (4, 1, 1, 4), 323, passes=1),
    _grpo("qwen3-30b-a3b", 32, "0.5", (4096, 3196, 103), 2, (1, 1, 8, 1), 198, fitted=True),
    _grpo("qwen3-30b-a3b", 32, "0.6", (4096, 3203, 103), 2, (1, 1, 8, 1), 192),
    _grpo("qwen3-30b-a3b", 32, "0.7", (4096, 3198, 103), 2, (1, 1, 8, 1), 171, passes=1),
    _grpo("qwen3-30b-a3b", 32, "0.7 40k", (40960, 8170, 107), 2, (4, 8, 8, 1), 2022, recompute="full"),
    _grpo("qwen3-235b-a22b", 128, "0.5", (8192, 5700, 125), 16, (2, 2, 16, 8), 431, samples=512, recompute="full",
          fitted=True),
    _grpo("qwen3-235b-a22b", 128, "0.6", (8192, 5698, 125), 16, (2, 2, 16, 8), 395, samples=512, recompute="full"),
    _grpo("qwen3-235b-a22b", 128, "0.7", (8192, 5719, 125), 16, (2, 2, 16, 8), 367, samples=512, recompute="full",
          passes=1),
    _grpo("qwen3-235b-a22b", 256, "0.6", (8192, 5713, 125), 16, (2, 2, 16, 8), 312, samples=512, recompute="full"),
)  # fmt: skip


def predict(row: Row, rates: Rates) -> dict[str, float]:
    """Seconds by phase of a published run, and "step"."""
    device, shape = DEVICES["h100"], read_shape(row.model)
    turn = Turn(
        samples=row.samples,
        distinct_prompts=row.samples // 32,
        prompt_tokens=row.prompt,
        lengths=Lengths(row.response, row.limit - row.prompt),
    )
    work = Workload(turns=(turn,), updates=row.updates, passes=row.passes)
    over = Overheads()
    memory = rollout_memory(shape, row.layout, device, row.engine_tp, 0.6, 1024, over)
    # vLLM's default: 1024 responses in flight on GPUs of this size
    engine = Engine(tp=row.engine_tp, max_sequences=1024, cache_tokens=kv_tokens(shape, memory.kv_cache, row.engine_tp))
    microbatch = row.limit // row.layout.cp
    phases = {
        "rollout": rollout_seconds(shape, engine, row.gpus // row.engine_tp, device, work, rates),
        "measure": measure_seconds(shape, row.layout, device, work, microbatch, rates),
        "train": train_seconds(shape, row.layout, device, work, microbatch, row.recompute, rates),
        "refit": refit_seconds(shape, row.engine_tp, device, "gathered", rates)
        + handover_seconds(shape, row.layout, device, rates),
        "other": rates.other_s,
    }
    return {**phases, "step": sum(phases.values())}

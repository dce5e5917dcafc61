"""Bytes on every GPU and in every node's host memory, phase by phase, from a model's shape and a layout alone.

Weights, gradients and optimizer state are exact (Megatron's DistributedDataParallel and distributed optimizer);
activations follow Korthikanti et al. 2022 (arXiv 2205.05198), sections 4.1 and 4.3, for a gated MLP, flash attention
and no dropout; what libraries keep to themselves is a stated assumption (``Overheads``).

Axes: T tokens of one microbatch on one rank.
"""

import math
from dataclasses import dataclass
from typing import Literal

from megarl.planning.devices import GIB, Device
from megarl.planning.models import Shape

Recompute = Literal["none", "mlp", "full"]
Logits = Literal["whole", "chunked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a policy is spread over its ranks, as settings.LayoutConfig, and expert parallelism beside it."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    sp: bool = False

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("dp", self.dp), ("ep", self.ep))
        return "x".join(f"{key.upper()}{size}" for key, size in sizes if size > 1) + ("+SP" if self.sp else "") or "1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What of a run decides the policy's memory."""

    tokens_per_microbatch: int  # T
    microbatches: int  # per data-parallel rank and update
    recompute: Recompute = "none"
    logits: Logits = "whole"
    workspace_bytes: int = 512 << 20  # of the head: settings.KernelsConfig
    itemsize: int = 2  # of weights: 2 bfloat16, 4 float32
    keep_reference: bool = False
    optimizer: Literal["adam", "sgd"] = "adam"


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """GiB that CUDA, NCCL, vLLM and the allocator take. Assumptions, on the high side; per GPU or per process."""

    context: float = 0.6  # CUDA context and modules of one process
    communicator: float = 0.3  # NCCL buffers of one group of more than one rank
    engine_graphs: float = 1.2  # vLLM's captured graphs: they survive its sleep
    fragmentation: float = 0.04  # of activations
    free: float = 1.5  # left alone on every GPU
    policy_process: float = 4.0  # host, of one rank: libraries and pinned staging
    engine_process: float = 5.0  # host, of one engine rank
    node: float = 24.0  # host: system, Ray and its object store


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """Bytes of one GPU in one phase, by what they hold."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    engine_weights: float = 0.0
    kv_cache: float = 0.0
    staging: float = 0.0
    overhead: float = 0.0

    @property
    def total(self) -> float:
        # written out: the search asks some hundred thousand times
        policy = self.weights + self.gradients + self.optimizer + self.activations + self.logits
        return policy + self.engine_weights + self.kv_cache + self.staging + self.overhead


def stage_layers(layers: int, pp: int) -> tuple[int, ...]:
    """Layers per pipeline stage as the backend cuts them: equal, or fewer in the last, which has the head too."""
    each = math.ceil(layers / pp)
    last = layers - each * (pp - 1)
    if last < 1:
        raise ValueError(f"layout.pp={pp} is too many stages for {layers} layers")
    return (each,) * (pp - 1) + (last,)


def rank_parameters(shape: Shape, layout: Layout, stage: int) -> tuple[int, int]:
    """(shared, expert) parameters of one rank of a stage: the first are sharded by tp, the second by ep."""
    count = stage_layers(shape.layers, layout.pp)[stage]
    router = shape.mlp if shape.experts else 0
    split = shape.attention + (0 if shape.experts else shape.mlp)
    shared = count * (split // layout.tp + shape.norms + router)
    rows = math.ceil(shape.vocab / layout.tp) * shape.hidden
    first, last = stage == 0, stage == layout.pp - 1
    shared += rows if first else 0
    if last:
        shared += shape.hidden + (0 if shape.tied and first else rows)
    return shared, count * (shape.experts // layout.ep) * shape.expert


def policy_state(shape: Shape, layout: Layout, training: Training, stage: int) -> PhaseMemory:
    """Weights, float32 gradients and optimizer state. Adam keeps two moments, and under bfloat16 a float32 copy of the
    weights, sharded over the ranks that hold the same parameters.
    """
    shared, expert = rank_parameters(shape, layout, stage)
    copies = layout.dp * layout.cp
    expert_copies = max(1, layout.tp * copies // layout.ep)
    # sgd runs without the distributed optimizer, in float32, and keeps nothing
    state = 0 if training.optimizer == "sgd" else 8 + (4 if training.itemsize == 2 else 0)
    return PhaseMemory(
        weights=training.itemsize * (shared + expert),
        gradients=4 * (shared + expert),
        optimizer=state * (shared / copies + expert / expert_copies),
    )


def layer_activations(shape: Shape, layout: Layout, training: Training) -> tuple[float, float]:
    """(kept, whole) bytes per token of one layer: kept for the backward pass, and of a layer without recompute."""
    a, tp = training.itemsize, layout.tp
    row = a * shape.hidden / (tp if layout.sp else 1)
    heads = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    attention = (a * heads + 4 * shape.heads) / tp  # q k v, the output, and the softmax's float32 denominators
    if shape.experts:  # experts are not tensor-parallel: a token's copies, their hidden rows, and their outputs
        mlp = a * shape.experts_per_token * (3 * shape.expert_ffn + 2 * shape.hidden) + 4 * shape.experts
    else:
        mlp = 3 * a * shape.ffn / tp  # gate, up, and their product
    whole = 4 * row + attention + mlp  # two residuals and two normalized copies
    kept = {"none": whole, "mlp": 3 * row + attention, "full": row}[training.recompute]
    return kept, whole


def train_memory(shape: Shape, layout: Layout, training: Training, stage: int, over: Overheads) -> PhaseMemory:
    """Peak of the forward and backward passes on one stage: 1F1B keeps pp - stage microbatches alive."""
    state = policy_state(shape, layout, training, stage)
    tokens = training.tokens_per_microbatch
    kept, whole = layer_activations(shape, layout, training)
    alive = min(layout.pp - stage, training.microbatches)
    layers = stage_layers(shape.layers, layout.pp)[stage]
    activations = tokens * (alive * layers * kept + whole + 2 * training.itemsize * shape.hidden)
    return PhaseMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations * (1 + over.fragmentation),
        logits=_head(shape, layout, training, trains=True) if stage == layout.pp - 1 else 0.0,
        overhead=_resident(layout, over) + _engine_asleep(over),
    )


def measure_memory(shape: Shape, layout: Layout, training: Training, stage: int, over: Overheads) -> PhaseMemory:
    """Peak of a forward pass without gradients; gradient buffers and optimizer state stay where they are."""
    state = policy_state(shape, layout, training, stage)
    _, whole = layer_activations(shape, layout, training)
    activations = training.tokens_per_microbatch * (whole + 2 * training.itemsize * shape.hidden)
    return PhaseMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        activations=activations * (1 + over.fragmentation),
        logits=_head(shape, layout, training, trains=False) if stage == layout.pp - 1 else 0.0,
        overhead=_resident(layout, over) + _engine_asleep(over),
    )


def refit_memory(
    shape: Shape, layout: Layout, training: Training, stage: int, engine_tp: int, bucket_bytes: int, over: Overheads
) -> PhaseMemory:
    """The engine's weights wake while the policy is whole; one gathered tensor and one bucket are in flight."""
    state = policy_state(shape, layout, training, stage)
    return PhaseMemory(
        weights=state.weights,
        gradients=state.gradients,
        optimizer=state.optimizer,
        engine_weights=engine_weights(shape, engine_tp, training.itemsize),
        staging=training.itemsize * shape.largest_tensor + bucket_bytes,
        overhead=_resident(layout, over) + _engine_asleep(over),
    )


def engine_weights(shape: Shape, tp: int, itemsize: int = 2) -> float:
    """Bytes of one engine rank: key/value heads are repeated where there are fewer than ranks, experts are cut."""
    kv = max(shape.kv_heads / tp, 1.0)
    rows = (shape.heads / tp + 2 * kv) * shape.head_dim
    layer = shape.hidden * (rows + shape.heads / tp * shape.head_dim) + (rows if shape.qkv_bias else 0) + shape.norms
    layer += shape.mlp / (1 if shape.experts else tp) + shape.experts * shape.expert / tp
    table = math.ceil(shape.vocab / (64 * tp)) * 64 * shape.hidden
    return itemsize * (shape.layers * layer + table * (1 if shape.tied else 2) + shape.hidden)


def rollout_memory(
    shape: Shape,
    layout: Layout,
    device: Device,
    engine_tp: int,
    memory_share: float,
    max_sequences: int,
    over: Overheads,
) -> PhaseMemory:
    """vLLM takes ``memory_share`` of the GPU, the rest of it as key/value cache (negative: it does not start)."""
    budget = memory_share * device.memory - over.context * GIB
    weights = engine_weights(shape, engine_tp)
    prefill = 8192 * 2 * (2 * shape.hidden + 3 * max(shape.ffn, shape.expert_ffn * shape.experts_per_token) / engine_tp)
    workspace = prefill + 8 * max_sequences * shape.vocab
    return PhaseMemory(
        engine_weights=weights,
        activations=workspace,
        kv_cache=budget - weights - workspace,
        overhead=_resident(layout, over) + _engine_asleep(over),
    )


def kv_tokens(shape: Shape, cache_bytes: float, engine_tp: int) -> float:
    """Tokens whose keys and values one replica can hold, from the cache of one of its ranks."""
    per_rank = shape.kv_bytes_per_token() * max(1 / engine_tp, 1 / shape.kv_heads)
    return max(0.0, cache_bytes) / per_rank


def host_bytes_per_rank(
    shape: Shape, layout: Layout, training: Training, *, saves: bool, over: Overheads, stage: int = 0
) -> float:
    """Host memory of one GPU's two processes: while the engine rolls out, weights and optimizer state wait there."""
    state = policy_state(shape, layout, training, stage)
    waiting = state.weights + state.optimizer
    if training.keep_reference:
        waiting += 2 * state.weights  # the reference, and the present weights while it is in their place
    if saves:
        waiting += state.optimizer + state.weights / (layout.dp * layout.cp)
    return waiting + (over.policy_process + over.engine_process) * GIB


def _head(shape: Shape, layout: Layout, training: Training, *, trains: bool) -> float:
    """Whole: a pack's logits, and their gradient, which is as large. Chunked (megarl_kernels.linear_logprob): one
    chunk's, the rows of hidden states, and in training the weight's gradient in float32 and once more as it is added.
    """
    width, a, tokens = math.ceil(shape.vocab / layout.tp), training.itemsize, training.tokens_per_microbatch
    if training.logits == "whole":
        return training.workspace_bytes + (2 if trains else 1) * a * tokens * width
    rows = a * tokens * shape.hidden
    if not trains:
        return training.workspace_bytes + rows
    return training.workspace_bytes + 2 * rows + (4 + a) * width * shape.hidden


def _resident(layout: Layout, over: Overheads) -> float:
    """What a policy's process keeps on the GPU whatever it does."""
    groups = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.dp, layout.ep)) + (layout.world > 1)
    return GIB * (over.context + over.communicator * groups)


def _engine_asleep(over: Overheads) -> float:
    return GIB * (over.context + over.engine_graphs)

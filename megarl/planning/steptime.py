"""Seconds of every phase of a step: a roofline for the passes of the policy, a decode model for the engine, and the
bytes of the hand-over and the refit.

What hardware reaches of its data sheet stands in ``Rates``, fitted on published runs (calibrate.py) or learned from
one's own. Tokens are real ones: packing leaves no padding worth counting.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from megarl.planning.devices import Device
from megarl.planning.lengths import Lengths
from megarl.planning.memory import Layout, Logits, Recompute, engine_weights, policy_state, stage_layers
from megarl.planning.memory import Training as TrainingMemory
from megarl.planning.models import Shape

Refit = Literal["gathered", "planned"]
GPUS_PER_NODE = 8
REPRESENTATIVES = 128  # of a replica's responses, in the decode model


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a cluster reaches. Efficiencies are shares of the data sheet's figure."""

    train_efficiency: float = 0.45  # matrix products of forward and backward passes
    measure_efficiency: float = 0.45  # of forward passes alone
    moe_efficiency: float = 0.45  # of either, again, where the MLPs are experts
    link_efficiency: float = 0.6  # NVLink and network, in collectives
    host_link_efficiency: float = 0.4
    decode_bandwidth: float = 0.7  # reads of weights and cache
    decode_compute: float = 0.5
    decode_step_s: float = 3e-3  # of an engine step, whatever is in it
    decode_layer_s: float = 3e-5  # of a layer: launches
    decode_sequence_s: float = 1e-5  # of a response in an engine step: sampling and bookkeeping
    allreduce_s: float = 2e-5  # latency within a node
    network_allreduce_s: float = 8e-5  # latency across nodes
    refit_bytes_per_s: float = 6e9  # of the whole model, gathered
    refit_s: float = 1.0
    other_s: float = 3.0  # rewards, packing, logging: in no phase


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One round of rollouts of one agent."""

    samples: int
    distinct_prompts: int  # the engine's prefix cache fills in each once
    prompt_tokens: float  # mean
    lengths: Lengths

    @property
    def tokens(self) -> float:
        return self.samples * (self.prompt_tokens + self.lengths.mean)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one agent does in one step."""

    turns: tuple[Turn, ...]
    trained_share: float = 1.0  # of the samples
    updates: int = 1
    passes: int = 1  # logprob passes: the policy's own, and the reference's

    @cached_property
    def tokens(self) -> float:
        return sum(turn.tokens for turn in self.turns)

    @cached_property
    def context(self) -> float:
        """Tokens before an average token of a sequence."""
        whole = sum(
            t.tokens * ((t.prompt_tokens + t.lengths.mean) / 2 + t.lengths.mean_context) / 2 for t in self.turns
        )
        return whole / self.tokens

    @cached_property
    def response_tokens(self) -> float:
        return sum(turn.samples * turn.lengths.mean for turn in self.turns)


# ---------------------------------------------------------------- policy


def pass_seconds(  # noqa: PLR0913
    shape: Shape,
    layout: Layout,
    device: Device,
    *,
    tokens: float,
    context: float,
    tokens_per_microbatch: int,
    efficiency: float,
    passes: float,
    rates: Rates,
    recompute: Recompute = "none",
    head_again: bool = False,
) -> float:
    """Seconds of ``tokens`` through the policy, ``passes`` forward equivalents each (1 forward, 3 with backward).

    The slowest pipeline stage sets the pace: (microbatches + pp - 1) turns of it.
    """
    microbatch = tokens_per_microbatch * layout.cp
    count = max(1.0, tokens / (layout.dp * microbatch))
    per_rank = tokens / (layout.dp * count) / layout.cp  # tokens of a rank's microbatch
    reached = device.bf16_flops * efficiency * (rates.moe_efficiency if shape.experts else 1.0)
    stages = stage_layers(shape.layers, layout.pp)
    head = 2 * per_rank * shape.table
    head_passes = passes + head_again  # a chunked head makes its logits once more for the backward pass
    layers = shape.forward_flops(per_rank, context) - head
    again = {"none": 0.0, "mlp": _mlp_share(shape), "full": 1.0}[recompute]
    slowest = max(
        (layers * (passes + again) * count_ / shape.layers + (head * head_passes if i == layout.pp - 1 else 0.0))
        / layout.tp
        for i, count_ in enumerate(stages)
    )
    seconds = slowest / reached + _collectives(shape, layout, device, per_rank, passes + again, stages[0], rates)
    return (count + layout.pp - 1) * seconds


def _mlp_share(shape: Shape) -> float:
    """Of a layer's products, those of its MLP."""
    mlp = shape.mlp + shape.experts_per_token * shape.expert
    return mlp / (mlp + shape.attention)


def _collectives(
    shape: Shape, layout: Layout, device: Device, tokens: float, passes: float, layers: int, rates: Rates
) -> float:
    """Tensor-, context- and expert-parallel traffic of one stage's microbatch, none of it hidden."""
    row = 2 * tokens * shape.hidden
    nvlink = device.nvlink_bytes_per_s * rates.link_efficiency
    network = device.network_bytes_per_s * rates.link_efficiency
    seconds = 0.0
    if layout.tp > 1:  # two reductions a layer and pass, each passing a row's bytes twice
        seconds += 2 * 2 * row * (layout.tp - 1) / layout.tp / nvlink
    if layout.cp > 1:  # keys and values go round
        link = nvlink if layout.tp * layout.cp <= GPUS_PER_NODE else network
        seconds += 4 * tokens * shape.kv_heads * shape.head_dim / layout.tp * (layout.cp - 1) / link
    if layout.ep > 1:  # every token's copies go out and come back
        link = nvlink if layout.ep <= GPUS_PER_NODE else network
        seconds += 2 * row / layout.tp * shape.experts_per_token * (layout.ep - 1) / layout.ep / link
    return layers * passes * seconds


def train_seconds(
    shape: Shape,
    layout: Layout,
    device: Device,
    work: Workload,
    tokens_per_microbatch: int,
    recompute: Recompute,
    rates: Rates,
    logits: Logits = "whole",
) -> float:
    """All optimizer steps of a step: passes, the reduction of gradients, and Adam over its shard."""
    tokens = work.tokens * work.trained_share / work.updates
    passes = pass_seconds(
        shape,
        layout,
        device,
        tokens=tokens,
        context=work.context,
        tokens_per_microbatch=tokens_per_microbatch,
        efficiency=rates.train_efficiency,
        passes=3.0,
        recompute=recompute,
        head_again=logits == "chunked",
        rates=rates,
    )
    state = policy_state(shape, layout, TrainingMemory(tokens_per_microbatch=1, microbatches=1), 0)
    copies = layout.dp * layout.cp
    within = layout.tp * copies <= GPUS_PER_NODE
    link = (device.nvlink_bytes_per_s if within else device.network_bytes_per_s) * rates.link_efficiency
    reduction = (state.gradients + state.weights) * (copies - 1) / copies / link
    adam = 2 * (state.optimizer + state.gradients / copies) / device.memory_bytes_per_s
    return work.updates * (passes + reduction + adam)


def measure_seconds(
    shape: Shape, layout: Layout, device: Device, work: Workload, tokens_per_microbatch: int, rates: Rates
) -> float:
    """Logprobs of every rollout: once by the policy, once more by the reference where there is one."""
    if work.passes == 0:
        return 0.0
    return pass_seconds(
        shape,
        layout,
        device,
        tokens=work.tokens * work.passes,
        context=work.context,
        tokens_per_microbatch=tokens_per_microbatch,
        efficiency=rates.measure_efficiency,
        passes=1.0,
        rates=rates,
    )


# ---------------------------------------------------------------- engine


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One replica: its tensor-parallel size, responses in flight, and tokens its cache holds."""

    tp: int
    max_sequences: int
    cache_tokens: float


def rollout_seconds(shape: Shape, engine: Engine, replicas: int, device: Device, work: Workload, rates: Rates) -> float:
    """Until the last response of the last replica is done, turn after turn."""
    return sum(_turn_seconds(shape, engine, replicas, device, turn, rates) for turn in work.turns)


def _turn_seconds(shape: Shape, engine: Engine, replicas: int, device: Device, turn: Turn, rates: Rates) -> float:
    share = math.ceil(turn.samples / replicas)
    count = min(share, REPRESENTATIVES)
    weight = share / count  # responses that each representative stands for
    sizes = turn.lengths.quantile((np.arange(count) + 0.5) / count)
    sizes[-1] = turn.lengths.quantile(np.array(1 - 0.5 / turn.samples))  # of all replicas' responses the longest
    context = turn.prompt_tokens + turn.lengths.mean_context
    slots = max(1, int(min(engine.max_sequences, engine.cache_tokens / context) / weight))
    # responses come in no order of length: a fixed shuffle, so that a plan is the same every time
    order = np.random.default_rng(0).permutation(count)
    decode = 0.0
    for steps, alive, generated in batched(sizes[order], slots):
        batch = alive * weight
        decode += steps * step_seconds(shape, engine.tp, device, batch, turn.prompt_tokens + generated, rates)
    prefill = shape.forward_flops(turn.distinct_prompts / replicas * turn.prompt_tokens, turn.prompt_tokens / 2)
    return decode + prefill / (engine.tp * device.bf16_flops * rates.measure_efficiency)


def batched(sizes: np.ndarray, slots: int) -> Sequence[tuple[float, int, float]]:
    """Continuous batching of responses of these sizes, in this order, ``slots`` at a time: (decode steps, responses
    alive, tokens that an alive one has generated on average) of every stretch between two ends.
    """
    stretches: list[tuple[float, int, float]] = []
    ends: list[tuple[float, float]] = []  # (step at which it ends, step at which it began)
    now, begun, waiting = 0.0, 0.0, 0
    while ends or waiting < len(sizes):
        while waiting < len(sizes) and len(ends) < slots:
            heapq.heappush(ends, (now + float(sizes[waiting]), now))
            begun += now
            waiting += 1
        end = ends[0][0]
        stretches.append((end - now, len(ends), (now + end) / 2 - begun / len(ends)))
        now = end
        while ends and ends[0][0] <= now:
            begun -= heapq.heappop(ends)[1]
    return stretches


def step_seconds(shape: Shape, tp: int, device: Device, batch: float, context: float, rates: Rates) -> float:
    """One decode step of ``batch`` responses with so many tokens before each: weights are read once for all of them,
    keys and values once for each; products overlap with the weights' reading.
    """
    unread = shape.layers * (shape.experts - shape.experts_hit(batch)) * shape.expert / tp if shape.experts else 0.0
    weights = engine_weights(shape, tp) - 2 * unread - (0 if shape.tied else 2 * shape.table / tp)
    cache = batch * context * shape.kv_bytes_per_token() * max(1 / tp, 1 / shape.kv_heads)
    bandwidth = device.memory_bytes_per_s * rates.decode_bandwidth
    products = 2 * shape.active_parameters * batch / (tp * device.bf16_flops * rates.decode_compute)
    latency = rates.decode_layer_s
    if tp > 1:
        latency += 2 * (rates.allreduce_s if tp <= GPUS_PER_NODE else rates.network_allreduce_s)
    fixed = rates.decode_step_s + batch * rates.decode_sequence_s + shape.layers * latency
    return fixed + max(weights / bandwidth, products) + cache / bandwidth


# ---------------------------------------------------------------- between the two


def refit_seconds(shape: Shape, engine_tp: int, device: Device, how: Refit, rates: Rates) -> float:
    """Gathered: every rank builds every tensor. Planned: a GPU gets its own engine shard over NVLink, and no more."""
    if how == "gathered":
        return rates.refit_s + 2 * shape.parameters / rates.refit_bytes_per_s
    return rates.refit_s + engine_weights(shape, engine_tp) / (device.nvlink_bytes_per_s * rates.link_efficiency)


def handover_seconds(shape: Shape, layout: Layout, device: Device, rates: Rates) -> float:
    """Weights and optimizer state to host memory before the rollouts, and back after them."""
    state = policy_state(shape, layout, TrainingMemory(tokens_per_microbatch=1, microbatches=1), 0)
    return 2 * (state.weights + state.optimizer) / (device.host_link_bytes_per_s * rates.host_link_efficiency)

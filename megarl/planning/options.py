"""One agent on so many GPUs: which layouts fit, and how long a step takes in each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megarl.planning.devices import Device
from megarl.planning.memory import (
    Layout,
    Logits,
    Overheads,
    PhaseMemory,
    Recompute,
    Training,
    kv_tokens,
    measure_memory,
    policy_state,
    refit_memory,
    rollout_memory,
    train_memory,
)
from megarl.planning.models import Shape
from megarl.planning.steptime import (
    Engine,
    Rates,
    Refit,
    Workload,
    handover_seconds,
    measure_seconds,
    refit_seconds,
    rollout_seconds,
    train_seconds,
)

PHASES = ("rollout", "measure", "train", "refit", "handover")
IN_MEMORY = PHASES[:-1]
ENGINE_TP = (1, 2, 4, 8)
PP = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)
CP = (1, 2, 4, 8)
ONE_RANK = 8192  # tokens: sequences up to here are not cut over ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs of a job."""

    device: Device
    nodes: int
    gpus_per_node: int

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Settings that one run has for all of its agents."""

    tokens_per_microbatch: int
    recompute: Recompute


@dataclass(frozen=True, kw_only=True)
class Need:
    """An agent to be placed. ``layout`` and ``engine_tp`` are None where the planner is to find them."""

    name: str
    shape: Shape
    work: Workload
    longest: int  # tokens of a prompt and its response
    itemsize: int
    keep_reference: bool
    optimizer: str
    memory_share: float
    max_sequences: int
    layout: Layout | None = None
    engine_tp: int | None = None
    gpus: int | None = None

    @cached_property
    def microbatches_of_an_update(self) -> float:
        """Tokens of an update, to be divided by those of a microbatch."""
        return self.work.tokens * self.work.trained_share / self.work.updates


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every estimate needs beside the agent."""

    machine: Machine
    rates: Rates
    overheads: Overheads = field(default_factory=Overheads)
    bucket_bytes: int = 256 << 20
    logits: Logits = "whole"
    workspace_bytes: int = 512 << 20
    refit: Refit = "gathered"

    @property
    def usable(self) -> float:
        """Bytes of a GPU that a plan may fill."""
        return self.machine.device.memory - self.overheads.free * (1 << 30)


@dataclass(frozen=True, kw_only=True)
class Option:
    """An agent's layout on ``gpus`` GPUs, with what it costs."""

    need: Need
    gpus: int
    layout: Layout
    engine_tp: int
    choice: Choice
    seconds: dict[str, float]
    memory: dict[str, PhaseMemory] = field(repr=False)

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def peak(self) -> tuple[str, float]:
        """(phase, bytes) of the fullest phase."""
        return max(((phase, memory.total) for phase, memory in self.memory.items()), key=lambda item: item[1])


def layouts(need: Need, gpus: int, machine: Machine) -> Iterator[Layout]:
    """Every layout of the model on so many GPUs that divides it."""
    if need.layout is not None:
        if need.layout.world <= gpus:
            yield need.layout
        return
    shape = need.shape
    for tp in (1, 2, 4, 8):
        if tp > machine.gpus_per_node or not divides(shape, tp):
            continue
        for pp in PP:
            for cp in CP if need.longest > ONE_RANK else (1,):
                dp, rest = divmod(gpus, tp * pp * cp)
                if rest or not dp or pp > shape.layers or -(-shape.layers // pp) * (pp - 1) >= shape.layers:
                    continue
                for ep in (1, 2, 4, 8, 16, 32) if shape.experts else (1,):
                    if (tp * cp * dp) % ep == 0 and shape.experts % ep == 0:
                        yield Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, sp=tp > 1)


def divides(shape: Shape, tp: int) -> bool:
    """The backend's rule for tensor parallelism."""
    fits = shape.heads % tp == 0 and shape.ffn % tp == 0
    return fits and (shape.kv_heads % tp == 0 or tp % shape.kv_heads == 0)


def training_of(need: Need, layout: Layout, choice: Choice, setting: Setting) -> Training:
    per_rank = choice.tokens_per_microbatch * layout.cp * layout.dp
    return Training(
        tokens_per_microbatch=choice.tokens_per_microbatch,
        microbatches=max(1, round(need.microbatches_of_an_update / per_rank)),
        recompute=choice.recompute,
        logits=setting.logits,
        workspace_bytes=setting.workspace_bytes,
        itemsize=need.itemsize,
        keep_reference=need.keep_reference,
        optimizer="sgd" if need.optimizer == "sgd" else "adam",
    )


def policy_memory(need: Need, layout: Layout, choice: Choice, setting: Setting) -> dict[str, PhaseMemory]:
    """Phase -> the fullest GPU's bytes: the first stage holds most activations, the last one the logits."""
    training, over = training_of(need, layout, choice, setting), setting.overheads
    ends = sorted({0, layout.pp - 1})
    return {
        "measure": _fullest([measure_memory(need.shape, layout, training, stage, over) for stage in ends]),
        "train": _fullest([train_memory(need.shape, layout, training, stage, over) for stage in ends]),
    }


def engine_memory(
    need: Need, layout: Layout, engine_tp: int, choice: Choice, setting: Setting
) -> dict[str, PhaseMemory]:
    """Phase -> the fullest GPU's bytes, of the phases that the engine has a part in."""
    training, over, shape = training_of(need, layout, choice, setting), setting.overheads, need.shape
    ends, device = sorted({0, layout.pp - 1}), setting.machine.device
    refit = [refit_memory(shape, layout, training, stage, engine_tp, setting.bucket_bytes, over) for stage in ends]
    rollout = rollout_memory(shape, layout, device, engine_tp, need.memory_share, need.max_sequences, over)
    return {"rollout": rollout, "refit": _fullest(refit)}


def _fullest(stages: Sequence[PhaseMemory]) -> PhaseMemory:
    return max(stages, key=lambda memory: memory.total)


def overflow(memory: dict[str, PhaseMemory], setting: Setting) -> tuple[str, float] | None:
    """(phase, bytes too many) of the worst phase; None where all fit."""
    phase = max(memory, key=lambda name: memory[name].total)
    miss = memory[phase].total - setting.usable
    return (phase, miss) if miss > 0 else None


class Estimator:
    """Options of agents, with the decode model's results kept: it is the same for many layouts."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._rollouts: dict[tuple[str, int, int, int], float] = {}
        self.nearest: dict[str, tuple[float, str, Layout, int]] = {}  # agent -> (bytes, phase, layout, gpus)

    def options(self, need: Need, gpus: int, choices: Sequence[Choice]) -> list[Option]:
        """What fits on so many GPUs, best first."""
        found = []
        for layout in layouts(need, gpus, self.setting.machine):
            state = policy_state(need.shape, layout, training_of(need, layout, choices[0], self.setting), 0)
            if state.total > self.setting.usable:
                self._note(need, state.total - self.setting.usable, "train", layout, gpus)
                continue
            for choice in choices:
                if choice.tokens_per_microbatch * layout.cp >= need.longest:
                    found += self._with_engines(need, gpus, layout, choice)
        return sorted(found, key=lambda option: option.step)

    def seconds(self, need: Need, gpus: int, choice: Choice) -> dict[str, float]:
        """Phases of an agent whose layout is stated, whether or not it fits."""
        assert need.layout is not None and need.engine_tp is not None
        memory = engine_memory(need, need.layout, need.engine_tp, choice, self.setting)
        cache = kv_tokens(need.shape, memory["rollout"].kv_cache, need.engine_tp)
        return self._seconds(need, gpus, need.engine_tp, int(cache), self._policy_seconds(need, need.layout, choice))

    def _seconds(self, need: Need, gpus: int, tp: int, cache: int, policy: dict[str, float]) -> dict[str, float]:
        setting = self.setting
        refit = refit_seconds(need.shape, tp, setting.machine.device, setting.refit, setting.rates)
        rollout = self._rollout_seconds(need, tp, max(1, gpus // tp), cache)
        return {phase: {"rollout": rollout, "refit": refit, **policy}[phase] for phase in PHASES}

    def _with_engines(self, need: Need, gpus: int, layout: Layout, choice: Choice) -> list[Option]:
        trained = policy_memory(need, layout, choice, self.setting)
        if self._misses(need, trained, layout, gpus):
            return []
        found, policy = [], self._policy_seconds(need, layout, choice)
        for tp in ENGINE_TP if need.engine_tp is None else (need.engine_tp,):
            if gpus % tp or tp > self.setting.machine.gpus_per_node or need.shape.heads % tp:
                continue
            memory = engine_memory(need, layout, tp, choice, self.setting) | trained
            if self._misses(need, memory, layout, gpus):
                continue
            cache = kv_tokens(need.shape, memory["rollout"].kv_cache, tp)
            if cache < need.longest:  # not one sequence
                room = need.longest * need.shape.kv_bytes_per_token() / tp
                self._note(need, room - memory["rollout"].kv_cache, "rollout", layout, gpus)
                continue
            found.append(
                Option(
                    need=need,
                    gpus=gpus,
                    layout=layout,
                    engine_tp=tp,
                    choice=choice,
                    seconds=self._seconds(need, gpus, tp, int(cache), policy),
                    memory={phase: memory[phase] for phase in IN_MEMORY},
                )
            )
        return found

    def _policy_seconds(self, need: Need, layout: Layout, choice: Choice) -> dict[str, float]:
        shape, device, rates = need.shape, self.setting.machine.device, self.setting.rates
        tokens = choice.tokens_per_microbatch
        return {
            "measure": measure_seconds(shape, layout, device, need.work, tokens, rates),
            "train": train_seconds(
                shape, layout, device, need.work, tokens, choice.recompute, rates, self.setting.logits
            ),
            "handover": handover_seconds(shape, layout, device, rates),
        }

    def _rollout_seconds(self, need: Need, tp: int, replicas: int, cache: int) -> float:
        key = (need.name, tp, replicas, cache)
        if key not in self._rollouts:
            engine = Engine(tp=tp, max_sequences=need.max_sequences, cache_tokens=cache)
            setting = self.setting
            self._rollouts[key] = rollout_seconds(
                need.shape, engine, replicas, setting.machine.device, need.work, setting.rates
            )
        return self._rollouts[key]

    def _misses(self, need: Need, memory: dict[str, PhaseMemory], layout: Layout, gpus: int) -> bool:
        miss = overflow(memory, self.setting)
        if miss is not None:
            self._note(need, miss[1], miss[0], layout, gpus)
        return miss is not None

    def _note(self, need: Need, miss: float, phase: str, layout: Layout, gpus: int) -> None:
        """Remember the layout that misses by least, for whoever asks why nothing fits."""
        if need.name not in self.nearest or miss < self.nearest[need.name][0]:
            self.nearest[need.name] = (miss, phase, layout, gpus)


def slimmer(need: Need, max_tokens: int) -> Need:
    """The agent with responses of at most so many tokens, the mean in proportion."""
    turns = tuple(
        replace(
            turn,
            lengths=replace(
                turn.lengths, mean=turn.lengths.mean * max_tokens / turn.lengths.limit, limit=float(max_tokens)
            ),
        )
        for turn in need.work.turns
    )
    cut = int(need.work.turns[0].lengths.limit) - max_tokens
    return replace(need, work=replace(need.work, turns=turns), longest=need.longest - cut)

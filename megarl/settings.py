"""The sections of a run's configuration that more than one room reads. No torch, no I/O.

YAML says only what differs from the defaults here; an unknown key is an error. Algorithmic numbers are global (per
step, per update), memory numbers are per rank and in tokens.
"""

import difflib
import math
from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def _spelled(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


# what becomes a folder, a metric's key or an actor's name; name=3 is a name, too
Name = Annotated[str, BeforeValidator(_spelled), Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._+-]*$", max_length=100)]


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The hint behind an unknown name, "; did you mean PREFIXother?"; empty where no known one resembles it."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


class Section(BaseModel):
    """A frozen piece of configuration that refuses unknown keys and does not coerce ("3" is no integer)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class BatchConfig(Section):
    """How much is sampled and trained in a step."""

    prompts_per_step: int = Field(default=64, ge=1, description="prompts that every agent answers in one step")
    samples_per_prompt: int = Field(default=16, ge=1, description="rollouts per prompt and agent: the voters")
    train_samples_per_prompt: int | None = Field(
        default=None, ge=1, description="of those, how many train, first in index order; null: all"
    )
    tokens_per_microbatch: int = Field(default=16384, ge=1, description="tokens per rank in one packed forward pass")
    updates_per_step: int = Field(default=1, ge=1, description="optimizer steps per step, each on an equal part")
    refill_rounds: int | None = Field(
        default=None,
        ge=0,
        description="dynamic sampling (DAPO): prompts whose rewards are all equal do not train, and at most so many "
        "times others are dealt in their place; null: off. Where votes are the labels this leaves out consensus",
    )

    samples_per_update: int | None = Field(
        default=None, ge=1, description="instead of updates_per_step: so many equal parts that none is larger"
    )

    def updates(self, samples: int) -> int:
        """Optimizer steps of a step with so many training samples."""
        if self.samples_per_update is None:
            return self.updates_per_step
        return max(1, -(-samples // self.samples_per_update))

    @model_validator(mode="after")
    def _one_rule_of_updates(self) -> "BatchConfig":
        if self.samples_per_update is not None and self.updates_per_step != 1:
            raise ValueError(
                f"updates_per_step={self.updates_per_step} and samples_per_update={self.samples_per_update}: "
                "give one of the two"
            )
        return self

    @model_validator(mode="after")
    def _no_more_trained_than_voted(self) -> "BatchConfig":
        if self.train_samples_per_prompt and self.train_samples_per_prompt > self.samples_per_prompt:
            raise ValueError(
                f"train_samples_per_prompt={self.train_samples_per_prompt} is more than "
                f"samples_per_prompt={self.samples_per_prompt}: a rollout that was not sampled cannot train"
            )
        return self


class LossConfig(Section):
    """Clipped surrogate with optional KL term and truncated importance sampling (PPO, GRPO, DAPO, GSPO, TIS)."""

    clip_low: float = Field(default=0.2, gt=0, lt=1, description="the ratio counts from 1 - clip_low")
    clip_high: float = Field(default=0.2, gt=0, description="to 1 + clip_high (clip-higher: 0.28)")
    ratio_level: Literal["token", "sequence"] = Field(
        default="token",
        description="sequence (GSPO): one ratio per response, the geometric mean of its tokens'; clip_low and "
        "clip_high are then about 3e-4 and 4e-4",
    )
    dual_clip: float | None = Field(default=None, gt=1, description="bound c of the loss at negative advantages")
    kl_coef: float = Field(default=0.0, ge=0, description="beta; above 0 the initial weights are kept as reference")
    kl: Literal["k1", "k2", "k3"] = Field(
        default="k3", description="estimate per token, d = reference - policy logprob: -d, d^2 / 2, e^d - d - 1"
    )
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"] = Field(
        default="token-mean",
        description="of tokens' losses over a whole update: their mean; the mean over responses of each one's mean, or "
        "sum; the sum over responses * loss.max_tokens",
    )
    max_tokens: int | None = Field(default=None, ge=1, description="L_max of seq-mean-token-sum-norm (Dr.GRPO)")
    tis_cap: float | None = Field(default=2.0, gt=0, description="cap of the policy/engine weight; null: off")

    @model_validator(mode="after")
    def _norm_needs_its_constant(self) -> "LossConfig":
        if self.aggregation == "seq-mean-token-sum-norm" and self.max_tokens is None:
            raise ValueError("aggregation=seq-mean-token-sum-norm needs loss.max_tokens (L_max, constant for a run)")
        return self


class AdvantageConfig(Section):
    """Rewards -> advantages, within a group: what one agent said to one prompt in one role."""

    mode: Literal["grpo", "dr_grpo", "rloo", "batch"] = Field(
        default="grpo",
        description="grpo: (r - mean) / (std + eps); dr_grpo: r - mean; rloo: r - mean of the others; batch: r - mean, "
        "over the deviation of all the agent's rewards of the step",
    )
    ddof: Literal[0, 1] = Field(default=1, description="1: sample deviation, 0: population deviation")
    eps: float = Field(default=1e-6, ge=0, description="added to the deviation")


class KernelsConfig(Section):
    """How Megatron policies turn hidden states into logprobs, in measure and update."""

    backend: Literal["auto", "torch", "triton", "liger"] = Field(
        default="auto", description="auto: Triton on sm_80 and newer, else torch; liger: the fused head alone"
    )
    fused_head: bool = Field(
        default=True, description="logprobs from hidden states, chunk by chunk; false: from the logits of a whole pack"
    )
    workspace_bytes: int = Field(default=512 << 20, ge=1 << 16, description="of the fused head's chunks, per rank")
    compare: bool = Field(
        default=False, description="compute both ways, at thrice the cost, and log the largest differences"
    )

    @model_validator(mode="after")
    def _liger_is_a_head(self) -> "KernelsConfig":
        if self.backend == "liger" and not self.fused_head:
            raise ValueError("kernels.backend=liger is a fused head: it needs kernels.fused_head=true")
        return self


class RewardConfig(Section):
    """Shaping of a method's rewards: DAPO's soft overlong punishment, see ``advantages.overlong``."""

    overlong_buffer: int | None = Field(
        default=None, ge=1, description="the last so many of max_tokens are punished, ever more; null: off"
    )
    overlong_penalty: float = Field(default=1.0, gt=0, description="at max_tokens and beyond")


class SamplingConfig(Section):
    """How rollouts are drawn. Nothing is taken from a model's generation_config but its end-of-sequence ids."""

    temperature: float = Field(default=1.0, gt=0, description="divides logits, in the engine and in the policy")
    max_tokens: int = Field(default=1024, ge=1, description="tokens of one response; more are cut off")
    top_p: float = Field(default=1.0, gt=0, le=1, description="evaluation only: training needs the whole vocabulary")
    top_k: int = Field(default=0, ge=0, description="evaluation only; 0: off")


AnswerStyle = Literal["boxed", "tag", "mark", "letter", "verdict_sentence", "verdict_boxed", "last-number"]


class AnswersConfig(Section):
    """How a response is read for its answer; tag: <answer>...</answer>, mark: a line "#### 7", letter: an option."""

    style: AnswerStyle = Field(default="boxed", description="where the answer stands; boxed: in the last \\boxed{}")
    fallback: tuple[Literal["boxed", "tag", "mark", "last-number"], ...] = Field(
        default=(), strict=False, description="styles to try in turn where the first finds nothing"
    )
    options: str = Field(default="ABCD", pattern="^[A-J]+$", description="of style letter")
    truncated: Literal["invalid", "read"] = Field(default="invalid", description="may a response cut by length vote?")
    verdict: Literal["sentence", "keywords", "boxed"] = Field(
        default="sentence",
        description="keywords: without the exact sentence one is guessed (CoVerRL release); boxed: in the last box",
    )


class ScheduleConfig(Section):
    """Learning rate as a pure function of the step (or update) number."""

    decay: Literal["constant", "linear", "cosine"] = Field(default="constant", description="course after the warmup")
    warmup: int | float = Field(default=0, ge=0, description="steps (integer), or a share of the run (0 < x < 1)")
    min_ratio: float = Field(default=0.0, ge=0, le=1, description="of the peak, at the end of the decay")
    per: Literal["step", "update"] = Field(default="step", description="what is counted: steps or optimizer steps")

    @model_validator(mode="after")
    def _warmup_says_what_it_counts(self) -> "ScheduleConfig":
        if isinstance(self.warmup, float) and self.warmup >= 1:
            raise ValueError(f"warmup={self.warmup}: a share of the run is below 1, a number of steps an integer")
        return self


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """Of one agent's policy."""

    name: Literal["adam", "sgd"] = Field(
        default="adam", description="adam: AdamW; sgd: without momentum, in float32 alone"
    )
    lr: float = Field(default=1e-6, gt=0, description="peak learning rate")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), strict=False, description="of adam's two moments")
    eps: float = Field(default=1e-8, gt=0, description="of adam's denominator")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled, times lr; spares norms and biases")
    clip_grad: float = Field(default=1.0, ge=0, description="global norm; 0: off")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="of the learning rate")


class LayoutConfig(Section):
    """How one policy is spread over its ranks. World size = tp * pp * cp * dp."""

    tp: int = Field(default=1, ge=1, description="tensor parallel ranks: a layer's matrices are cut; within a node")
    pp: int = Field(default=1, ge=1, description="pipeline stages: the layers are cut")
    cp: int = Field(default=1, ge=1, description="context parallel ranks: sequences are cut")
    dp: int = Field(default=1, ge=1, description="data parallel ranks: samples are dealt, adam's state is cut")
    ep: int = Field(default=1, ge=1, description="expert parallel, over the cp * dp ranks")
    sp: bool = Field(default=False, description="sequence parallel, inside the tensor-parallel group")

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def sequence_multiple(self) -> int:
        """Every packed sequence is padded to a multiple of this (context parallel cuts it into 2 cp chunks)."""
        return 2 * self.cp if self.cp > 1 else 1

    @property
    def total_multiple(self) -> int:
        """A whole microbatch is padded to a multiple of this (sequence parallel splits it over tp)."""
        return math.lcm(self.sequence_multiple, self.cp * self.tp if self.sp else 1)

    def __str__(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp), ("cp", self.cp), ("dp", self.dp), ("ep", self.ep))
        parts = [f"{key.upper()}{size}" for key, size in sizes if size > 1]
        return "x".join(parts) + ("+SP" if self.sp else "") or "1"


class EngineConfig(Section):
    """Who generates an agent's rollouts, on the policy's own GPUs."""

    backend: Literal["vllm", "reference", "replay"] = Field(
        default="vllm", description="reference: transformers in this process; replay: the rollouts of an earlier run"
    )
    tp: int = Field(default=1, ge=1, description="tensor parallel ranks of one replica; within a node")
    replicas: int | None = Field(default=None, ge=1, description="null: as many as fit on the policy's GPUs")
    max_sequences: int = Field(default=256, ge=1, description="responses in flight per replica")
    memory_share: float = Field(default=0.6, gt=0, le=1, description="of GPU memory, while rolling out")
    kv_cache_gib: float = Field(default=1.0, gt=0, description="on CPU, where no share can be taken")
    restarts: int = Field(
        default=2, ge=0, description="times that an engine which dies over a step's rollouts is started again"
    )
    replay: str | None = Field(default=None, description="run directory whose rollouts are served again")

    @model_validator(mode="after")
    def _replay_has_a_source(self) -> "EngineConfig":
        if (self.backend == "replay") != (self.replay is not None):
            raise ValueError("engine.replay names a run directory exactly when engine.backend is replay")
        return self


class AgentConfig(Section):
    """One policy and its engine: everything model-specific lives here; only answers leave it."""

    model: str = Field(description="directory of a Hugging Face model, or its hub name")
    view: str = Field(default="original", description="which view of a prompt this agent reads (data.views)")
    seats: dict[Name, str] = Field(
        default={}, description="name -> view: one policy answers every prompt under several names (Co-rewarding)"
    )
    template: dict[str, bool | int | str] = Field(
        default={}, description="arguments of the chat template, e.g. {enable_thinking: true}"
    )
    backend: Literal["megatron", "reference"] = Field(
        default="megatron", description="of the policy; reference: transformers in this process, one rank"
    )
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="of weights in policy and engine")
    seed: int | None = Field(default=None, description="generation stream; null: from the agent's name")
    chat_template: bool = Field(default=True, description="false: contents joined by newlines, for a base model")
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="of the policy")
    layout: LayoutConfig = Field(default=LayoutConfig(), description="of the policy's ranks")
    engine: EngineConfig = Field(default=EngineConfig(), description="of the rollouts")
    kl_coef: float | None = Field(default=None, ge=0, description="instead of loss.kl_coef")
    samples_per_prompt: int | None = Field(default=None, ge=1, description="instead of batch.samples_per_prompt")
    max_tokens: int | None = Field(default=None, ge=1, description="instead of sampling.max_tokens")

    def seated(self, name: str) -> dict[str, str]:
        """Name -> view, under which the agent called ``name`` is dealt prompts: its own, unless it has seats."""
        return dict(self.seats) or {name: self.view}

    @property
    def replicas(self) -> int:
        return self.engine.replicas or max(1, self.layout.world // self.engine.tp)

    @property
    def slots(self) -> int:
        """GPUs (on CPU: process slots) that the agent owns; policy and engine share them."""
        return max(self.layout.world, self.engine.tp * self.replicas)


class ClusterConfig(Section):
    """Where a run's ranks are placed."""

    address: str | None = Field(default=None, description="Ray head to join (host:port); null: a cluster of one's own")
    nodes: int = Field(default=1, ge=1, description="nodes of the run")
    gpus_per_node: int = Field(
        default=8, ge=1, description="on CPU: process slots per node; the largest, where nodes differ"
    )
    groups: dict[Name, Annotated[tuple[Name, ...], Field(strict=False)]] = Field(
        default={},
        description="group of nodes -> agents that sit there and nowhere else; nodes tell their group by Ray's label "
        "megarl.io/group. `megarl launch slurm` fills it in for a heterogeneous job",
    )
    device: Literal["auto", "cuda", "cpu"] = Field(default="auto", description="auto: cuda where there is a GPU")
    start_timeout_s: float = Field(default=60.0, gt=0, description="for nodes to come up and slots to be granted")
    check_network: bool | None = Field(
        default=None, description="an all-reduce between the nodes before anything is built; null: where there are GPUs"
    )
    call_timeout_s: float = Field(
        default=7200.0,
        gt=0,
        description="for one agent's part of a phase: beyond that it is hung, and the run ends",
    )
    threads_per_rank: int = Field(default=1, ge=1, description="CPU threads of each rank")

    def checks_network(self, device: str) -> bool:
        """Is an all-reduce to be tried first?"""
        return device == "cuda" if self.check_network is None else self.check_network

    def group_of(self, agent: str) -> str | None:
        """The group of nodes where an agent sits; None: anywhere."""
        return next((group for group, agents in self.groups.items() if agent in agents), None)


class ViewConfig(Section):
    """One wording of the prompts: a column, with text before and after it."""

    column: str | None = Field(default=None, description="null: data.prompt")
    path: str | None = Field(default=None, description="a second file, same ids in the same order; null: data.path")
    before: str = Field(default="", description="text in front of the prompt")
    after: str = Field(default="", description="text behind it, such as what form the answer shall have")


class DataConfig(Section):
    """A prompt file: .parquet, .jsonl, .json (a list of rows), .csv. A prompt is a text or a list of chat messages."""

    path: str = Field(description="the file")
    prompt: str = Field(default="prompt", description="column of the prompt")
    gold: str | None = Field(default=None, description="column of the true answer: RLVR and diagnostics only")
    gold_after: str | None = Field(default=None, description="the true answer is what follows this mark, e.g. '####'")
    wrong: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="columns of wrong options: they and data.gold's follow the prompt under letters, in an order drawn "
        "from the row's id, and the true answer is a letter",
    )
    id: str | None = Field(default=None, description="column of a unique id; null: the row number")
    views: dict[str, ViewConfig] = Field(
        default={"original": ViewConfig()}, description="name -> a wording; agents.X.view picks one"
    )
    max_prompt_tokens: int = Field(default=1024, ge=1, description="longer prompts are left out, and counted")
    limit: int | None = Field(default=None, ge=1, description="first rows only")
    shuffle: bool = Field(default=True, description="another order every epoch; false: as in the file")


class CheckpointConfig(Section):
    """What can be resumed: weights, optimizers, the place in the data."""

    every_steps: int | None = Field(
        default=None, ge=1, description="steps between checkpoints, and one after the last; null: none"
    )
    keep: int = Field(default=2, ge=1, description="complete checkpoints that stay")
    background: bool = Field(
        default=False,
        description="write while the next rollouts are drawn, from a copy in host memory as large as what is saved",
    )


class EvaluationConfig(Section):
    """Sampled accuracy on a file with true answers, before the first step, every so often, and at the end."""

    every_steps: int | None = Field(default=None, ge=1, description="steps between evaluations; null: none")
    data: DataConfig | None = Field(default=None, description="the file, with data.gold")
    samples_per_prompt: int = Field(default=4, ge=1, description="answers per problem and agent")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="of these answers")
    revise: bool = Field(default=False, description="each answer is verified once, and revised once if called wrong")
    pass_at: tuple[int, ...] = Field(
        default=(), strict=False, description="k of pass@k and maj@k; empty: 1, 2, 4 ... and samples_per_prompt"
    )
    confidence: float = Field(default=0.95, gt=0, lt=1, description="of the bootstrap intervals over problems")
    resamples: int = Field(default=2000, ge=1, description="of the bootstrap")

    @model_validator(mode="after")
    def _has_a_file(self) -> "EvaluationConfig":
        if (self.every_steps is None) != (self.data is None):
            raise ValueError("evaluation.every_steps and evaluation.data are given together or not at all")
        if self.data is not None and self.data.gold is None:
            raise ValueError("evaluation.data.gold names no column: accuracy needs true answers")
        return self

    @model_validator(mode="after")
    def _k_is_among_the_samples(self) -> "EvaluationConfig":
        beyond = [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]
        if beyond:
            raise ValueError(
                f"evaluation.pass_at={list(self.pass_at)}: {beyond[0]} is not within 1 .. "
                f"samples_per_prompt={self.samples_per_prompt}"
            )
        return self

    def due(self, step: int) -> bool:
        """Is the cohort to be evaluated before ``step``?"""
        return self.every_steps is not None and step % self.every_steps == 0


class ReshardConfig(Section):
    """How new weights reach the engines."""

    method: Literal["gathered", "planned"] = Field(
        default="gathered",
        description="gathered: every rank builds every tensor; planned: each engine rank gets its own shards and no "
        "more (Megatron policies with vLLM engines)",
    )
    bucket_bytes: int = Field(default=256 << 20, ge=1 << 16, description="bytes of weights that travel at once")
    verify_every: int | None = Field(
        default=50,
        ge=1,
        description="planned: the first refit and every so many after it are verified, by checksums of every tensor "
        "against a whole export of the policy and by the logprobs of a short text; null: none",
    )

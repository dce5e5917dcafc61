"""RunConfig: one run, checked before anything starts.

Hydra composes YAML at the door (``compose``); what it may say is decided here, by one frozen pydantic tree. No torch.
"""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, ValidationError, model_validator
from yaml import YAMLError

from megarl.algos import AnyAlgorithm
from megarl.algos.corewarding import CoRewarding
from megarl.guard_settings import GuardConfig
from megarl.settings import (
    AdvantageConfig,
    AgentConfig,
    AnswersConfig,
    BatchConfig,
    CheckpointConfig,
    ClusterConfig,
    DataConfig,
    EvaluationConfig,
    KernelsConfig,
    LossConfig,
    Name,
    ReshardConfig,
    RewardConfig,
    SamplingConfig,
    Section,
    did_you_mean,
)
from megarl.shape import check_model

_HERE = Path(__file__).resolve().parent
CONFIG_DIR = _HERE / "configs" if (_HERE / "configs").is_dir() else _HERE.parent / "configs"
# ${configs:} in a YAML file: where the files shipped with the configurations stand, in a checkout or in a wheel
OmegaConf.register_new_resolver("configs", lambda: str(CONFIG_DIR), replace=True)


class RunConfig(Section):
    """Everything a run is made of."""

    experiment: Name = Field(default="default", description="what is tried; an experiment file sets it")
    name: Name = Field(default="run", description="which run of it")
    output: str = Field(default="runs", description="run directories are OUTPUT/EXPERIMENT/NAME")
    seed: int = Field(default=0, description="of the order of prompts and of all sampling")
    steps: int = Field(ge=1, description="steps in all, those before a resume included")
    algo: AnyAlgorithm = Field(discriminator="name", description="the method, by algo.name")
    data: DataConfig
    batch: BatchConfig = BatchConfig()
    sampling: SamplingConfig = SamplingConfig()
    answers: AnswersConfig = AnswersConfig()
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    agents: dict[Name, AgentConfig] = Field(min_length=1, description="name -> agent")
    cluster: ClusterConfig = ClusterConfig()
    kernels: KernelsConfig = KernelsConfig()
    reshard: ReshardConfig = ReshardConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    megatron: dict[str, Any] = Field(default={}, description="native TransformerConfig fields, checked by the backend")
    vllm: dict[str, Any] = Field(default={}, description="native engine arguments, checked by the vLLM backend")

    @property
    def run_dir(self) -> Path:
        return Path(self.output) / self.experiment / self.name

    @model_validator(mode="after")
    def _parts_fit_together(self) -> "RunConfig":
        self._check_seats()
        self.algo.check(self.seats)
        if "gold" in self.algo.needs and self.data.gold is None:
            raise ValueError(f"algo.name={self.algo.name} learns from true answers: name their column in data.gold")
        measured = sorted(self.algo.needs - {"gold"})
        if self.batch.refill_rounds is not None and measured:
            raise ValueError(
                f"batch.refill_rounds={self.batch.refill_rounds} judges prompts by rewards that answers alone decide, "
                f"but algo.name={self.algo.name} measures {', '.join(measured)}: leave it null"
            )
        if self.sampling.top_p < 1 or self.sampling.top_k:
            raise ValueError(
                f"sampling.top_p={self.sampling.top_p}, sampling.top_k={self.sampling.top_k}: training rollouts are "
                "drawn from the whole vocabulary (top_p 1, top_k 0), or the engine's logprobs would be renormalised"
            )
        for name, agent in self.agents.items():
            self._check_agent(name, agent)
            self._check_batch(name, agent)
        self._check_backends()
        self._check_groups()
        self._check_slots()
        _warn_of_twins(self.agents)
        return self

    def _check_seats(self) -> None:
        if isinstance(self.algo, CoRewarding) and len(self.agents) > 1:
            raise ValueError(
                f"algo.name={self.algo.name} trains one policy, but there are agents {', '.join(self.agents)}: keep "
                "one agent and give it seats (for two policies there is algo.name=corl)"
            )
        taken: dict[str, str] = {}
        for name, agent in self.agents.items():
            for seat in {name, *agent.seats}:
                other = taken.setdefault(seat, name)
                if other != name:
                    raise ValueError(
                        f"agents.{name} and agents.{other} both answer to {seat}: every name is of one agent"
                    )

    def _check_agent(self, name: str, agent: AgentConfig) -> None:
        key, layout = f"agents.{name}", agent.layout
        for seat, view in agent.seated(name).items():
            if view not in self.data.views:
                field = f"{key}.seats.{seat}" if agent.seats else f"{key}.view"
                raise ValueError(f"{field}={view} is none of data.views: {', '.join(self.data.views)}")
        if layout.sp and layout.tp == 1:
            raise ValueError(f"{key}.layout.sp=true shares the work of a tensor-parallel group: it needs tp > 1")
        longest = self.max_prompt_tokens + self.sampling_of(name).max_tokens
        capacity = self.batch.tokens_per_microbatch * layout.cp
        padded = -(-longest // layout.sequence_multiple) * layout.sequence_multiple
        if padded > capacity // layout.total_multiple * layout.total_multiple:
            whose = "data" if self.max_prompt_tokens == self.data.max_prompt_tokens else "algo"
            raise ValueError(
                f"batch.tokens_per_microbatch={self.batch.tokens_per_microbatch} with {key}.layout.cp={layout.cp} "
                f"holds {capacity} tokens, but a sequence may have {whose}.max_prompt_tokens + max_tokens = {longest}: "
                f"set it to at least {-(-longest // layout.total_multiple) * layout.total_multiple // layout.cp}"
            )
        limit, buffer = agent.max_tokens or self.sampling.max_tokens, self.reward.overlong_buffer
        if buffer is not None and buffer > limit:
            raise ValueError(f"reward.overlong_buffer={buffer} is more than the {limit} tokens {key} may answer with")
        tp = max(layout.tp, agent.engine.tp)
        if tp > self.cluster.gpus_per_node:
            raise ValueError(
                f"{key} wants tensor parallel {tp}, but cluster.gpus_per_node={self.cluster.gpus_per_node}: "
                "a tensor-parallel group stays within a node"
            )
        check_model(key, agent, self.engine_tokens(name))

    def _check_batch(self, name: str, agent: AgentConfig) -> None:
        key, voters, trained = f"agents.{name}", self.samples(name), self.batch.train_samples_per_prompt
        if trained is not None and trained > voters:
            raise ValueError(
                f"batch.train_samples_per_prompt={trained} is more than the {voters} rollouts per prompt of {key}: a "
                "rollout that was not sampled cannot train"
            )
        if (trained or voters) == 1:  # mode=batch, too, takes the group's own mean
            raise ValueError(
                f"{key} trains on 1 rollout per prompt: compared with itself alone it has advantage 0 under "
                f"advantage.mode={self.advantage.mode}, and nothing is learnt; give at least 2"
            )
        samples = self.batch.prompts_per_step * (trained or voters)
        if self.batch.updates_per_step > samples:
            raise ValueError(
                f"batch.updates_per_step={self.batch.updates_per_step} is more than the {samples} training samples of "
                f"{key}"
            )
        schedule = agent.optimizer.schedule
        if isinstance(schedule.warmup, int) and schedule.per == "step" and schedule.warmup >= self.steps > 1:
            warnings.warn(
                f"{key}.optimizer.schedule.warmup={schedule.warmup} of steps={self.steps}: the learning rate never "
                "reaches its peak",
                stacklevel=2,
            )
        if self.batch.samples_per_update is not None and agent.optimizer.schedule.per == "update":
            raise ValueError(
                f"{key}.optimizer.schedule.per=update needs to know the number of updates: set batch.updates_per_step "
                "instead of batch.samples_per_update"
            )

    def _check_backends(self) -> None:
        for name, agent in self.agents.items():
            if agent.backend == "reference" and agent.layout.world > 1:
                raise ValueError(f"agents.{name}.layout={agent.layout}: backend=reference is one process")
            if agent.engine.backend == "replay" and self.evaluation.data is not None:
                raise ValueError(f"agents.{name}.engine.backend=replay has no rollouts of an evaluation: leave it out")
            if self.reshard.method == "planned":
                self._check_planned(name, agent)
        if self.megatron and not any(agent.backend == "megatron" for agent in self.agents.values()):
            raise ValueError(f"megatron: {', '.join(self.megatron)}: no agent has backend=megatron")
        if self.vllm and not any(agent.engine.backend == "vllm" for agent in self.agents.values()):
            raise ValueError(f"vllm: {', '.join(self.vllm)}: no agent has engine.backend=vllm")

    def _check_planned(self, name: str, agent: AgentConfig) -> None:
        if agent.backend != "megatron" or agent.engine.backend != "vllm":
            raise ValueError(
                f"reshard.method=planned is of Megatron policies with vLLM engines, but agents.{name} has "
                f"backend={agent.backend}, engine.backend={agent.engine.backend}: use gathered"
            )
        if agent.engine.tp * agent.replicas > agent.layout.world:
            raise ValueError(
                f"reshard.method=planned: the {agent.replicas} x TP{agent.engine.tp} engine ranks of agents.{name} are "
                f"more than its policy's {agent.layout.world} ranks: use gathered, or smaller engines"
            )

    def _check_groups(self) -> None:
        seated = [agent for agents in self.cluster.groups.values() for agent in agents]
        if seated and sorted(seated) != sorted(self.agents):
            raise ValueError(
                f"cluster.groups holds the agents {', '.join(seated)}, the run has {', '.join(self.agents)}: every "
                "agent is in exactly one group"
            )

    def _check_slots(self) -> None:
        wanted = {name: agent.slots for name, agent in self.agents.items()}
        available = self.cluster.nodes * self.cluster.gpus_per_node
        if self.cluster.address is None and sum(wanted.values()) > available:
            asked = " + ".join(f"{name} {slots}" for name, slots in wanted.items())
            raise ValueError(
                f"agents ask for {sum(wanted.values())} GPUs or CPU slots ({asked}), but cluster.nodes * "
                f"cluster.gpus_per_node = {available}"
            )

    @property
    def seats(self) -> tuple[str, ...]:
        """Names under which prompts are dealt: those of the agents, but for agents that have seats."""
        return tuple(seat for name, agent in self.agents.items() for seat in agent.seated(name))

    def agent_at(self, seat: str) -> AgentConfig:
        """The agent that sits there."""
        return next(agent for name, agent in self.agents.items() if seat in agent.seated(name))

    @property
    def max_prompt_tokens(self) -> int:
        """Longest prompt of any turn."""
        return self.algo.prompt_limit(self.data.max_prompt_tokens)

    def engine_tokens(self, agent: str) -> int:
        """Longest sequence that an agent's engine must hold, in training or evaluation."""
        training = self.max_prompt_tokens + self.sampling_of(agent).max_tokens
        data = self.evaluation.data
        return training if data is None else max(training, data.max_prompt_tokens + self.evaluation.sampling.max_tokens)

    def samples(self, agent: str) -> int:
        """Rollouts per prompt of an agent."""
        return self.agents[agent].samples_per_prompt or self.batch.samples_per_prompt

    def sampling_of(self, agent: str) -> SamplingConfig:
        """Sampling settings of an agent's training rollouts."""
        limit = self.agents[agent].max_tokens
        return self.sampling if limit is None else self.sampling.model_copy(update={"max_tokens": limit})

    def kl_coef(self, agent: str) -> float:
        own = self.agents[agent].kl_coef
        return self.loss.kl_coef if own is None else own


def _warn_of_twins(agents: Mapping[str, AgentConfig]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for name, agent in agents.items():
        if agent.seed is None:
            continue
        twin = seen.setdefault((agent.model, agent.seed), name)
        if twin != name:
            warnings.warn(
                f"agents {twin} and {name} have the same model and the same generation seed {agent.seed}: equal "
                "rollouts, and each would be taught by its own vote; give them different seeds (or none)",
                stacklevel=2,
            )


def compose(overrides: Sequence[str], config_dir: Path | None = None) -> RunConfig:
    """The run that ``train.yaml``, its groups and the overrides describe.

    A plain ``key=value`` may set any key of the schema, whether or not a YAML file mentions it. Raises ValueError, one
    line per fault, for a key or value that is wrong.
    """
    return validate(compose_raw(overrides, config_dir))


def compose_raw(overrides: Sequence[str], config_dir: Path | None = None) -> dict[str, Any]:
    """What the YAML files and overrides say, unchecked."""
    if config_dir is not None and not config_dir.is_dir():
        raise ValueError(f"--config-dir {config_dir}: no such folder")
    folders = [CONFIG_DIR, *([config_dir.resolve()] if config_dir else [])]
    search = [f"hydra.searchpath=[{','.join(f'file://{folder}' for folder in folders[1:])}]"]
    try:
        parsed = [(text, OverridesParser.create().parse_override(text)) for text in overrides]
        with initialize_config_dir(str(CONFIG_DIR), version_base=None):
            composed = hydra_compose("train", overrides=[_settle(*pair, folders) for pair in parsed] + search)
        raw = OmegaConf.to_container(composed, resolve=True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    assert isinstance(raw, dict)
    chosen = {over.key_or_group: over.value() for _, over in parsed}
    if "experiment" in chosen:
        raw.setdefault("experiment", chosen["experiment"])
    return {str(key): value for key, value in raw.items()}


def _settle(text: str, override: Override, folders: Sequence[Path]) -> str:
    """Let a plain ``key=value`` add what the YAML leaves to the typed defaults; pydantic judges the key."""
    key = override.key_or_group
    if key.split(".")[0] == "hydra":
        raise ValueError(f"{text}: hydra's own settings have no place in a run")
    is_group = isinstance(override.value(), str) and any((folder / key).is_dir() for folder in folders)
    return text if text.startswith(("+", "~")) or is_group else f"++{text}"


def validate(raw: Mapping[str, Any]) -> RunConfig:
    """RunConfig of plain data; ValueError with one line per fault, each with its full path."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ValueError("\n".join(_line(fault, raw) for fault in error.errors())) from error


def _line(fault: Any, raw: Mapping[str, Any]) -> str:
    path = [str(part) for part in fault["loc"]]
    if fault["type"] == "extra_forbidden":
        if path[0] == "algo" and len(path) == 3 and (owners := _methods_with(path[2])):
            return (
                f"algo.{path[2]} is of algo.name={' and '.join(owners)}, and this run's is {path[1]}: take it away by "
                f"~algo.{path[2]}"
            )
        section = _section(path[:-1])
        hint = did_you_mean(path[-1], section) or f"; known here: {', '.join(section)}"
        return f"{'.'.join(path)}: no such key{hint}"
    if fault["type"] == "missing" and path[:1] == ["agents"] and path[2:] == ["model"]:
        others = [str(name) for name in raw["agents"] if str(name) != path[1]]
        if hint := did_you_mean(path[1], others):
            return f"agents.{path[1]}: no such agent{hint} (a further agent needs a model)"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{'.'.join(path)}: {message}" if path else message
    given = "" if fault["type"] == "missing" else f" (given: {fault['input']!r})"
    if fault["type"] == "string_type" and isinstance(fault["input"], int | float):
        given += f"; a text that looks like a number or a truth value takes quotes: {'.'.join(path)}=\"'...'\""
    return f"{'.'.join(path)}: {message}{given}"


def _methods_with(field: str) -> list[str]:
    """Names of the methods that have this setting."""
    methods = [m for m in _flatten(AnyAlgorithm) if isinstance(m, type) and issubclass(m, BaseModel)]
    return [m.model_fields["name"].default for m in methods if field in m.model_fields]


def _section(path: Sequence[str]) -> list[str]:
    """Field names of the section a path leads to."""
    here: Any = RunConfig
    for part in path:
        if isinstance(here, type) and issubclass(here, BaseModel) and part in here.model_fields:
            here = here.model_fields[part].annotation
            continue
        models = [m for m in _flatten(here) if isinstance(m, type) and issubclass(m, BaseModel)]
        named = [m for m in models if "name" in m.model_fields and m.model_fields["name"].default == part]
        deeper = [m.model_fields[part].annotation for m in models if part in m.model_fields]
        # a union's tag and a mapping's key are parts of the path, but no fields
        here = (named or deeper or models or [here])[0]
    models = [m for m in _flatten(here) if isinstance(m, type) and issubclass(m, BaseModel)]
    return sorted({field for model in models for field in model.model_fields})


def _flatten(annotation: Any) -> list[Any]:
    inner = get_args(annotation)
    return [annotation] if not inner else [leaf for part in inner for leaf in _flatten(part)]


def resumed(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run that is taken up again, with what the user changes now (a layout, more steps)."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ValueError(f"--resume {run_dir}: no run there (no config.yaml)")
    if added := [text for text in overrides if text.startswith(("+", "~"))]:
        raise ValueError(f"--resume {run_dir}: {added[0]}: a run that is resumed has its configuration; only key=value")
    try:
        changes = OmegaConf.from_dotlist(list(overrides))
        raw = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(file), changes), resolve=True)
    except (YAMLError, OmegaConfBaseException) as error:
        raise ValueError(f"--resume {run_dir}: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} is no configuration of a run")
    return validate({str(key): value for key, value in raw.items()})

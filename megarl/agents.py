"""An agent pairs a policy with an engine; the cohort's phases fan out over agents here and nowhere else.

``open_agents``, ``rolling`` and ``learning`` own the hand-over of the GPUs. A policy is never on its GPUs while the
engine there samples or holds the memory to sample with; only a reshard has the weights of both there. Agents begin as a
step leaves them: policy loaded, engine asleep.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.backends.cluster import Device, WorkerLost, connect
from megarl.backends.megatron.policy import MegatronPolicy, make_worker
from megarl.backends.network import check_network
from megarl.backends.placement import Placement, place
from megarl.backends.planned import PlannedReshard
from megarl.backends.protocols import Engine, Policy
from megarl.backends.reference import ReferenceEngine, ReferencePolicy
from megarl.backends.replay import ReplayEngine
from megarl.backends.reshard import reshard
from megarl.backends.scratch import sweep_buckets
from megarl.backends.vllm.engine import VllmEngine
from megarl.backends.workers import WorkerGroup
from megarl.chat import Chat, open_chat
from megarl.config import RunConfig
from megarl.deck import Seat
from megarl.schedule import learning_rate
from megarl.settings import AgentConfig, LossConfig, SamplingConfig
from megarl.types import Metrics, Need, Prompt, Rollout, RolloutKey, Sample, Seed, TokenStats

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One member of the cohort. Only answers leave it."""

    name: str
    config: AgentConfig
    chat: Chat
    policy: Policy
    engine: Engine
    sampling: SamplingConfig
    seat: Seat  # under its own name; where ``seats`` has others, an evaluation's only
    seats: Mapping[str, Seat]  # name -> seat, under which a step's prompts are dealt
    max_prompt_tokens: int  # of any turn
    loss: LossConfig  # with the agent's own KL coefficient
    device: Device
    bucket_bytes: int  # of a refit
    planned: PlannedReshard | None = None  # reshard.method=planned

    def needs(self, asked: frozenset[Need]) -> frozenset[Need]:
        """What to measure: what the method asks for, and the reference where this agent's loss has a KL term."""
        reference: frozenset[Need] = frozenset({"reference"})
        return asked | reference if self.loss.kl_coef > 0 else asked

    def answers_to(self, name: str) -> bool:
        """Is this a name of the agent's?"""
        return name == self.name or name in self.seats


Agents = Mapping[str, Agent]


def each[T](agents: Agents, fn: Callable[[Agent], T], seconds: Metrics | None = None, phase: str = "") -> dict[str, T]:
    """``fn`` of every agent, all at once; the only concurrency of the driver. The first error (by agent order) is
    raised once all have ended. Wall seconds go to ``seconds["agent/<name>/time/<phase>"]``.
    """

    def timed(agent: Agent) -> T:
        start = time.perf_counter()
        try:
            return fn(agent)
        finally:
            if seconds is not None:
                seconds[f"agent/{agent.name}/time/{phase}"] = (
                    seconds.get(f"agent/{agent.name}/time/{phase}", 0.0) + time.perf_counter() - start
                )

    with ThreadPoolExecutor(max_workers=len(agents)) as pool:
        futures = {name: pool.submit(timed, agent) for name, agent in agents.items()}
    return {name: future.result() for name, future in futures.items()}


@contextmanager
def rolling(agents: Agents) -> Iterator[None]:
    """GPUs belong to the engines."""

    def begin(agent: Agent) -> None:
        agent.policy.offload()
        agent.engine.wake()
        if agent.planned is not None:
            agent.planned.awake()

    def end(agent: Agent) -> None:
        if agent.planned is not None:
            agent.planned.before_sleep()
        agent.engine.sleep()

    each(agents, begin)
    yield
    each(agents, end)


@contextmanager
def learning(agents: Agents) -> Iterator[None]:
    """GPUs belong to the policies, up to and through the reshard that follows."""
    each(agents, lambda agent: agent.policy.onload())
    yield


def generate(agents: Agents, prompts: Sequence[Prompt], seed: Seed, seconds: Metrics) -> list[Rollout]:
    """Rollouts of all prompts, each by the agent it is addressed to."""

    def ask(agent: Agent) -> list[Rollout]:
        own = [p for p in prompts if agent.answers_to(p.agent)]
        for _ in range(agent.config.engine.restarts):
            try:
                return agent.engine.generate(own, seed, agent.sampling)
            except WorkerLost as lost:
                say_restarted(agent, lost, seconds)
                replace_engine(agent)
                agent.policy.offload()
                agent.engine.wake()
                if agent.planned is not None:
                    agent.planned.awake()
        return agent.engine.generate(own, seed, agent.sampling)

    answered = each(agents, ask, seconds, "generate")
    return [rollout for name in agents for rollout in answered[name]]


def replace_engine(agent: Agent) -> Metrics:
    """New processes in place of an engine's that died, with the policy's present weights: from the same seeds they draw
    the same rollouts. The policy is away before and on its GPUs after, as a reshard leaves both.
    """
    assert isinstance(agent.engine, VllmEngine)  # no other engine is another process
    agent.engine.restart()
    agent.engine.sleep()
    agent.policy.onload()
    if agent.planned is not None:
        agent.planned.reopen()
    return refit(agent, agent.policy.version)


def say_restarted(agent: Agent, lost: WorkerLost, seconds: Metrics) -> None:
    log.warning("%s\nagent %s: its engine is started again", lost, agent.name)
    key = f"agent/{agent.name}/engine/restarts"
    seconds[key] = seconds.get(key, 0.0) + 1


def seats(agents: Agents) -> dict[str, Seat]:
    """Every name under which prompts are dealt."""
    return {name: seat for agent in agents.values() for name, seat in agent.seats.items()}


def open_chats(cfg: RunConfig) -> dict[str, Chat]:
    """Every agent's chat; the first look at its model folder."""
    return {
        name: open_chat(agent.model, agent.template, plain=not agent.chat_template)
        for name, agent in cfg.agents.items()
    }


def readers(cfg: RunConfig, chats: Mapping[str, Chat]) -> dict[str, tuple[str, Chat]]:
    """Name -> (view, chat), of every name under which prompts are dealt: who reads which wording."""
    return {
        seat: (view, chats[name]) for name, agent in cfg.agents.items() for seat, view in agent.seated(name).items()
    }


def fitting(agents: Agents, asks: Sequence[Prompt], too_long: set[tuple[str, RolloutKey | None]]) -> list[Prompt]:
    """The follow-ups within their agent's ``max_prompt_tokens``; (agent, parent) of each other goes to ``too_long``."""
    out = []
    for prompt in asks:
        agent = next(a for a in agents.values() if a.answers_to(prompt.agent))
        if len(agent.chat.render(prompt.messages)) <= agent.max_prompt_tokens:
            out.append(prompt)
        else:
            too_long.add((agent.name, prompt.parent))
    return out


def measure(
    agents: Agents, seen: Sequence[Rollout], needs: frozenset[Need], seconds: Metrics
) -> dict[RolloutKey, TokenStats]:
    """Every rollout under its own agent's present weights."""

    def look(agent: Agent) -> dict[RolloutKey, TokenStats]:
        return agent.policy.measure([r for r in seen if agent.answers_to(r.prompt.agent)], agent.needs(needs))

    measured = each(agents, look, seconds, "measure")
    return {key: stats for name in agents for key, stats in measured[name].items()}


def update(
    agents: Agents, samples: Sequence[Sample], cfg: RunConfig, step: int, seconds: Metrics
) -> dict[str, Metrics]:
    """One step of learning for every agent, on its own samples."""

    def learn(agent: Agent) -> Metrics:
        own = [sample for sample in samples if agent.answers_to(sample.key.agent)]
        rates = learning_rates(agent.config, step, cfg, cfg.batch.updates(len(own)))
        return {**agent.policy.update(own, agent.loss, cfg.batch, rates), "learning_rate": rates[-1]}

    return each(agents, learn, seconds, "update")


def learning_rates(agent: AgentConfig, step: int, cfg: RunConfig, updates: int) -> list[float]:
    """Rate of each of the ``updates`` optimizer steps within ``step`` (0-based)."""
    optimizer = agent.optimizer
    if optimizer.schedule.per == "step":
        return [learning_rate(optimizer, step, cfg.steps)] * updates
    return [learning_rate(optimizer, step * updates + k, cfg.steps * updates) for k in range(updates)]


def reshard_all(agents: Agents, version: int, seconds: Metrics) -> dict[str, Metrics]:
    """Every policy's weights into its own engine; an engine that has died since is started again.

    Raises ValueError where a policy has not seen ``version`` updates, as with a checkpoint put together by hand.
    """

    def hand_over(agent: Agent) -> Metrics:
        if agent.policy.version != version:
            raise ValueError(
                f"agent {agent.name}: its policy has seen {agent.policy.version} updates where {version} steps are done"
            )
        try:
            return refit(agent, version)
        except WorkerLost as lost:
            if lost.group != f"{agent.name}/engine" or not agent.config.engine.restarts:
                raise
            say_restarted(agent, lost, seconds)
            agent.policy.offload()
            return replace_engine(agent)

    return each(agents, hand_over, seconds, "reshard")


def refit(agent: Agent, version: int) -> Metrics:
    """The policy's weights into its engine, the way that this agent is set up for."""
    if agent.planned is not None:
        return agent.planned(version)
    return reshard(agent.policy, agent.engine, version, agent.bucket_bytes)


@contextmanager
def open_agents(cfg: RunConfig, run_dir: Path, chats: Mapping[str, Chat]) -> Iterator[Agents]:
    """Build the cohort, all agents side by side, on disjoint GPUs; tear all of it down at the end."""
    # reference backends live in this process, and on CPU a sum depends on how many threads share it
    torch.set_num_threads(cfg.cluster.threads_per_rank)
    sweep_buckets()
    with ExitStack() as stack:
        placements: Mapping[str, Placement] = {}
        hosted = {name: agent for name, agent in cfg.agents.items() if _needs_cluster(agent)}
        if hosted:
            cluster = connect(cfg.cluster, run_dir)
            stack.callback(cluster.close)
            placements = place(
                cluster,
                {name: agent.slots for name, agent in hosted.items()},
                one_node={name: one_node(agent) for name, agent in hosted.items()},
                timeout_s=cfg.cluster.start_timeout_s,
            )
            if cfg.cluster.checks_network(cluster.device) and (found := check_network(placements)):
                print(found, flush=True)

        def build(name: str) -> Agent:
            return _build(name, cfg, chats[name], placements.get(name), stack)

        pool = ThreadPoolExecutor(max_workers=len(cfg.agents))
        building = [pool.submit(build, name) for name in cfg.agents]
        pool.shutdown(wait=False)
        wait(building, return_when=FIRST_EXCEPTION)  # one agent's failure does not wait for the others to be built
        for future in building:
            if future.done():
                future.result()
        yield {future.result().name: future.result() for future in building}


def one_node(agent: AgentConfig) -> int:
    """An agent that lies across nodes is cut at multiples of this: no tensor-parallel group of its policy, and none of
    its engine, then has members on two nodes.
    """
    return math.lcm(agent.layout.tp, agent.engine.tp)


def _needs_cluster(agent: AgentConfig) -> bool:
    return agent.backend == "megatron" or agent.engine.backend == "vllm"


def _build(name: str, cfg: RunConfig, chat: Chat, placement: Placement | None, stack: ExitStack) -> Agent:
    """The agent as a step leaves it. Its policy is away while the engine takes its share of the memory."""
    policy = _build_policy(name, cfg, placement)
    stack.callback(policy.close)
    policy.offload()
    engine = _build_engine(name, cfg, chat, placement)
    stack.callback(engine.close)
    engine.sleep()
    policy.onload()
    agent = cfg.agents[name]
    return Agent(
        name=name,
        config=agent,
        chat=chat,
        policy=policy,
        engine=engine,
        sampling=cfg.sampling_of(name),
        seat=Seat(view=agent.view, n=cfg.samples(name)),
        seats={seat: Seat(view=view, n=cfg.samples(name)) for seat, view in agent.seated(name).items()},
        max_prompt_tokens=cfg.max_prompt_tokens,
        loss=cfg.loss.model_copy(update={"kl_coef": cfg.kl_coef(name)}),
        device=placement.cluster.device if placement else "cpu",
        bucket_bytes=cfg.reshard.bucket_bytes,
        planned=_plan_refits(cfg, agent, policy, engine, placement),
    )


def _plan_refits(
    cfg: RunConfig, agent: AgentConfig, policy: Policy, engine: Engine, placement: Placement | None
) -> PlannedReshard | None:
    if cfg.reshard.method == "gathered":
        return None
    assert isinstance(policy, MegatronPolicy) and isinstance(engine, VllmEngine) and placement is not None
    ids = [bundle.node.id for bundle in placement.bundles[: agent.layout.world]]
    nodes = [list(dict.fromkeys(ids)).index(node) for node in ids]
    limit = cfg.guard.drift_float32 if agent.dtype == "float32" else cfg.guard.drift_bfloat16
    return PlannedReshard(
        agent,
        policy,
        engine,
        nodes,
        cfg.reshard,
        temperature=cfg.sampling.temperature,
        drift_limit=limit if cfg.guard.on_drift == "stop" else math.inf,
    )


def _build_policy(name: str, cfg: RunConfig, placement: Placement | None) -> Policy:
    agent = cfg.agents[name]
    if agent.backend == "megatron":
        assert placement is not None
        return _megatron(name, cfg, placement)
    return ReferencePolicy(
        agent,
        temperature=cfg.sampling.temperature,
        kl_coef=cfg.kl_coef(name),
        tokens_per_microbatch=cfg.batch.tokens_per_microbatch,
    )


def _megatron(name: str, cfg: RunConfig, placement: Placement) -> MegatronPolicy:
    agent = cfg.agents[name]
    settings = {
        "agent": agent,
        "temperature": cfg.sampling.temperature,
        "keep_reference": cfg.kl_coef(name) > 0,
        "threads": cfg.cluster.threads_per_rank,
        "overrides": cfg.megatron,
        "kernels": cfg.kernels,
    }
    world = agent.layout.world
    ranks = WorkerGroup(placement, f"{name}/policy", make_worker, [settings] * world)
    nodes = [bundle.node.id for bundle in placement.bundles[:world]]
    return MegatronPolicy(
        agent,
        ranks,
        tokens_per_microbatch=cfg.batch.tokens_per_microbatch,
        writers=[nodes.index(node) for node in dict.fromkeys(nodes)],  # one rank per node, for the engines there
    )


def _must_be_here(name: str, placement: Placement | None) -> None:
    """ValueError where an engine in the driver's process would wait for weights that a policy leaves on other nodes."""
    if placement and (far := [str(b.node) for b in placement.bundles if b.node.id != placement.cluster.driver_node]):
        raise ValueError(
            f"agents.{name}.engine.backend=reference samples in the driver's process, and the policy has ranks on "
            f"{', '.join(dict.fromkeys(far))}: vllm runs where the policy is"
        )


def _build_engine(name: str, cfg: RunConfig, chat: Chat, placement: Placement | None) -> Engine:
    agent = cfg.agents[name]
    match agent.engine.backend:
        case "vllm":
            assert placement is not None
            longest = cfg.engine_tokens(name)
            return VllmEngine(name, agent, placement, chat, longest, cfg.vllm)
        case "reference":
            _must_be_here(name, placement)
            return ReferenceEngine(agent, chat)
        case "replay":
            assert agent.engine.replay is not None
            return ReplayEngine(Path(agent.engine.replay))

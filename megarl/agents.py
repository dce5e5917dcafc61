"""An agent pairs a policy with an engine; the cohort's phases fan out over agents here and nowhere else.

``rolling`` and ``learning`` own the hand-over of the GPUs: a GPU is never claimed by policy and engine at once.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from megarl.backends.cluster import Placement, WorkerGroup, connect, place
from megarl.backends.megatron.policy import MegatronPolicy, make_worker
from megarl.backends.protocols import Engine, Policy
from megarl.backends.reference import ReferenceEngine, ReferencePolicy
from megarl.backends.replay import ReplayEngine
from megarl.backends.reshard import reshard
from megarl.backends.vllm.engine import VllmEngine
from megarl.chat import Chat, open_chat
from megarl.config import RunConfig
from megarl.deck import Seat
from megarl.schedule import learning_rate
from megarl.settings import AgentConfig, SamplingConfig
from megarl.types import Metrics, Need, Prompt, Rollout, RolloutKey, Sample, Seed, TokenStats


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
    kl_coef: float

    def needs(self, asked: frozenset[Need]) -> frozenset[Need]:
        """What to measure: what the method asks for, and the reference where this agent's loss has a KL term."""
        reference: frozenset[Need] = frozenset({"reference"})
        return asked | reference if self.kl_coef > 0 else asked

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

    each(agents, begin)
    yield
    each(agents, lambda agent: agent.engine.sleep())


@contextmanager
def learning(agents: Agents) -> Iterator[None]:
    """GPUs belong to the policies, up to and through the reshard that follows."""
    each(agents, lambda agent: agent.policy.onload())
    yield


def generate(agents: Agents, prompts: Sequence[Prompt], seed: Seed, seconds: Metrics) -> list[Rollout]:
    """Rollouts of all prompts, each by the agent it is addressed to."""

    def ask(agent: Agent) -> list[Rollout]:
        return agent.engine.generate([p for p in prompts if agent.answers_to(p.agent)], seed, agent.sampling)

    answered = each(agents, ask, seconds, "generate")
    return [rollout for name in agents for rollout in answered[name]]


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
        loss = cfg.loss.model_copy(update={"kl_coef": agent.kl_coef})
        rates = learning_rates(agent.config, step, cfg, cfg.batch.updates(len(own)))
        return {**agent.policy.update(own, loss, cfg.batch, rates), "learning_rate": rates[-1]}

    return each(agents, learn, seconds, "update")


def learning_rates(agent: AgentConfig, step: int, cfg: RunConfig, updates: int) -> list[float]:
    """Rate of each of the ``updates`` optimizer steps within ``step`` (0-based)."""
    optimizer = agent.optimizer
    if optimizer.schedule.per == "step":
        return [learning_rate(optimizer, step, cfg.steps)] * updates
    return [learning_rate(optimizer, step * updates + k, cfg.steps * updates) for k in range(updates)]


def reshard_all(agents: Agents, version: int, bucket_bytes: int, seconds: Metrics) -> dict[str, Metrics]:
    """Every policy's weights into its own engine."""
    return each(agents, lambda a: reshard(a.policy, a.engine, version, bucket_bytes), seconds, "reshard")


@contextmanager
def open_agents(cfg: RunConfig, run_dir: Path, chats: Mapping[str, Chat]) -> Iterator[Agents]:
    """Build the cohort, all agents side by side, on disjoint GPUs; tear all of it down at the end."""
    # reference backends live in this process, and on CPU a sum depends on how many threads share it
    torch.set_num_threads(cfg.cluster.threads_per_rank)
    with ExitStack() as stack:
        placements: Mapping[str, Placement] = {}
        hosted = {name: agent for name, agent in cfg.agents.items() if _needs_cluster(agent)}
        if hosted:
            cluster = connect(cfg.cluster, run_dir)
            stack.callback(cluster.close)
            placements = place(
                cluster,
                {name: agent.slots for name, agent in hosted.items()},
                one_node={name: max(agent.layout.tp, agent.engine.tp) for name, agent in hosted.items()},
                timeout_s=cfg.cluster.start_timeout_s,
            )

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


def _needs_cluster(agent: AgentConfig) -> bool:
    return agent.backend == "megatron" or agent.engine.backend == "vllm"


def _build(name: str, cfg: RunConfig, chat: Chat, placement: Placement | None, stack: ExitStack) -> Agent:
    agent = cfg.agents[name]
    temperature, kl_coef = cfg.sampling.temperature, cfg.kl_coef(name)
    policy: Policy
    if agent.backend == "megatron":
        assert placement is not None
        policy = _megatron(name, cfg, placement)
    else:
        tokens = cfg.batch.tokens_per_microbatch
        policy = ReferencePolicy(agent, temperature=temperature, kl_coef=kl_coef, tokens_per_microbatch=tokens)
    stack.callback(policy.close)
    engine = _build_engine(name, cfg, chat, placement)
    stack.callback(engine.close)
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
        kl_coef=kl_coef,
    )


def _megatron(name: str, cfg: RunConfig, placement: Placement) -> MegatronPolicy:
    agent = cfg.agents[name]
    settings = {
        "agent": agent,
        "temperature": cfg.sampling.temperature,
        "keep_reference": cfg.kl_coef(name) > 0,
        "threads": cfg.cluster.threads_per_rank,
        "overrides": cfg.megatron,
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


def _build_engine(name: str, cfg: RunConfig, chat: Chat, placement: Placement | None) -> Engine:
    agent = cfg.agents[name]
    match agent.engine.backend:
        case "vllm":
            assert placement is not None
            longest = cfg.max_prompt_tokens + cfg.sampling_of(name).max_tokens
            return VllmEngine(name, agent, placement, chat, longest, cfg.vllm)
        case "reference":
            return ReferenceEngine(agent, chat)
        case "replay":
            assert agent.engine.replay is not None
            return ReplayEngine(Path(agent.engine.replay))

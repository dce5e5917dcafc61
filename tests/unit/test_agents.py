"""How agents are opened and handed their GPUs: the reference backends, watched."""

import itertools

import pytest

import megarl.agents
from megarl.agents import one_node, open_agents, open_chats, reshard_all
from megarl.backends.cluster import Node
from megarl.backends.placement import plan_nodes
from megarl.backends.reference import ReferenceEngine, ReferencePolicy
from megarl.config import validate
from megarl.log import read_metrics
from megarl.settings import AgentConfig
from megarl.train import train
from tests import cohort


class Gpu:
    """What stands on one agent's GPU, by the moves that bring it there; the policy and a KV cache never meet."""

    def __init__(self) -> None:
        self.holds: set[str] = set()
        self.met: set[frozenset[str]] = set()

    def take(self, *parts: str) -> None:
        self.holds |= set(parts)
        self.met.add(frozenset(self.holds))

    def give(self, *parts: str) -> None:
        self.holds -= set(parts)


@pytest.fixture
def gpus(monkeypatch) -> dict[str, Gpu]:
    """Model -> its agent's GPU, kept up to date by backends that say what they do."""
    found: dict[str, Gpu] = {}

    class Policy(ReferencePolicy):
        def __init__(self, agent, **settings):
            super().__init__(agent, **settings)
            self.gpu = found.setdefault(agent.model, Gpu())
            self.gpu.take("policy")

        def offload(self):
            super().offload()
            self.gpu.give("policy")

        def onload(self):
            super().onload()
            self.gpu.take("policy")

    class Engine(ReferenceEngine):
        def __init__(self, agent, chat):
            super().__init__(agent, chat)
            self.gpu = found.setdefault(agent.model, Gpu())
            self.gpu.take("weights", "cache")  # as vLLM is born

        def begin_refit(self):
            super().begin_refit()
            self.gpu.take("weights")

        def wake(self):
            super().wake()
            self.gpu.take("cache")

        def sleep(self):
            super().sleep()
            self.gpu.give("weights", "cache")

    monkeypatch.setattr(megarl.agents, "ReferencePolicy", Policy)
    monkeypatch.setattr(megarl.agents, "ReferenceEngine", Engine)
    return found


def test_a_gpu_is_the_policys_or_the_engines_from_start_to_end(gpus, tmp_path, capsys):
    """Two agents, one of them with a KL term of its own; also their coefficients, and what the user is told."""
    kl = {"loss.kl_coef": 0.0, "agents.bob.kl_coef": 0.5}
    run = train(validate(cohort.raw(tmp_path, steps=3, **kl)))
    assert len(gpus) == 2
    for gpu in gpus.values():
        assert {"policy", "weights"} in gpu.met  # in a reshard
        assert {"weights", "cache"} in gpu.met
        assert not [together for together in gpu.met if {"policy", "cache"} <= together]
    last = read_metrics(run)[-1]
    assert last["agent/bob/policy/kl_loss"] > 0 == last["agent/ann/policy/kl_loss"]
    assert capsys.readouterr().err.count(", on cpu, stop ids [2, 6]") == 2


def test_agents_begin_as_a_step_leaves_them(tmp_path):
    cfg = validate(cohort.raw(tmp_path))
    with open_agents(cfg, tmp_path / "run", open_chats(cfg)) as agents:
        for agent in agents.values():
            with pytest.raises(RuntimeError, match="loaded already"):
                agent.policy.onload()
            with pytest.raises(RuntimeError, match="wake without weights"):
                agent.engine.wake()
        with pytest.raises(ValueError, match="agent ann: its policy has seen 0 updates where 2 steps are done"):
            reshard_all(agents, 2, {})
        reshard_all(agents, 0, {})
        assert [agent.engine.version for agent in agents.values()] == [0, 0]


@pytest.mark.parametrize("per_node", [4, 6, 8, 12])
def test_no_tensor_parallel_group_lies_across_nodes(per_node):
    """Neither of the policy nor of the engine, whatever the two sizes are; what cannot be placed so is refused."""
    nodes = {Node(name * 8, name, per_node): per_node for name in "abc"}
    refused = across = 0
    for tp, groups, engine_tp in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)):
        agent = AgentConfig(model="m", layout={"tp": tp, "dp": groups}, engine={"tp": engine_tp})
        try:
            plan = plan_nodes(nodes, {"ann": agent.slots}, {"ann": one_node(agent)})["ann"]
        except ValueError:
            refused += 1
            assert agent.slots > per_node  # what one node holds whole is always placed
            continue
        seats = [node for node, size in plan for _ in range(size)]
        across += len(plan) > 1
        for size, count in ((tp, groups), (engine_tp, agent.replicas)):
            for i in range(count):
                assert len(set(seats[i * size : (i + 1) * size])) == 1, (agent, plan)
    assert across or per_node == 12
    assert refused < 32

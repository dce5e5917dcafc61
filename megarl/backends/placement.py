"""Who sits where: disjoint sets of slots for the agents of a cohort."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.backends.cluster import Cluster, Node
from megarl.backends.host import gpu_ids


@dataclass(frozen=True, slots=True)
class Bundle:
    """One slot of a placement: bundle ``index`` of ``group``, on ``node``."""

    group: PlacementGroup
    index: int
    node: Node
    gpu: str | None = None  # as CUDA_VISIBLE_DEVICES on that node spells it; None: a slot on CPU


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots of one agent, in rank order."""

    cluster: Cluster
    agent: str
    bundles: tuple[Bundle, ...]

    def seats(self, world: int, slots_per_seat: int = 1) -> tuple[tuple[Bundle, ...], ...]:
        """The first ``world * slots_per_seat`` slots, cut into one run of bundles per worker."""
        need = world * slots_per_seat
        if need > len(self.bundles):
            raise ValueError(f"agent {self.agent}: {need} slots wanted, {len(self.bundles)} placed")
        return tuple(self.bundles[i : i + slots_per_seat] for i in range(0, need, slots_per_seat))


def place(
    cluster: Cluster, slots_by_agent: Mapping[str, int], *, one_node: Mapping[str, int], timeout_s: float
) -> dict[str, Placement]:
    """Disjoint sets of slots, one bundle per slot, an agent's bundles in rank order, on nodes of its own group.

    ``one_node[agent]``: an agent that lies across nodes is cut at multiples of this (of every tensor-parallel size of
    its own). Raises ValueError, with wanted against available per node: at once where the nodes are too small, after
    ``timeout_s`` where somebody holds their slots. TimeoutError: a GPU did not answer.
    """
    deadline = time.monotonic() + timeout_s
    groups = cluster.config.groups
    plan_groups({node: node.slots for node in cluster.nodes}, slots_by_agent, one_node, groups)
    chunks_by_agent = _plan_free(cluster, slots_by_agent, one_node, deadline)
    placements: dict[str, Placement] = {}
    for agent, chunks in chunks_by_agent.items():
        bundles: list[Bundle] = []
        for node, size in chunks:
            group = placement_group(
                [{cluster.resource: 1}] * size,
                strategy="STRICT_PACK",
                bundle_label_selector=[{"ray.io/node-id": node.id}] * size,
            )
            cluster.groups.append(group)
            if not group.wait(max(1.0, deadline - time.monotonic())):
                raise ValueError(
                    f"agent {agent}: {size} slots on node {node} were not granted within {timeout_s:g} s; "
                    + _wanted_against_available(_free_slots(cluster), slots_by_agent)
                )
            bundles += [Bundle(group, index, node) for index in range(size)]
        placements[agent] = Placement(cluster, agent, tuple(bundles))
    return _with_gpus(placements, timeout_s) if cluster.device == "cuda" else placements


def _with_gpus(placements: Mapping[str, Placement], timeout_s: float) -> dict[str, Placement]:
    """Every bundle with its GPU, asked for now: once a policy's ranks hold all GPUs, no other process of Ray's can be
    given one to look at, and the engines that share them have to be told.
    """
    every = [bundle for placement in placements.values() for bundle in placement.bundles]
    asked = [in_bundle(gpu_ids, bundle, num_cpus=0, num_gpus=1).remote() for bundle in every]
    _, late = ray.wait(asked, num_returns=len(asked), timeout=timeout_s)
    if late:
        silent = [bundle for bundle, ref in zip(every, asked, strict=True) if ref in late]
        named = ", ".join(f"GPU {bundle.index} of node {bundle.node}" for bundle in silent)
        raise TimeoutError(f"{named} did not answer in {timeout_s:g} s")
    gpus = iter(ray.get(asked))
    return {
        agent: replace(placement, bundles=tuple(replace(bundle, gpu=next(gpus)[0]) for bundle in placement.bundles))
        for agent, placement in placements.items()
    }


def _plan_free(
    cluster: Cluster, slots_by_agent: Mapping[str, int], one_node: Mapping[str, int], deadline: float
) -> dict[str, list[tuple[Node, int]]]:
    """A plan over the slots that are free; those of a job that has just ended take a moment to come back."""
    while True:
        try:
            return plan_groups(_free_slots(cluster), slots_by_agent, one_node, cluster.config.groups)
        except ValueError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def plan_groups(
    free: Mapping[Node, int],
    slots_by_agent: Mapping[str, int],
    one_node: Mapping[str, int],
    groups: Mapping[str, Sequence[str]],
) -> dict[str, list[tuple[Node, int]]]:
    """As ``plan_nodes``, every group of nodes (name -> agents) by itself; without groups all nodes together."""
    if not groups:
        return plan_nodes(free, slots_by_agent, one_node)
    planned: dict[str, list[tuple[Node, int]]] = {}
    for group, agents in groups.items():
        own = {agent: slots_by_agent[agent] for agent in agents if agent in slots_by_agent}
        there = {node: slots for node, slots in free.items() if node.group == group}
        try:
            planned |= plan_nodes(there, own, {agent: one_node[agent] for agent in own})
        except ValueError as error:
            raise ValueError(f"group {group} of nodes: {error}") from error
    return {agent: planned[agent] for agent in slots_by_agent}


def plan_nodes(
    free: Mapping[Node, int], slots_by_agent: Mapping[str, int], one_node: Mapping[str, int]
) -> dict[str, list[tuple[Node, int]]]:
    """Which agent gets how many slots of which node, in rank order; the largest agents choose first.

    An agent sits in the fullest node that holds it whole; one that fits in no node, or nowhere whole any more, is cut
    into pieces that are multiples of ``one_node[agent]``.
    """
    left = dict(free)
    largest = max(free.values(), default=0)
    for agent, run in one_node.items():
        if min(run, slots_by_agent.get(agent, 0)) > largest:
            raise ValueError(
                f"agent {agent}: its tensor-parallel groups want {run} slots in one node, the largest node has "
                f"{largest} free; " + _wanted_against_available(free, slots_by_agent)
            )
    planned: dict[str, list[tuple[Node, int]]] = {}
    for agent in sorted(slots_by_agent, key=lambda name: -slots_by_agent[name]):
        want = slots_by_agent[agent]
        whole = [node for node in left if left[node] >= want]
        if whole:
            chunks = [(min(whole, key=lambda node: left[node]), want)]
        else:
            chunks = _cut(left, want, one_node.get(agent, 1))
        if sum(size for _, size in chunks) < want:
            raise ValueError(
                f"agent {agent}: {want} slots wanted (in runs of {one_node.get(agent, 1)} per node); "
                + _wanted_against_available(free, slots_by_agent)
            )
        for node, size in chunks:
            left[node] -= size
        planned[agent] = chunks
    return {agent: planned[agent] for agent in slots_by_agent}


def _cut(left: Mapping[Node, int], want: int, run: int) -> list[tuple[Node, int]]:
    """Pieces of whole runs from the emptiest nodes first; may hold fewer than ``want`` slots."""
    chunks = []
    for node in sorted(left, key=lambda node: -left[node]):
        size = min(left[node], want) // run * run
        if size:
            chunks.append((node, size))
            want -= size
    return chunks


def _free_slots(cluster: Cluster) -> dict[Node, int]:
    available = available_resources_per_node()
    return {node: int(available.get(node.id, {}).get(cluster.resource, 0)) for node in cluster.nodes}


def _wanted_against_available(free: Mapping[Node, int], slots_by_agent: Mapping[str, int]) -> str:
    wanted = ", ".join(f"{agent} {slots}" for agent, slots in slots_by_agent.items())
    per_node = ", ".join(f"{node} {slots}" for node, slots in free.items()) or "no node"
    return (
        f"wanted {sum(slots_by_agent.values())} slots ({wanted}), available {sum(free.values())} ({per_node}); "
        f"shrink the layouts or raise cluster.nodes x cluster.gpus_per_node"
    )


def in_bundle(what: Callable[..., Any], bundle: Bundle, **options: Any) -> Any:
    """Ray's actor class (or task) of a class (or function), to be started in that bundle."""
    strategy = PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.index)
    remote: Any = ray.remote(what)
    return remote.options(scheduling_strategy=strategy, **options)

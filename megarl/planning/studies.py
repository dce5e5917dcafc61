"""Questions put to the simulator: what do barriers cost, what does sharing GPUs cost, how often to checkpoint?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megarl.planning.simulate import Schedule, World, simulate

NODES = (1, 4, 16, 64, 256, 1024)
INTERVALS = (1, 2, 5, 10, 20, 50, 100)  # steps between checkpoints
SCHEDULES: tuple[Schedule, ...] = ("phases", "dataflow", "shared")
Phases = Mapping[str, Mapping[str, float]]
Row = dict[str, float | str]


def ring(agents: Sequence[str]) -> dict[str, str]:
    """agent -> its teacher, the one before it."""
    return {agent: agents[i - 1] for i, agent in enumerate(agents)}


def by_nodes(dedicated: Phases, shared: Phases, shares: Mapping[str, float], steps: int, seed: int = 0) -> list[Row]:
    """Schedules at every number of nodes, work growing with them: each agent keeps its phases' seconds and its share
    of the nodes, while more nodes mean slower slowest ones and more failures.
    """
    rows: list[Row] = []
    for count in NODES:
        for schedule in SCHEDULES:
            phases = shared if schedule == "shared" else dedicated
            nodes = {name: count if schedule == "shared" else max(1, round(shares[name] * count)) for name in phases}
            world = World(nodes=count)
            out = simulate(phases, ring(list(phases)), schedule, world, steps=steps, nodes=nodes, seed=seed)
            # shared agents have all GPUs: what matters is that somebody works, not who
            idle = (
                1 - sum(out.busy.values()) / out.seconds
                if schedule == "shared"
                else sum(out.idle[name] * shares[name] for name in phases) / sum(shares.values())
            )
            rows.append(
                {
                    "question": "schedule",
                    "nodes": count,
                    "schedule": schedule,
                    "seconds_per_step": round(out.seconds_per_step, 2),
                    "idle_share": round(idle, 4),
                    "failures": out.failures,
                }
            )
    return rows


def by_interval(dedicated: Phases, shares: Mapping[str, float], steps: int, seed: int = 0) -> list[Row]:
    """Seconds per step by checkpoint interval, under barriers per phase."""
    rows: list[Row] = []
    for count in (64, 256, 1024):
        nodes = {name: max(1, round(shares[name] * count)) for name in dedicated}
        for interval in INTERVALS:
            world = replace(World(nodes=count), checkpoint_every=interval)
            out = simulate(dedicated, ring(list(dedicated)), "phases", world, steps=steps, nodes=nodes, seed=seed)
            rows.append(
                {
                    "question": "checkpoints",
                    "nodes": count,
                    "interval": interval,
                    "seconds_per_step": round(out.seconds_per_step, 2),
                    "failures": out.failures,
                }
            )
    return rows

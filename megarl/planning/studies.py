"""Questions put to the simulator: what do barriers cost, what does sharing GPUs cost, how often to checkpoint?"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from megarl.planning.simulate import Outcome, Schedule, World, simulate

SEEDS = 4  # runs that every figure is the mean of
NODES = (1, 4, 16, 64, 256, 1024)
INTERVALS = (1, 2, 5, 10, 20, 50, 100)  # steps between checkpoints
SCHEDULES: tuple[Schedule, ...] = ("phases", "dataflow", "shared")
Phases = Mapping[str, Mapping[str, float]]
Row = dict[str, float | str]


def ring(agents: Sequence[str]) -> dict[str, str]:
    """agent -> its teacher, the one before it."""
    return {agent: agents[i - 1] for i, agent in enumerate(agents)}


def by_nodes(dedicated: Phases, shared: Phases, shares: Mapping[str, float], steps: int) -> list[Row]:
    """Schedules at every number of nodes, work growing with them: each agent keeps its phases' seconds and its share
    of the nodes, while more nodes mean slower slowest ones and more failures.
    """
    rows: list[Row] = []
    for count in NODES:
        for schedule in SCHEDULES:
            phases = shared if schedule == "shared" else dedicated
            nodes = {name: count if schedule == "shared" else max(1, round(shares[name] * count)) for name in phases}
            world = World(nodes=count)
            teachers = ring(list(phases))
            outs = [
                simulate(phases, teachers, schedule, world, steps=steps, nodes=nodes, seed=seed)
                for seed in range(SEEDS)
            ]
            rows.append(
                {
                    "question": "schedule",
                    "nodes": count,
                    "schedule": schedule,
                    "seconds_per_step": round(fmean(out.seconds_per_step for out in outs), 2),
                    "idle_share": round(fmean(_idle(out, schedule, shares) for out in outs), 4),
                    "failures": fmean(out.failures for out in outs),
                }
            )
    return rows


def _idle(out: Outcome, schedule: Schedule, shares: Mapping[str, float]) -> float:
    """Share of GPU time in which nobody works. Shared agents have all GPUs: what matters is that somebody works."""
    if schedule == "shared":
        return 1 - sum(out.busy.values()) / out.seconds
    return sum(out.idle[name] * share for name, share in shares.items()) / sum(shares.values())


def by_interval(dedicated: Phases, shares: Mapping[str, float], steps: int) -> list[Row]:
    """Seconds per step by checkpoint interval, under barriers per phase."""
    rows: list[Row] = []
    for count in (64, 256, 1024):
        nodes = {name: max(1, round(shares[name] * count)) for name in dedicated}
        for interval in INTERVALS:
            world = replace(World(nodes=count), checkpoint_every=interval)
            teachers = ring(list(dedicated))
            outs = [
                simulate(dedicated, teachers, "phases", world, steps=steps, nodes=nodes, seed=s) for s in range(SEEDS)
            ]
            rows.append(
                {
                    "question": "checkpoints",
                    "nodes": count,
                    "interval": interval,
                    "seconds_per_step": round(fmean(out.seconds_per_step for out in outs), 2),
                    "failures": fmean(out.failures for out in outs),
                }
            )
    return rows

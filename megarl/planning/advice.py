"""Where no plan fits: what is missing, and the smallest changes with which one would."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megarl.planning.devices import DEVICES, GIB
from megarl.planning.options import Choice, Estimator, Machine, Need, Setting, slimmer
from megarl.planning.search import Placement, Plan, plan

MOST_NODES = 1024


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something to change, and the step time it would give."""

    what: str
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a search was about."""

    needs: Sequence[Need]
    choices: Sequence[Choice]
    setting: Setting
    saves: bool
    placement: Placement

    def solve(self) -> Plan | Estimator:
        return plan(self.needs, self.choices, self.setting, saves=self.saves, placement=self.placement)

    def fits(self) -> Plan | None:
        found = self.solve()
        return found if isinstance(found, Plan) else None


def missing(problem: Problem, estimator: Estimator) -> list[str]:
    """One line per agent that fits nowhere: the layout that comes nearest, the phase and the GiB it lacks."""
    device = problem.setting.machine.device
    lines = [
        f"{need.name} ({need.shape.name}, {need.shape.parameters / 1e9:.1f}B parameters): the nearest layout, {layout} "
        f"on {gpus} GPUs, lacks {miss / GIB:.1f} GiB per GPU in the phase {phase} ({device.name}: "
        f"{problem.setting.usable / GIB:.1f} GiB usable)"
        for need in problem.needs
        if need.name in estimator.nearest and not _alone(problem, need)
        for miss, phase, layout, gpus in [estimator.nearest[need.name]]
    ]
    return lines or [
        f"every agent fits by itself, but together they need more than {problem.setting.machine.gpus} GPUs, or more "
        f"than {device.host_gib:.0f} GiB of host memory per node"
    ]


def _alone(problem: Problem, need: Need) -> bool:
    return replace(problem, needs=[need]).fits() is not None


def changes(problem: Problem, free: Callable[[], Problem] | None) -> list[Change]:
    """Changes that would fit, each by itself, the smallest first: settings, then placement, nodes, other GPUs.

    ``free`` gives the problem without the user's layouts, where there are any.
    """
    tried: list[tuple[str, Problem]] = []
    if free is not None:
        tried.append(("leave layouts, microbatch and recompute to the planner (--search)", free()))
    for share in (0.4, 0.5, 0.7, 0.8):
        needs = [replace(need, memory_share=share) for need in problem.needs]
        tried.append((f"agents.*.engine.memory_share={share}", replace(problem, needs=needs)))
    limit = int(min(need.work.turns[0].lengths.limit for need in problem.needs))
    for part in (2, 4):
        needs = [slimmer(need, limit // part) for need in problem.needs]
        tried.append((f"sampling.max_tokens={limit // part}", replace(problem, needs=needs)))
    if problem.placement == "dedicated" and len(problem.needs) > 1:
        tried.append(("--placement shared (planned, but not run yet)", replace(problem, placement="shared")))
    found = [_change(what, other) for what, other in tried]
    found.append(_more_nodes(problem))
    found += [
        _change(f"--device {device.name}", _on(problem, replace(problem.setting.machine, device=device)))
        for device in DEVICES.values()
        if device.memory_gib > problem.setting.machine.device.memory_gib
    ]
    return [change for change in found if change is not None]


def _change(what: str, problem: Problem) -> Change | None:
    found = problem.fits()
    return None if found is None else Change(what=what, step_seconds=found.step)


def _on(problem: Problem, machine: Machine) -> Problem:
    return replace(problem, setting=replace(problem.setting, machine=machine))


def _more_nodes(problem: Problem) -> Change | None:
    """The least number of nodes, by doubling and then halving the gap."""
    machine = problem.setting.machine

    def fits(nodes: int) -> Plan | None:
        return _on(problem, replace(machine, nodes=nodes)).fits()

    low, high = machine.nodes, machine.nodes * 2
    while (found := fits(high)) is None:
        low, high = high, high * 2
        if high > MOST_NODES:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        there = fits(middle)
        low, high, found = (middle, high, found) if there is None else (low, middle, there)
    return Change(what=f"cluster.nodes={high}", step_seconds=found.step)

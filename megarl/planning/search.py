"""A cohort on a cluster: GPUs and a layout for every agent, so that a step ends early and nobody waits long.

Dedicated: disjoint GPU sets, phases side by side; a phase ends with its slowest agent, as in train.py. Shared: every
agent has all GPUs in turn, the others wait in host memory.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megarl.planning.devices import GIB
from megarl.planning.memory import host_bytes_per_rank
from megarl.planning.options import PHASES, Choice, Estimator, Need, Option, Setting, training_of

Placement = Literal["dedicated", "shared"]
Seats = dict[str, dict[int, int]]  # agent -> node -> GPUs there
KEPT = 4  # options per agent and number of GPUs that the cohort's search looks at


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cohort's plan that fits."""

    placement: Placement
    options: dict[str, Option]
    seats: Seats
    seconds: dict[str, float]  # of the cohort, by phase
    idle: dict[str, float]  # share of a step that an agent's GPUs wait for others
    host_gib: float  # of the fullest node

    @property
    def step(self) -> float:
        return sum(self.seconds.values())

    @property
    def idle_share(self) -> float:
        """Of all agents' GPU seconds."""
        gpus = sum(option.gpus for option in self.options.values())
        return sum(self.idle[name] * option.gpus for name, option in self.options.items()) / gpus


def plan(
    needs: Sequence[Need], choices: Sequence[Choice], setting: Setting, *, saves: bool, placement: Placement
) -> Plan | Estimator:
    """The best plan, or, where none fits, the estimator that knows what was missing."""
    estimator = Estimator(setting)
    search = _dedicated if placement == "dedicated" else _shared
    found = search(needs, choices, estimator, saves)
    return found or estimator


# ---------------------------------------------------------------- dedicated


def counts(setting: Setting) -> list[int]:
    """Numbers of GPUs worth giving to an agent: any within a node, then half nodes, then whole ones."""
    per_node, total = setting.machine.gpus_per_node, setting.machine.gpus
    half = max(1, per_node // 2)
    sizes = {*range(1, per_node + 1), *range(per_node, 8 * per_node + 1, half)}
    sizes |= {*range(8 * per_node, 32 * per_node + 1, per_node), *range(32 * per_node, total + 1, 8 * per_node)}
    return sorted(size for size in {*sizes, total} if size <= total)


def _dedicated(needs: Sequence[Need], choices: Sequence[Choice], estimator: Estimator, saves: bool) -> Plan | None:
    setting, best = estimator.setting, None
    for choice in choices:
        menus = {}
        for need in needs:
            sizes = [need.gpus] if need.gpus else counts(setting)
            menu = [option for size in sizes for option in _varied(estimator.options(need, size, [choice]))]
            menus[need.name] = _useful(menu)
        if not all(menus.values()):
            continue
        found = _balance(menus, setting, saves)
        if found is not None and (best is None or _merit(found) < _merit(best)):
            best = found
    return best


def _varied(options: Sequence[Option]) -> list[Option]:
    """The quickest few, and the quickest of each phase: phases are waited for one by one."""
    picked = list(options[:KEPT])
    for phase in ("rollout", "train"):
        picked += sorted(options, key=lambda option: option.seconds[phase])[:1]
    return list({id(option): option for option in picked}.values())


def _useful(menu: Sequence[Option]) -> list[Option]:
    """Without options that fewer GPUs match in every phase."""
    kept: list[Option] = []
    for option in sorted(menu, key=lambda o: (o.gpus, o.step)):
        if not any(all(k.seconds[p] <= option.seconds[p] for p in PHASES) for k in kept):
            kept.append(option)
    return kept


def _merit(plan_: Plan) -> float:
    """What the search makes small: seconds of a step, and as many per cent more as GPUs stand idle."""
    return plan_.step * (1 + plan_.idle_share)


def _balance(menus: Mapping[str, Sequence[Option]], setting: Setting, saves: bool) -> Plan | None:
    """Descent over one agent's and two agents' options at a time, from the smallest and from a balanced start."""
    best: Plan | None = None
    for start in _starts(menus, setting.machine.gpus):
        chosen = dict(start)
        here = assemble(chosen, setting, saves)
        improved = True
        while improved:
            improved = False
            for move in _moves(menus, chosen, setting.machine.gpus):
                tried = _cheap_merit({**chosen, **move})
                if here is not None and tried >= _cheap_merit(chosen) - 1e-9:
                    continue
                there = assemble({**chosen, **move}, setting, saves)
                if there is not None:
                    chosen, here, improved = {**chosen, **move}, there, True
        if here is not None and (best is None or _merit(here) < _merit(best)):
            best = here
    return best


def _starts(menus: Mapping[str, Sequence[Option]], gpus: int) -> Iterator[dict[str, Option]]:
    yield {name: min(menu, key=lambda o: (o.gpus, o.step)) for name, menu in menus.items()}
    # the least step time that every agent can reach within the GPUs there are
    for limit in sorted({option.step for menu in menus.values() for option in menu}):
        within = {
            name: min((o for o in menu if o.step <= limit), key=lambda o: (o.gpus, o.step), default=None)
            for name, menu in menus.items()
        }
        chosen = {name: option for name, option in within.items() if option is not None}
        if len(chosen) == len(menus) and sum(option.gpus for option in chosen.values()) <= gpus:
            yield chosen
            return


def _moves(
    menus: Mapping[str, Sequence[Option]], chosen: Mapping[str, Option], gpus: int
) -> Iterator[dict[str, Option]]:
    used = sum(option.gpus for option in chosen.values())
    for name, menu in menus.items():
        room = gpus - used + chosen[name].gpus
        yield from ({name: option} for option in menu if option.gpus <= room)
    for one, other in itertools.combinations(menus, 2):
        room = gpus - used + chosen[one].gpus + chosen[other].gpus
        for a in menus[one]:
            yield from ({one: a, other: b} for b in menus[other] if a.gpus + b.gpus <= room)


def _cheap_merit(options: Mapping[str, Option]) -> float:
    """``_merit`` of options, whether or not they can be seated."""
    seconds = cohort_seconds(options)
    step = sum(seconds.values())
    gpus = sum(option.gpus for option in options.values())
    busy = sum(option.step * option.gpus for option in options.values())
    return step * (2 - busy / (gpus * step))


def cohort_seconds(options: Mapping[str, Option]) -> dict[str, float]:
    """Phase -> seconds until its slowest agent is done."""
    return {phase: max(option.seconds[phase] for option in options.values()) for phase in PHASES}


def assemble(options: Mapping[str, Option], setting: Setting, saves: bool) -> Plan | None:
    """The plan of these options; None where they cannot be seated, or a node's memory does not hold them."""
    seats = seat(options, setting.machine.nodes, setting.machine.gpus_per_node)
    if seats is None:
        return None
    host = max(
        node_host_gib(
            {name: (options[name], there[node]) for name, there in seats.items() if node in there}, setting, saves
        )
        for node in range(setting.machine.nodes)
    )
    if host > setting.machine.device.host_gib * setting.machine.gpus_per_node / 8:
        return None
    seconds = cohort_seconds(options)
    step = sum(seconds.values())
    return Plan(
        placement="dedicated",
        options=dict(options),
        seats=seats,
        seconds=seconds,
        idle={name: 1 - option.step / step for name, option in options.items()},
        host_gib=host,
    )


def seat(options: Mapping[str, Option], nodes: int, per_node: int) -> Seats | None:
    """Whole nodes first, largest agent first; what is left goes into the fullest node that still holds it."""
    free = dict.fromkeys(range(nodes), per_node)
    seats: Seats = {name: {} for name in options}
    for name in sorted(options, key=lambda n: (-options[n].gpus, list(options).index(n))):
        wanted = options[name].gpus
        while wanted:
            part = min(wanted, per_node)
            node = min((n for n in free if free[n] >= part), key=lambda n: (free[n], n), default=None)
            if node is None:
                return None
            free[node] -= part
            seats[name][node] = part
            wanted -= part
    return seats


def node_host_gib(there: Mapping[str, tuple[Option, int]], setting: Setting, saves: bool) -> float:
    """Host memory of one node with so many GPUs of each agent, during the rollouts; buckets are of the refit."""
    total = setting.overheads.node * GIB
    for option, gpus in there.values():
        need = option.need
        training = training_of(need, option.layout, option.choice, setting)
        rank = host_bytes_per_rank(need.shape, option.layout, training, saves=saves, over=setting.overheads)
        total += gpus * rank + 2 * setting.bucket_bytes
    return total / GIB


# ---------------------------------------------------------------- shared


def _shared(needs: Sequence[Need], choices: Sequence[Choice], estimator: Estimator, saves: bool) -> Plan | None:
    """Each agent at its quickest on all GPUs, one after the other; an agent's turn begins and ends in host memory."""
    setting, best = estimator.setting, None
    gpus, per_node = setting.machine.gpus, setting.machine.gpus_per_node
    for choice in choices:
        options = {
            need.name: found[0]
            for need in needs
            for found in [estimator.options(replace(need, gpus=None), gpus, [choice])]
            if found
        }
        if len(options) < len(needs):
            continue
        host = node_host_gib({name: (option, per_node) for name, option in options.items()}, setting, saves)
        if host > setting.machine.device.host_gib * per_node / 8:
            continue
        seconds = {phase: sum(option.seconds[phase] for option in options.values()) for phase in PHASES}
        found = Plan(
            placement="shared",
            options=options,
            seats={name: dict.fromkeys(range(setting.machine.nodes), per_node) for name in options},
            seconds=seconds,
            idle=dict.fromkeys(options, 0.0),  # nobody waits for a neighbor; exchanges are in the handover's seconds
            host_gib=host,
        )
        if best is None or found.step < best.step:
            best = found
    return best

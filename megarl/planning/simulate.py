"""A cohort's run in simulated time: who waits for whom, and what failures cost.

Processes are generators that yield seconds to let pass, or a ``Gate`` to wait for; ``Clock`` runs them in order of
time. What is drawn at random comes from a generator seeded by the caller, so that two schedules can meet the same luck.
"""

import heapq
import itertools
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

import numpy as np

Schedule = Literal["phases", "dataflow", "shared"]
ROLL, LEARN = ("rollout",), ("measure", "train", "refit")
_NORMAL = NormalDist()


@dataclass(slots=True, eq=False)
class Gate:
    """Opens once ``needed`` have arrived; whoever waits goes on then."""

    needed: int = 1
    arrived: int = 0
    waiting: list["Process"] = field(default_factory=list)


Process = Generator["float | Gate", None, None]


class Clock:
    """Runs processes, the earliest first; at equal times in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Process]] = []

    def start(self, process: Process, delay: float = 0.0) -> None:
        heapq.heappush(self._due, (self.now + delay, next(self._order), process))

    def arrive(self, gate: Gate) -> None:
        gate.arrived += 1
        if gate.arrived == gate.needed:
            for process in gate.waiting:
                self.start(process)
            gate.waiting.clear()

    def run(self, until: float = float("inf")) -> None:
        """Until nothing is due, or the next event lies beyond ``until``; then ``now`` is there."""
        while self._due:
            time, _, process = heapq.heappop(self._due)
            if time > until:
                self.now = until
                return
            self.now = time
            self._advance(process)

    def _advance(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, Gate):
                if wanted.arrived < wanted.needed:
                    wanted.waiting.append(process)
                    return
            else:
                self.start(process, wanted)
                return


@dataclass(frozen=True, kw_only=True)
class World:
    """What goes wrong, and what it costs."""

    nodes: int
    noise: float = 0.02  # sigma of log seconds of a phase on one node; the slowest node counts
    tail: float = 0.08  # sigma of log seconds of a whole rollout phase: how long the longest answers are
    straggler_chance: float = 5e-4  # of a node, per phase
    straggler_factor: float = 1.5
    # 419 unplanned interruptions in 54 days on 16,384 H100 (Llama 3, arXiv 2407.21783, section 3.3.4), per node of 8
    node_mtbf_s: float = 54 * 86400 * 2048 / 419
    restart_s: float = 600.0
    checkpoint_s: float = 30.0
    checkpoint_every: int = 20  # steps


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one simulated run. Seconds are of the whole run, rewound steps and restarts included."""

    seconds: float
    steps: int
    failures: int
    busy: Mapping[str, float]  # agent -> seconds in its phases, those of lost steps included

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps

    @property
    def idle(self) -> dict[str, float]:
        return {name: 1 - busy / self.seconds for name, busy in self.busy.items()}


PHASES = ("handover", *ROLL, *LEARN)
Luck = dict[str, np.ndarray]  # agent -> factor of each phase's seconds, float64[steps, phases]


def draw_luck(world: World, nodes: Mapping[str, int], steps: int, seed: int) -> Luck:
    """How much longer each phase takes than without bad luck, whatever the schedule and whatever fails."""
    found = {}
    for place, (agent, count) in enumerate(nodes.items()):
        draws = np.random.default_rng((seed, place)).random((3, steps, len(PHASES)))
        # the largest of ``count`` normal draws, by inverting its distribution
        factors = np.exp(world.noise * _normal(draws[0] ** (1 / count)))
        factors[draws[1] > (1 - world.straggler_chance) ** count] *= world.straggler_factor
        rollout = PHASES.index("rollout")
        factors[:, rollout] *= np.exp(world.tail * _normal(draws[2, :, rollout]))
        found[agent] = factors
    return found


def _normal(shares: np.ndarray) -> np.ndarray:
    cut = np.clip(shares, 1e-12, 1 - 1e-12)
    return np.array([_NORMAL.inv_cdf(share) for share in cut.ravel().tolist()]).reshape(shares.shape)


def simulate(
    phases: Mapping[str, Mapping[str, float]], teachers: Mapping[str, str], schedule: Schedule, world: World,
    *, steps: int, nodes: Mapping[str, int], seed: int = 0,
) -> Outcome:  # fmt: skip
    """A run of ``steps`` steps; ``phases[agent][phase]`` are seconds without bad luck, on that agent's nodes.

    phases: everybody waits at the end of every phase (train.py). dataflow: an agent learns once its own rollouts and
    its teacher's are done. shared: one agent at a time has the GPUs, for its rollouts and again for its learning; every
    exchange costs a handover. A failure anywhere takes all agents back to the last checkpoint.
    """
    luck = draw_luck(world, nodes, steps, seed)
    random = np.random.default_rng((seed, 1 << 20))
    busy = dict.fromkeys(phases, 0.0)
    seconds, begin, failures = 0.0, 0, 0
    while begin < steps:
        fails_at = float(random.exponential(world.node_mtbf_s / world.nodes))
        attempt = _Attempt(phases, teachers, schedule, world, luck, begin)
        attempt.clock.run(until=fails_at)
        for name, spent in attempt.busy.items():
            busy[name] += spent
        seconds += attempt.clock.now
        if attempt.done == len(phases):
            break
        failures += 1
        seconds += world.restart_s
        begin = attempt.saved
    return Outcome(seconds=seconds, steps=steps, failures=failures, busy=busy)


class _Attempt:
    """From a checkpoint to the end, or to the next failure."""

    def __init__(
        self,
        phases: Mapping[str, Mapping[str, float]],
        teachers: Mapping[str, str],
        schedule: Schedule,
        world: World,
        luck: Luck,
        begin: int,
    ) -> None:
        self.clock, self.saved, self.done = Clock(), begin, 0
        self.busy = dict.fromkeys(phases, 0.0)
        self._phases, self._teachers, self._world, self._luck = phases, teachers, world, luck
        self._steps = range(begin, len(next(iter(luck.values()))))
        self._gates: dict[tuple[object, ...], Gate] = {}
        if schedule == "shared":
            self.clock.start(self._in_turn())
        else:
            run = self._in_step if schedule == "phases" else self._on_its_own
            for agent in phases:
                self.clock.start(run(agent))

    def _gate(self, *key: object, needed: int = 1) -> Gate:
        return self._gates.setdefault(key, Gate(needed))

    def _work(self, agent: str, step: int, names: Sequence[str]) -> Process:
        for phase in names:
            seconds = self._phases[agent][phase] * float(self._luck[agent][step, PHASES.index(phase)])
            yield seconds
            self.busy[agent] += seconds

    def _meet(self, *key: object) -> Process:
        gate = self._gate("all", *key, needed=len(self._phases))
        self.clock.arrive(gate)
        yield gate

    def _checkpoint(self, step: int) -> Process:
        """Atomic over the cohort: everybody is there before it begins and after it ends."""
        world = self._world
        if (step + 1) % world.checkpoint_every == 0:
            yield from self._meet(step, "save")
            yield world.checkpoint_s
            self.saved = step + 1

    def _in_step(self, agent: str) -> Process:
        for step in self._steps:
            for phase in ("handover", *ROLL, *LEARN):
                yield from self._work(agent, step, (phase,))
                yield from self._meet(step, phase)
            yield from self._checkpoint(step)
        self.done += 1

    def _on_its_own(self, agent: str) -> Process:
        for step in self._steps:
            yield from self._work(agent, step, ("handover", *ROLL))
            self.clock.arrive(self._gate("answers", agent, step))
            yield from self._work(agent, step, ("measure",))
            yield self._gate("answers", self._teachers[agent], step)
            yield from self._work(agent, step, ("train", "refit"))
            yield from self._checkpoint(step)
        self.done += 1

    def _in_turn(self) -> Process:
        """One process: whose turn it is needs no lock. The handover is paid on every exchange, half each way."""
        for step in self._steps:
            for names in (ROLL, LEARN):
                for agent in self._phases:
                    yield from self._work(agent, step, ("handover", *names))
            world = self._world
            if (step + 1) % world.checkpoint_every == 0:
                yield world.checkpoint_s * len(self._phases)
                self.saved = step + 1
        self.done = len(self._phases)

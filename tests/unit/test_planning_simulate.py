"""The simulator, where the answer is known without it."""

from dataclasses import replace

import pytest

from megarl.planning.picture import draw
from megarl.planning.simulate import Clock, Gate, World, simulate
from megarl.planning.studies import INTERVALS, NODES, SEEDS, by_interval, by_nodes

CALM = World(
    nodes=1, noise=0.0, tail=0.0, straggler_chance=0.0, node_mtbf_s=1e18, checkpoint_s=0.0, checkpoint_every=10**6
)
PHASES = {
    "a": {"handover": 1.0, "rollout": 10.0, "measure": 2.0, "train": 5.0, "refit": 1.0},
    "b": {"handover": 2.0, "rollout": 4.0, "measure": 3.0, "train": 9.0, "refit": 2.0},
}
TEACHERS = {"a": "b", "b": "a"}
NODES_OF = {"a": 1, "b": 1}


def run(schedule, world=CALM, steps=10, seed=0):
    return simulate(PHASES, TEACHERS, schedule, world, steps=steps, nodes=NODES_OF, seed=seed)


def test_a_barrier_after_every_phase_waits_for_the_slowest():
    out = run("phases")
    assert out.seconds == 10 * (2 + 10 + 3 + 9 + 2)
    assert out.busy == {"a": 190.0, "b": 200.0} and out.failures == 0
    assert out.idle["a"] == pytest.approx(1 - 190 / 260)


def test_dataflow_waits_for_the_teacher_alone():
    """b has its own 6 s of rollouts and 3 of measuring, then waits until a has answered at 11; it learns until 22 and
    begins again, while a is done at 19. From then on b is the slower one, and a waits for its answers."""
    one = run("dataflow", steps=1)
    assert one.seconds == 22
    two = run("dataflow", steps=2)
    # a: 19 + 11 answers at 30; b: 22 + 6 at 28, measured at 31, then learns 11
    assert two.seconds == 42
    assert run("dataflow", steps=40).seconds < run("phases", steps=40).seconds


def test_shared_gpus_do_everything_one_after_the_other():
    """Every agent comes twice a step: for its rollouts and for its learning."""
    assert run("shared").seconds == 10 * (1 + 10 + 2 + 4 + 1 + 8 + 2 + 14)


def test_a_failure_takes_everybody_back_to_the_checkpoint():
    """One failure for certain in the first attempts: the time lost is paid, and every step is done in the end."""
    shaky = replace(CALM, node_mtbf_s=400.0, restart_s=50.0, checkpoint_every=5)
    out = run("phases", shaky, steps=40)
    assert out.failures > 0
    lost = out.seconds - 40 * 26 - out.failures * 50
    assert 0 < lost < out.failures * 5 * 26
    assert sum(out.busy.values()) >= 40 * 39


@pytest.mark.parametrize("schedule", ["phases", "dataflow", "shared"])
def test_checkpoints_cost_what_they_cost(schedule):
    saving = run(schedule, replace(CALM, checkpoint_s=7.0, checkpoint_every=2))
    plain = run(schedule)
    saves = 5 * (2 if schedule == "shared" else 1) * 7.0
    if schedule == "dataflow":  # the meeting before a checkpoint is a barrier too
        assert saving.seconds > plain.seconds + saves
    else:
        assert saving.seconds == plain.seconds + saves


def test_luck_is_the_same_for_every_schedule_and_grows_with_nodes():
    noisy = replace(CALM, noise=0.05)
    assert run("phases", noisy) == run("phases", noisy)
    assert run("phases", noisy).seconds != run("phases", noisy, seed=1).seconds
    many = simulate(PHASES, TEACHERS, "phases", noisy, steps=10, nodes={"a": 512, "b": 512})
    assert many.seconds > run("phases", noisy).seconds * 1.05


def test_a_gate_lets_all_go_on_at_once():
    clock, passed = Clock(), []
    gate = Gate(needed=2)

    def walker(name, seconds):
        yield seconds
        clock.arrive(gate)
        yield gate
        passed.append((name, clock.now))

    clock.start(walker("quick", 1.0))
    clock.start(walker("slow", 5.0))
    clock.run()
    assert passed == [("slow", 5.0), ("quick", 5.0)]


def test_the_study_answers_its_questions(tmp_path):
    shares = {"a": 0.5, "b": 0.5}
    rows = by_nodes(PHASES, PHASES, shares, steps=12) + by_interval(PHASES, shares, steps=12)
    assert len(rows) == 3 * len(NODES) + 3 * len(INTERVALS) and SEEDS > 1
    by_schedule = {
        row["schedule"]: row["seconds_per_step"] for row in rows if row.get("nodes") == 1 and "schedule" in row
    }
    assert by_schedule["dataflow"] < by_schedule["phases"] < by_schedule["shared"]
    draw(rows, "a study", tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")

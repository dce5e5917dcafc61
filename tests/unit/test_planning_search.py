"""Plans of whole cohorts: what `megarl plan` answers, and why."""

import json
from dataclasses import replace

import pytest

from megarl import cli
from megarl.config import compose
from megarl.planning.advice import Problem
from megarl.planning.calibration import load_rates
from megarl.planning.command import run
from megarl.planning.devices import DEVICES, GIB
from megarl.planning.options import Choice, Machine
from megarl.planning.request import choices_of, needs_of, recompute_of, setting_of
from megarl.planning.search import Plan, seat
from megarl.planning.workload import Expectations, workload


def planned(capsys, *args: str) -> tuple[int, dict]:
    code = run([*args, "--json"])
    return code, json.loads(capsys.readouterr().out)


def problem_of(*overrides: str, device: str = "h100", free: bool = False) -> Problem:
    cfg = compose(overrides)
    needs = needs_of(cfg, Expectations(), layouts="none" if free else "stated")
    return Problem(
        needs=needs,
        choices=choices_of(cfg, needs, free=free),
        setting=setting_of(cfg, DEVICES[device], load_rates()),
        saves=True,
        placement="dedicated",
    )


@pytest.mark.parametrize(
    ("experiment", "gpus"), [("plan_7b_8b_2nodes", 16), ("plan_7b_32b_70b_16nodes", 128)], ids=["7B+8B", "7B+32B+70B"]
)
def test_a_cohort_is_laid_out_and_balanced(experiment, gpus, capsys):
    code, plan = planned(capsys, f"+experiment={experiment}")
    assert code == 0 and plan["fits"]
    assert plan["predicted_idle_share"] <= 0.10
    agents = plan["agents"]
    assert sum(agent["gpus"] for agent in agents.values()) == plan["gpus_used"] <= gpus
    taken: dict[str, int] = {}
    for agent in agents.values():
        layout = agent["layout"]
        assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == agent["gpus"]
        assert layout["engine_tp"] * layout["engine_replicas"] == agent["gpus"]
        assert set(agent["gib_per_gpu"]) == {"rollout", "measure", "train", "refit"}
        assert max(agent["gib_per_gpu"].values()) <= plan["assumed"]["usable_gib_per_gpu"]
        for phase, parts in agent["gib_per_gpu_parts"].items():
            assert sum(parts.values()) == pytest.approx(agent["gib_per_gpu"][phase], abs=0.1)
        assert agent["host_gib_per_node"] <= DEVICES["h100"].host_gib
        assert 0 <= agent["predicted_idle_share"] < 1
        for node, count in agent["placement"]["gpus_by_node"].items():
            taken[node] = taken.get(node, 0) + count
    assert max(taken.values()) <= 8 and sum(taken.values()) == plan["gpus_used"]
    slowest = {p: max(a["predicted_seconds"][p] for a in agents.values()) for p in ("rollout", "train", "refit")}
    assert {p: plan["predicted_seconds"][p] for p in slowest} == pytest.approx(slowest, abs=0.02)
    # the larger the model, the more GPUs
    sizes = [agent["gpus"] for agent in sorted(agents.values(), key=lambda a: a["parameters"])]
    assert sizes == sorted(sizes)
    # what it says to append is a configuration, and the planner accepts it as stated
    again, checked = planned(capsys, f"+experiment={experiment}", *plan["overrides"])
    assert again == 0 and checked["predicted_seconds"] == plan["predicted_seconds"]


def test_what_does_not_fit_comes_with_what_would(capsys):
    code, plan = planned(capsys, "+experiment=plan_70b_1node_impossible")
    assert code == 2 and not plan["fits"] and not plan["agents"]["llama70"]["fits"]
    assert "lacks" in plan["missing"][0] and "train" in plan["missing"][0]
    assert plan["smallest_change"].startswith("cluster.nodes=")
    assert planned(capsys, "+experiment=plan_70b_1node_impossible", plan["smallest_change"])[0] == 0
    nodes = int(plan["smallest_change"].removeprefix("cluster.nodes="))
    assert planned(capsys, "+experiment=plan_70b_1node_impossible", f"cluster.nodes={nodes - 1}")[0] == 2


def test_a_setting_may_be_the_smallest_change(capsys):
    """Two 7B replicas with a bad layout of one's own: the planner's would do."""
    overrides = ["+experiment=plan_7b_8b_2nodes", "agents.qwen.layout={dp: 1}", "agents.llama.layout={dp: 8}"]
    code, plan = planned(capsys, *overrides)
    assert code == 2 and plan["smallest_change"].endswith("(--search)")
    assert planned(capsys, *overrides, "--search")[0] == 0


def test_people_get_one_screen(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "+experiment=plan_7b_8b_2nodes"])
    shown = capsys.readouterr().out
    assert left.value.code == 0
    assert len(shown.splitlines()) <= 24 and "idle" in shown and "agents.qwen.layout=" in shown
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "+experiment=plan_70b_1node_impossible"])
    assert left.value.code == 2 and "cluster.nodes=" in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides",
    [
        ["+experiment=cohort_7b_8b"],
        ["+experiment=cohort_7b_8b", "cluster.nodes=1", "agents.qwen.layout.dp=2", "agents.llama.layout.dp=2"],
        ["+experiment=cohort_3b_ring3"],
        ["+experiment=ring_7b_32b_70b"],
        ["+experiment=coverrl_7b"],
    ],
    ids=lambda overrides: overrides[0].partition("=")[2],
)
def test_presets_fit_as_they_are(overrides):
    problem = problem_of(*overrides)
    assert all(need.layout is not None and need.shape.trainable for need in problem.needs)
    assert len(problem.choices) == 1
    assert problem.fits() is not None


def test_a_stated_layout_is_kept_and_a_larger_gpu_changes_what_fits():
    tight = problem_of("+experiment=cohort_7b_8b", "agents.qwen.layout={pp: 2, dp: 1}", "agents.qwen.engine.tp=1")
    assert tight.fits() is None
    found = problem_of(
        "+experiment=cohort_7b_8b", "agents.qwen.layout={pp: 2, dp: 1}", "agents.qwen.engine.tp=1", device="h200"
    ).fits()
    assert found is not None and str(found.options["qwen"].layout) == "PP2"


def test_sharing_gpus_takes_longer_and_needs_more_host_memory():
    problem = problem_of("+experiment=plan_7b_8b_2nodes")
    dedicated, shared = problem.fits(), replace(problem, placement="shared").fits()
    assert dedicated is not None and shared is not None
    assert shared.step > dedicated.step and shared.host_gib > dedicated.host_gib
    assert all(option.gpus == 16 for option in shared.options.values())


def test_host_memory_can_be_what_is_missing():
    problem = problem_of("+experiment=plan_7b_8b_2nodes")
    small = replace(DEVICES["h100"], host_gib=100)
    machine = Machine(device=small, nodes=2, gpus_per_node=8)
    assert replace(problem, setting=replace(problem.setting, machine=machine)).fits() is None


def test_more_gpus_never_slow_a_cohort_down():
    seconds = []
    for nodes in (1, 2):
        found = problem_of("+experiment=plan_7b_8b_2nodes", f"cluster.nodes={nodes}").fits()
        assert found is not None
        seconds.append(found.step)
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.3 * seconds[1]


def test_the_search_finds_what_trying_everything_finds():
    """One agent on one node: the plan is the quickest of all options, each of which fits."""
    from megarl.planning.options import Estimator
    from megarl.planning.search import counts

    problem = problem_of("+experiment=plan_7b_8b_2nodes", "cluster.nodes=1")
    alone = replace(problem, needs=problem.needs[:1])
    found = alone.fits()
    assert isinstance(found, Plan)
    estimator = Estimator(alone.setting)
    every = [o for g in counts(alone.setting) for o in estimator.options(alone.needs[0], g, alone.choices)]
    assert found.step == min(option.step for option in every)
    assert all(memory.total <= alone.setting.usable for option in every for memory in option.memory.values())
    assert alone.setting.usable == DEVICES["h100"].memory - 1.5 * GIB


def test_seats_are_whole_nodes_first():
    problem = problem_of("+experiment=ring_7b_32b_70b")
    found = problem.fits()
    assert found is not None
    assert found.seats["llama70"] == dict.fromkeys(range(10), 8)
    assert sorted(found.seats["qwen32"].values()) == [4, 8, 8, 8, 8]
    assert seat(found.options, nodes=15, per_node=8) is None


def test_what_a_step_asks_of_an_agent():
    cfg = compose(["+experiment=coverrl_7b"])
    work = workload(cfg, "solver", Expectations(verified_share=1.0, wrong_share=0.5))
    # 64 questions: 32 answers, 2 x 8 verdicts, and 6 revisions of every second verdict
    assert [turn.samples for turn in work.turns] == [64 * 32, 64 * 16, 64 * 8 * 6]
    assert work.trained_share == pytest.approx((64 * 16 + 64 * 16 + 64 * 48) / (64 * (32 + 16 + 48)))
    assert work.passes == 2 and work.updates == cfg.batch.updates(64 * 80)
    plain = workload(compose(["+experiment=cohort_7b_8b"]), "qwen", Expectations(prompt_tokens=100))
    assert (plain.passes, plain.updates, plain.trained_share) == (1, 1, 1.0)
    assert plain.tokens == pytest.approx(1536 * (100 + 0.35 * 3072))


def test_recompute_is_read_from_megatrons_own_fields():
    assert recompute_of({}) == "none"
    assert recompute_of({"recompute_granularity": "full"}) == "full"
    assert recompute_of({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}) == "mlp"
    assert recompute_of({"recompute_granularity": "selective"}) == "none"
    cfg = compose(["+experiment=plan_7b_8b_2nodes", "megatron={recompute_granularity: full}"])
    assert {choice.recompute for choice in choices_of(cfg, needs_of(cfg, Expectations()))} == {"full"}
    assert Choice(tokens_per_microbatch=4096, recompute="full") in choices_of(cfg, needs_of(cfg, Expectations()))

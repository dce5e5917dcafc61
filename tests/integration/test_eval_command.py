"""`megarl eval` on checkpoints of a tiny run: the same agents and engines as training, and files that say so."""

import json

import pytest

from megarl import cli
from megarl.config import validate
from megarl.log import read_metrics
from megarl.rollouts import read, step_path, write
from megarl.train import train
from tests import cohort, tiny
from tests.by_hand import BY_HAND, GOLD
from tests.by_hand import recorded as by_hand

EXAM = {"samples_per_prompt": 3, "sampling": {"max_tokens": 6, "temperature": 0.8, "top_p": 0.9}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("eval")


@pytest.fixture(scope="module")
def run(folder):
    """Two steps with an evaluation before the first and after the last."""
    problems = cohort.write_problems(folder / "exam.jsonl", 12)
    data = {"path": str(problems), "gold": "answer", "id": "id", "max_prompt_tokens": 32}
    raw = cohort.raw(folder, name="run", steps=2, evaluation={"every_steps": 2, "data": data, **EXAM})
    raw["batch"]["prompts_per_step"] = 16  # some of their votes agree
    for agent in raw["agents"].values():
        agent["optimizer"]["lr"] = 3e-2  # so that two steps show
    return train(validate(raw))


def megarl(*argv: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(a) for a in argv])
    return ended.value.code


def results(folder, name: str) -> dict:
    return json.loads((folder / "results.json").read_text())["sets"][name]["scores"]


def test_a_checkpoint_scores_what_the_run_scored(run, folder):
    """Weights, seeds, prompts and reader are the run's: its own accuracies come out, before and after training."""
    rows, seen = read_metrics(run), {}
    for step, extra in ((0, ["--step", 0]), (2, [])):
        assert megarl("eval", "--run", run, *extra) == 0
        out = run / "eval" / f"step_{step}-evaluation"
        found = results(out, "evaluation")
        for agent in ("ann", "bob"):
            assert found[agent]["avg@3"]["value"] == rows[step][f"agent/{agent}/eval/accuracy"]
            assert found[agent]["answered"]["value"] == rows[step][f"agent/{agent}/eval/answered"]
        seen[step] = {r.key: r.text for r in read(out / "rollouts" / "evaluation.parquet")}
        assert len(seen[step]) == 2 * 12 * 3
    assert seen[0] != seen[2], "control: training changed nothing that is sampled"

    # what was recorded gives the same table without any model
    file = run / "eval" / "step_2-evaluation" / "rollouts" / "evaluation.parquet"
    own = folder / "exam.yaml"
    own.write_text("data: {gold: answer, id: id}\nanswers: {style: last-number, truncated: read}\n")
    out = folder / "recorded"
    problems = folder / "exam.jsonl"
    assert megarl("eval", "--rollouts", file, "--set", f"{own}={problems}", "--out", out, "seed=7") == 0
    assert results(out, "exam") == results(run / "eval" / "step_2-evaluation", "evaluation")


def test_the_training_rollouts_of_a_step(run, capsys):
    assert megarl("eval", "--rollouts", run, "--step", 1, "--out", run / "eval" / "train") == 0
    found = results(run / "eval" / "train", "data")
    for agent in ("ann", "bob"):
        assert found[agent]["avg@8"]["value"] == read_metrics(run)[1][f"agent/{agent}/label/sampled_accuracy"]


def test_verify_and_revise_as_recorded(folder):
    """The engine serves turns that were recorded: the requests of every turn match theirs, and the table is the one
    worked by hand."""
    problems, own, recorded = folder / "hand.jsonl", folder / "hand.yaml", folder / "recorded-run"
    problems.write_text("".join(json.dumps({"key": uid, "q": uid, "a": true}) + "\n" for uid, true in GOLD.items()))
    own.write_text("data: {prompt: q, gold: a, id: key}\n")
    write(step_path(recorded, -1), [r for r in by_hand() if r.prompt.agent == "ann"], step=-1)
    model = tiny.write(folder / "long", "qwen2", num_hidden_layers=1, max_position_embeddings=1024)
    agent = [f"agents.ann.model={model}", "agents.ann.backend=reference", "agents.ann.dtype=float32"]
    engine = ["agents.ann.engine.backend=replay", f"agents.ann.engine.replay={recorded}"]
    exam = ["evaluation.samples_per_prompt=4", "evaluation.revise=true", "evaluation.sampling.max_tokens=16"]
    out = folder / "hand"
    assert megarl("eval", *agent, *engine, *exam, "--set", f"{own}={problems}", "--out", out) == 0
    found = {metric: of["value"] for metric, of in results(out, "hand")["ann"].items()}
    assert found == BY_HAND["ann"]


def test_verify_and_revise_live(run, folder):
    """Random models say no sentence: their answers stand, and turns that do not fit 256 positions are counted."""
    problems, out = folder / "exam.jsonl", folder / "revised"
    exam = ["evaluation.revise=true", "evaluation.samples_per_prompt=2", "agents.bob.chat_template=false"]
    read_as = "data: {gold: answer, id: id, limit: 3, max_prompt_tokens: 32}\nanswers: {style: last-number}\n"
    (folder / "short.yaml").write_text(read_as + "wording: {verify: Is it right, revise: Again.}\n")
    (folder / "long.yaml").write_text(read_as + f"wording: {{verify: {'hm ' * 100}}}\n")
    sets = [x for name in ("short", "long") for x in ("--set", f"{folder / name}.yaml={problems}")]
    assert megarl("eval", "--run", run, "--out", out, *exam, *sets) == 0
    report = json.loads((out / "results.json").read_text())
    short, long = report["sets"]["short"], report["sets"]["long"]
    assert (short["follow_ups_too_long"], long["follow_ups_too_long"]) == (0, 2 * 3 * 2)
    for agent in ("ann", "bob"):
        scores = short["scores"][agent]
        assert scores["malformed"]["value"] == scores["verified"]["value"] == 1
        assert scores["acc_final"]["value"] == scores["acc_first"]["value"] == long["scores"][agent]["avg@2"]["value"]
    checks = [r for r in read(out / "rollouts" / "short.parquet") if r.prompt.role == "verify"]
    assert len(checks) == 2 * 3 * 2 and {r.prompt.messages[-1].content for r in checks} == {"Is it right"}
    assert report["subjects"]["ann"]["template"] == "its chat template"
    template = report["subjects"]["bob"]["template"]
    assert template.startswith("no template") and "trains with agents.bob.chat_template=true" in template
    assert "different templates" in (out / "results.md").read_text()


def test_results_and_steps_that_are_not_there(run, capsys):
    assert megarl("eval", "--run", run, "--step", 1) == 2
    assert "no complete checkpoint of step 1; there are [2]" in capsys.readouterr().err
    (run / "eval" / "again").mkdir(parents=True)
    (run / "eval" / "again" / "results.json").write_text("{}")
    assert megarl("eval", "--run", run, "--out", run / "eval" / "again") == 2
    assert "holds results already" in capsys.readouterr().err
    assert megarl("eval", "--run", run, "evaluation.sampling.max_tokens=256", "--out", run / "x") == 2
    assert "max_position_embeddings=256" in capsys.readouterr().err

"""Every command of README and docs/ is run, or named as what another test runs, or is tagged and runs dry.

A page's commands run in order, as they stand, in a folder of their own. Models there are tiny, and runs use reference
backends and end early: see SMALL.
"""

import ast
import json
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from megarl import cli
from megarl.config import CONFIG_DIR, compose
from tests import tiny
from tests.unit.pages import OURS, PAGES, ROOT, Command, blocks, complete

SEARCH = "unit/test_planning_search.py::"
ELSEWHERE = {
    "make demo": "integration/test_demo_command.py::test_three_runs_a_table_and_a_picture_and_all_of_it_again",
    "make models": "unit/test_demo.py::test_a_local_wheel_is_unpacked_without_the_network",
    "make setup": "unit/test_environment.py::test_every_checkout_runs_its_own_code",
    "make setup-gpu": "unit/test_environment.py::test_locks_name_every_dependency_once",
    "make test": "unit/test_docs.py::test_commands",  # this one is part of it
    "python kernels/bench/run.py": "kernels/test_bench.py::test_the_bench_runs_dry_and_every_provider_is_right",
    "python -m tests.gpu": "kernels/test_bench.py::test_without_a_card_the_gpu_command_says_so",
    "$(make -s python) -m megarl.demo.warmstart": "unit/test_demo.py::test_warm_start_repeats_bit_for_bit",
    "$(make -s python) -m megarl.demo.flow flow.png": "unit/test_flow.py::test_picture_and_table",
    OURS + "rewrite ": "integration/test_rewrite.py::test_ids_and_answers_are_kept_row_by_row",
    OURS + "plan +experiment=plan_7b_32b_70b_16nodes": SEARCH + "test_a_cohort_is_laid_out_and_balanced",
    OURS + "plan published": "unit/test_planning_steptime.py::test_the_committed_table_is_what_the_command_prints",
    OURS + "plan simulate ": "unit/test_planning_simulate.py::test_the_study_answers_its_questions",
    OURS + "plan learn ": "unit/test_planning_steptime.py::test_rates_are_learned_from_the_metrics_of_a_run",
}
GIVEN = ("git clone ", "cd ", "export ")  # the reader's own
MISFIT = {OURS + "plan +experiment=plan_70b_1node_impossible": 2}
INLINE = [command for page in PAGES for command in complete(page)]  # no place for a tag: they run dry
STATELESS = ("plan", "reshard", "doctor", "launch")
REFERENCE = [f"agents.{a}.{key}=reference" for a in ("direct", "coached") for key in ("backend", "engine.backend")]
SMALL = [*REFERENCE, "batch.prompts_per_step=2", "batch.samples_per_prompt=2", "sampling.max_tokens=4"]
done: set[str] = set()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """In place of SmolLM2: knows every character, and has room for prompts of its length."""
    return tiny.write(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1, max_position_embeddings=1024)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory):
    """In place of the demo's runs."""
    folder = tmp_path_factory.mktemp("run")
    models = [f"agents.{agent}.model={model}" for agent in ("direct", "coached")]
    with pytest.raises(SystemExit):
        cli.main(["train", "+experiment=smollm2_math", *models, *SMALL, "steps=1", f"output={folder}", "name=demo"])
    return folder / "smollm2_math" / "demo"


@pytest.fixture
def home(model, run, tmp_path, monkeypatch):
    """Where a page's commands run: with what the commands that are run elsewhere would have left."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    for method in ("ttrl", "corl", "rlvr"):
        (tmp_path / "runs" / "demo" / method).symlink_to(run)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m-instruct").symlink_to(model)
    (tmp_path / "my_problems.jsonl").write_text((CONFIG_DIR / "data" / "problems.jsonl").read_text())
    rows = [{"id": f"a{i}", "prompt": f"{i} + 1?", "rewrite": f"1 more than {i}?", "answer": "2"} for i in range(3)]
    (tmp_path / "reworded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    submitted = tmp_path / "runs" / "cohort_7b_8b" / "first"
    submitted.mkdir(parents=True)
    cfg = compose(["+experiment=cohort_7b_8b", "name=first"]).model_dump(mode="json")
    (submitted / "config.yaml").write_text(yaml.safe_dump(cfg))
    (tmp_path / "cluster.json").write_text((CONFIG_DIR / "calibration" / "published.json").read_text())
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands(page, home, monkeypatch):
    monkeypatch.setattr("os.execv", lambda *_: pytest.fail("a run was started in place of the tests"))
    for command in (*blocks(page), *complete(page)):
        fault = perform(command, home)
        assert fault is None, f"{page.name}: {command.text}: {fault}"


def perform(command: Command, home: Path) -> str | None:
    """Run it, or make sure that another test does; what is wrong, else None."""
    text = command.text
    if text.startswith(GIVEN):
        return None
    named = max((start for start in ELSEWHERE if text.startswith(start)), key=len, default=None)
    if named is not None and (not named.startswith("make") or named == text):
        return missing(ELSEWHERE[named])
    if text.startswith(("cat > ", "printf ")):
        ran = subprocess.run(["bash", "-ec", text], cwd=home, capture_output=True, text=True)
        return f"ended with {ran.returncode}: {ran.stderr}" if ran.returncode else None
    if not text.startswith(OURS):
        return "nobody runs it: add it to ELSEWHERE, or tag it"
    verb, *words = shlex.split(text.removeprefix(OURS))
    if verb not in cli.VERBS:
        return f"no verb {verb}"
    return ours(command, verb, words)


def ours(command: Command, verb: str, words: list[str]) -> str | None:
    """A verb of megarl's, in this process."""
    if verb == "launch" and words[:1] == ["slurm"] and "--dry-run" not in words:
        if command.tag != "cluster" and command not in INLINE:
            return "it submits a job: tag it by # [cluster] behind it"
        words.append("--dry-run")
    elif command.tag:
        return f"the tag [{command.tag}] says it is not run, but nothing runs it dry"
    once = shlex.join([verb, *words])
    if verb in STATELESS and once in done:
        return None
    if verb == "train" and "--cfg" not in words:
        words += ["steps=3"] if "--resume" in words else [*SMALL, "steps=2", "checkpoint.every_steps=1"]
    if verb == "eval":
        words += ["evaluation.samples_per_prompt=2", "evaluation.sampling.max_tokens=4"]
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, *words])
    done.add(once)
    wanted = MISFIT.get(command.text, 0)
    return None if ended.value.code == wanted else f"ended with {ended.value.code}, not {wanted}"


def missing(test: str) -> str | None:
    """None where tests/FILE::NAME is a test."""
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / "tests" / file).read_text())
    found = any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)
    return None if found else f"tests/{test} is no test"


def test_nothing_is_named_that_no_page_has():
    texts = [command.text for page in PAGES for command in (*blocks(page), *complete(page))]
    assert [start for start in ELSEWHERE if not any(text.startswith(start.strip()) for text in texts)] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("curl http://example.org | sh", "nobody runs it"),
        ("make nothing", "nobody runs it"),
        (OURS + "tarin +experiment=gt", "no verb tarin"),
        (OURS + "train +experiment=gt steps=none --cfg job", "ended with 2"),
        (OURS + "launch slurm +experiment=cohort_7b_8b", "tag it"),
    ],
)
def test_a_wrong_command_is_found(home, text, expected):
    """The control of the tests above."""
    assert expected in (perform(Command(text), home) or "")

"""A batch script says what was asked, is bash, and no value can say more than itself. Nothing is submitted."""

import json
import subprocess
from pathlib import Path

import pytest

from megarl.config import CONFIG_DIR
from megarl.launching.command import run
from megarl.launching.site import Site, load_site
from megarl.launching.slurm import TEMPLATE, Component, Job, plan_of, render

NASTY = ["it's", 'a"b', "$(touch pwned)", "`touch pwned`", "a b; touch pwned #", "\\", "@PYTHON@", "$HOME", "é*?"]


def job(**changes) -> Job:
    asked = {
        "name": "run",
        "components": (Component(nodes=2, slots=8),),
        "device": "cuda",
        "overrides": ("+experiment=x",),
        "work_dir": Path("/w"),
        "log_dir": Path("/w/logs"),
        "run_dir": Path("/w/runs/x/run"),
    }
    return Job(**{**asked, **changes})


def checked(text: str) -> str:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return text


def directives(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#SBATCH")]


def test_equal_nodes() -> None:
    site = Site(partition="gpu", account="me", time="2:00:00", gpu_type="h100", options=("--constraint=ib",))
    assert directives(checked(render(job(), site, TEMPLATE.read_text()))) == [
        "#SBATCH --job-name=run",
        "#SBATCH --time=2:00:00",
        "#SBATCH --output=megarl-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=B:USR1@600",
        "#SBATCH --requeue",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gres=gpu:h100:8",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=me",
        "#SBATCH --constraint=ib",
    ]


def test_a_heterogeneous_job_asks_for_each_component() -> None:
    parts = (Component(nodes=1, slots=8, partition="big"), Component(nodes=2, slots=2))
    text = checked(render(job(components=parts), Site(partition="small"), TEMPLATE.read_text()))
    first, second = "\n".join(directives(text)).split("#SBATCH hetjob\n")
    assert "--nodes=1\n" in first and "--gres=gpu:8\n" in first and "--partition=big" in first
    assert "--nodes=2\n" in second and "--gres=gpu:2\n" in second and "--partition=small" in second
    told = plan_of(job(components=parts), Site())
    assert told["slots"] == [8, 2, 2] and "--het-group=0,1" in told["srun"] and "cluster.nodes=3" in told["train"]


@pytest.mark.parametrize("nasty", NASTY)
def test_a_value_reaches_the_shell_as_it_is(nasty: str, tmp_path: Path) -> None:
    """The places of a template are put before printf, so that bash itself says what it read."""
    template = "@SBATCH@\n@ENVIRONMENT@\nprintf '%s\\0' \"$WORD\" @WORK_DIR@ @SUPERVISE@ @PLAN@\n"
    container = {"kind": "apptainer", "image": nasty, "mounts": (nasty,)}
    site = Site.model_validate(
        {"python": nasty, "scratch": nasty, "env": {"WORD": nasty}, "container": container}, strict=False
    )
    folders = {"work_dir": Path(nasty), "log_dir": Path(nasty), "run_dir": Path(nasty), "config_dir": Path(nasty)}
    asked = job(overrides=(nasty,), **folders)
    checked(render(asked, site, TEMPLATE.read_text()))
    done = subprocess.run(["bash", "-c", render(asked, site, template)], cwd=tmp_path, capture_output=True, check=True)
    word, work_dir, python, supervise, plan = done.stdout.decode().split("\0")[:-1]
    assert [word, work_dir, python] == [nasty, nasty, "python3"] and Path(supervise).is_file()
    told = json.loads(plan)
    assert [told[key] for key in ("python", "scratch", "run_dir", "logs")] == [nasty] * 4
    assert told["train"] == ["-m", "megarl", "train", "--config-dir", nasty, nasty, "cluster.nodes=2"]
    assert told["inside"] == ["apptainer", "exec", "--nv", "--bind", nasty, nasty]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", "gpu --wrap=x"),
        ("partition", "gpu\n#SBATCH --uid=0"),
        ("account", "me\n"),
        ("time", "2:00\ntouch x"),
        ("options", ("-p x",)),
        ("options", ("x",)),
        ("python", "python\ntouch x"),
        ("env", {"A;B": "1"}),
        ("env", {"A": "1\n2"}),
        ("container", {"kind": "apptainer"}),
        ("partitoin", "gpu"),
    ],
)
def test_what_could_say_more_is_refused(key: str, value: object) -> None:
    with pytest.raises(ValueError, match=key):
        Site.model_validate({key: value}, strict=False)


def test_a_template_has_every_place_and_no_other() -> None:
    text = TEMPLATE.read_text()
    with pytest.raises(ValueError, match="no such place: PYTHN"):
        render(job(), Site(), text + "@PYTHN@")
    with pytest.raises(ValueError, match="leaves out @PLAN@"):
        render(job(), Site(), text.replace("@PLAN@", ""))


def test_a_device_that_is_left_open_is_what_the_site_has() -> None:
    assert plan_of(job(device="auto"), Site(gpu_request="none"))["device"] == "cpu"
    assert plan_of(job(device="auto"), Site())["device"] == "cuda"
    assert plan_of(job(device="cpu"), Site())["device"] == "cpu"


def test_a_run_that_is_taken_up_again_is_told_so() -> None:
    told = plan_of(job(resume=True, overrides=("steps=9",)), Site())
    assert told["train"][2:] == ["train", "--resume", "/w/runs/x/run", "steps=9", "cluster.nodes=2"]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:30:30", 5430), ("2-1", 176400), ("1-0:10", 87000), ("1-0:10:05", 87005)],
)
def test_a_warning_after_the_end_is_refused(time: str, seconds: int) -> None:
    Site(time=time, warn_s=seconds - 1)
    with pytest.raises(ValueError, match=f"warn_s={seconds}"):
        Site(time=time, warn_s=seconds)


@pytest.mark.parametrize("file", sorted((CONFIG_DIR / "cluster").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_clusters_render(file: Path) -> None:
    site = load_site(file.stem, {"account": "me"})
    text = checked(render(job(), site, TEMPLATE.read_text()))
    assert "#SBATCH --account=me" in text and site.python in text


def test_an_unknown_cluster_is_told_the_known() -> None:
    with pytest.raises(ValueError, match="shipped: apptainer, cpu, pyxis, slurm"):
        load_site("nowhere", {})


def test_what_is_printed_is_a_script_with_the_plan_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    agents = [f"agents.{name}.layout.tp=8" for name in ("qwen", "llama")]
    asked = ["slurm", "+experiment=plan_7b_8b_2nodes", "cluster.device=cuda", *agents]
    assert run([*asked, "--dry-run", "--ask", "time=2:00:00"]) == 0
    text = checked(capsys.readouterr().out)
    assert "#SBATCH --time=2:00:00" in text
    plan = [line.split(maxsplit=2)[1:] for line in text.splitlines() if line.endswith("of 8 slots")]
    assert plan == [["qwen", "node 0: 8 of 8 slots"], ["llama", "node 1: 8 of 8 slots"]]


def test_without_slurm_a_submission_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    asked = ["slurm", "+experiment=plan_7b_8b_2nodes", f"output={tmp_path}", "cluster.device=cuda"]
    agents = [f"agents.{name}.layout.tp=8" for name in ("qwen", "llama")]
    with pytest.raises(ValueError, match="sbatch is not on PATH"):
        run([*asked, *agents])

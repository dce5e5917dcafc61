"""A batch script says what was asked, is bash, and no value can say more than itself. Nothing is submitted."""

import shlex
import subprocess
from pathlib import Path

import pytest

from megarl.config import CONFIG_DIR
from megarl.launching.command import run
from megarl.launching.site import Site, load_site
from megarl.launching.slurm import TEMPLATE, Component, Job, render

NASTY = ["it's", 'a"b', "$(touch pwned)", "`touch pwned`", "a b; touch pwned #", "\\", "@PYTHON@", "$HOME", "é*?"]


def job(**changes) -> Job:
    asked = {
        "name": "run",
        "components": (Component(nodes=2, slots=8),),
        "device": "cuda",
        "overrides": ("+experiment=x",),
        "work_dir": Path("/w"),
        "log_dir": Path("/w/logs"),
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
        "#SBATCH --no-requeue",
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
    assert "slots=(8 2 2)" in text and "--het-group=0,1" in text and "cluster.nodes=3" in text


@pytest.mark.parametrize("nasty", NASTY)
def test_a_value_reaches_the_shell_as_it_is(nasty: str, tmp_path: Path) -> None:
    """The places of a template are put before printf, so that bash itself says what it read."""
    places = "@WORK_DIR@ @LOG_DIR@ @PYTHON@ @SCRATCH@ @TRAIN@ @SRUN@ @INSIDE@"
    template = (
        f"@SBATCH@\n@ENVIRONMENT@\n: @NODES@ @SLOTS_@ @FORM_TIMEOUT_S@ @DEVICE@\nprintf '%s\\0' \"$WORD\" {places}\n"
    )
    template = template.replace("@SLOTS_@", "\nslots=@SLOTS@\n: ")
    container = {"kind": "apptainer", "image": nasty, "mounts": (nasty,)}
    site = Site.model_validate(
        {"python": nasty, "scratch": nasty, "env": {"WORD": nasty}, "container": container}, strict=False
    )
    asked = job(overrides=(nasty,), work_dir=Path(nasty), log_dir=Path(nasty), config_dir=Path(nasty))
    checked(render(asked, site, TEMPLATE.read_text()))
    script = render(asked, site, template)
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    said = done.stdout.split("\0")[:-1]
    assert said[:5] == [nasty] * 5
    assert said[5:11] == ["-m", "megarl", "train", "--config-dir", nasty, nasty]
    assert said[-6:] == ["apptainer", "exec", "--nv", "--bind", nasty, nasty]
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
    with pytest.raises(ValueError, match="leaves out @TRAIN@"):
        render(job(), Site(), text.replace("@TRAIN@", ""))


def test_the_device_is_stated() -> None:
    with pytest.raises(ValueError, match=r"cluster\.device=auto"):
        render(job(device="auto"), Site(), TEMPLATE.read_text())


@pytest.mark.parametrize("file", sorted((CONFIG_DIR / "cluster").glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_clusters_render(file: Path) -> None:
    site = load_site(file.stem, {"account": "me"})
    text = checked(render(job(), site, TEMPLATE.read_text()))
    assert "#SBATCH --account=me" in text and shlex.quote(site.python) in text


def test_an_unknown_cluster_is_told_the_known() -> None:
    with pytest.raises(ValueError, match="shipped: apptainer, cpu, pyxis, slurm"):
        load_site("nowhere", {})


def test_what_is_printed_is_a_script_with_the_plan_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    agents = [f"agents.{name}.layout.tp=8" for name in ("qwen", "llama")]
    asked = ["slurm", "+experiment=plan_7b_8b_2nodes", "cluster.device=cuda", *agents]
    with pytest.raises(ValueError, match="add --dry-run"):
        run(asked)
    assert run([*asked, "--dry-run", "--ask", "time=2:00"]) == 0
    text = checked(capsys.readouterr().out)
    assert "#SBATCH --time=2:00" in text
    plan = [line.split(maxsplit=2)[1:] for line in text.splitlines() if line.endswith("of 8 slots")]
    assert plan == [["qwen", "node 0: 8 of 8 slots"], ["llama", "node 1: 8 of 8 slots"]]

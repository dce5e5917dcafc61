"""Commands of README and docs/ are commands: what they name exists, and every run they describe composes."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from megarl.cli import VERBS
from megarl.config import compose
from megarl.launching.command import run as launch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "kernels" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OURS = "$(make -s python) -m megarl "
OTHERS = ("git clone", "python kernels/bench/run.py", "python -m tests.gpu")  # tests/kernels/test_bench.py runs those


def commands(page: Path) -> list[str]:
    """Lines of the page's bash blocks, without comments and set variables in front."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.S | re.M)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [re.sub(r"^(\w+=\S+ )+", "", part) for part in parts if part and not part.startswith(("#", "cd "))]


CASES = [(page.relative_to(ROOT).as_posix(), command) for page in PAGES for command in commands(page)]


def test_pages_have_commands():
    assert len(CASES) > 10


@pytest.mark.parametrize(("page", "command"), CASES, ids=lambda text: text[:60])
def test_a_command_is_one(page, command, tmp_path, monkeypatch, capsys):
    if command.startswith("make "):
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(command.split()[1:]) <= set(targets), f"{page}: {command}"
    elif command.startswith(OURS):
        verb, *words = shlex.split(command.removeprefix(OURS))
        assert verb in VERBS, f"{page}: {command}"
        if "--resume" in words or not any(word.startswith("+experiment=") for word in words):
            return  # of a run that exists
        if verb == "launch":
            monkeypatch.chdir(tmp_path)
            assert launch([*words, *(() if "--dry-run" in words else ("--dry-run",))]) == 0
            assert "#SBATCH" in capsys.readouterr().out
        else:
            compose([word for word in words if "=" in word and not word.startswith("--")])
    elif command.startswith("$(make -s python) -m "):
        assert importlib.util.find_spec(command.split()[4]) is not None, f"{page}: {command}"
    else:
        assert command.startswith(OTHERS), f"{page}: {command}: what is it?"

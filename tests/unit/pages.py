"""README and the pages of docs/ as lists of commands: those of fenced blocks, and those that stand in a sentence.

`megarl VERB` is short for `$(make -s python) -m megarl VERB`, as README says.
"""

import re
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "kernels" / "README.md",
    ROOT / "megarl" / "planning" / "README.md",
]
OURS = "$(make -s python) -m megarl "
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)
_COMMAND = re.compile(r"^(?:\w+=\S+ )*(?:\$\(make -s python\)|make|megarl|python3?|git|cat|printf|sbatch) ", re.M)
_HERE = re.compile(r"<<'(\w+)'$")
_LONG = re.compile(r"^megarl (?=\w)")
_WHOLE = re.compile(r"python -m tests\.|\$\(make -s python\) -m megarl(?:\.| \w+ .*(?:\+experiment=|runs/))")
_LEFT_OPEN = re.compile(r"\.\.\.|\[|\b[A-Z]{2,}\b")  # for the reader to fill in
_SET = re.compile(r"^(?:[A-Z_]+=\S+ )+")  # variables in front of a command


@dataclass(frozen=True)
class Command:
    """One command of a page; ``tag`` is what it needs beyond this machine, from a comment behind it: # [cluster]."""

    text: str
    tag: str | None = None


def blocks(page: Path) -> list[Command]:
    """The commands of the page's bash blocks, in order; a here-document belongs to its command."""
    found: list[Command] = []
    for language, text in _FENCE.findall(page.read_text()):
        if language != "bash":
            assert not _COMMAND.search(text), f"{page}: commands stand in ```bash blocks, not in ```{language}"
            continue
        lines = iter(text.splitlines())
        for line in lines:
            if here := _HERE.search(line):
                body = takewhile(lambda text, end=here[1]: text != end, lines)
                found.append(Command("\n".join([line, *body, here[1]]) + "\n"))
            else:
                found += _of_line(line)
    return found


def _of_line(line: str) -> list[Command]:
    code, _, comment = line.partition("  #")
    tag = re.search(r"\[(\w+)\]", comment)
    parts = [_LONG.sub(OURS, _SET.sub("", part.strip())) for part in code.split(" && ")]
    return [Command(part, tag[1] if tag else None) for part in parts if part and not part.startswith("#")]


def complete(page: Path) -> list[Command]:
    """The commands in sentences that are all there: they name an experiment, a run or a module, and leave nothing to
    the reader.
    """
    texts = [_LONG.sub(OURS, text) for text in inline(page)]
    return [Command(text) for text in texts if _WHOLE.match(text) and not _LEFT_OPEN.search(text)]


def inline(page: Path) -> list[str]:
    """Everything between single backquotes, outside of blocks, on one line."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", _FENCE.sub("", page.read_text()))]

"""What stands in sentences of README and docs/: keys, options, files, metrics and messages that exist."""

import ast
import contextlib
import io
import json
import re
from functools import cache

import pytest

from megarl import cli
from megarl.config import RunConfig
from tests.unit.pages import PAGES, ROOT, blocks, inline

PAGES = [page for page in PAGES if page.name != "configuration.md"]  # written from the models
FOLDERS = ("configs", "docs", "kernels", "launch", "megarl", "tests")
KEY = re.compile(rf"~?((?:{'|'.join(RunConfig.model_fields)})\.[\w.]+)(?:=\S*)?")
METRIC = re.compile(r"(?:label|reward|policy|engine|cohort|verifier|eval)/(\w+)(?:/a~b)?")
OPTION = re.compile(r"(?<!\S)\[?(--[a-z-]+)")
SOURCES = [path for folder in ("megarl", "launch") for path in (ROOT / folder).rglob("*.py")]


@cache
def keys() -> set[str]:
    page = (ROOT / "docs" / "configuration.md").read_text()
    return set(re.findall(r"^\| `(\S+)` \|", page, re.M))


@cache
def helps(verb: str, *own: str) -> str:
    """What ``megarl VERB --help`` prints."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.suppress(SystemExit):
        cli.VERBS[verb]([*own, "--help"])
    return told.getvalue()


@cache
def said() -> list[str]:
    """The constant pieces, of 10 characters or more, of what the source may say."""
    trees = [ast.parse(path.read_text()) for path in SOURCES]
    texts = [n.value for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    return [piece for text in texts if isinstance(text, str) if len(piece := text.strip(" ,:;()=\n")) >= 10]


def key_fault(text: str) -> str | None:
    """Of ``key=value key=value`` or a key alone."""
    found = [KEY.fullmatch(word) for word in text.split()]
    if not found or None in found:
        return None
    for key in (match[1] for match in found if match):
        known = re.sub(r"^agents\.\w+", "agents.X", key)
        known = re.sub(r"^((?:evaluation\.)?data\.views)\.\w+", r"\1.X", known)
        known = re.sub(r"^evaluation\.(data|sampling)\.", r"\1.", known)
        if known not in keys() and known != "algo.name" and not known.startswith(("megatron.", "vllm.")):
            return f"no key {key}"
    return None


def command_fault(text: str) -> str | None:
    """Of a verb or a target, with or without words behind it."""
    if text.startswith("make "):
        target = text.split()[1]
        return None if re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M) else f"no target {target}"
    match = re.match(r"(?:\$\(make -s python\) -m )?megarl (\w+)(.*)", text)
    if match is None:
        return None
    verb, rest = match[1], match[2]
    if verb not in cli.VERBS:
        return f"no verb {verb}"
    own = rest.split()[:1] if verb == "plan" and rest.split()[:1] in (["learn"], ["published"], ["simulate"]) else []
    unknown = [option for option in OPTION.findall(rest) if option not in helps(verb, *own)]
    return f"megarl {verb} has no {', '.join(unknown)}" if unknown else None


def file_fault(text: str) -> str | None:
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)*/?", text) and text.split("/")[0] in FOLDERS and "/" in text:
        made = text.startswith("kernels/bench/results")
        return None if made or (ROOT / text).exists() else f"no file {text}"
    return None


def metric_fault(text: str) -> str | None:
    if match := METRIC.fullmatch(text):
        stem = re.sub(r"_(solve|verify|revise)$", "", match[1])
        return None if any(stem in path.read_text() for path in SOURCES) else f"no metric {text}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_words(page):
    texts = [*inline(page), *(command.text for command in blocks(page))]
    faults = [fault(text) for text in texts for fault in (key_fault, command_fault, file_fault, metric_fault)]
    assert [fault for fault in faults if fault] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links(page):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_messages_are_those_of_the_source():
    """docs/troubleshooting.md, second column: each holds a piece of what the source says."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [re.split(r"(?<!\\)\|", line)[2] for line in text.splitlines() if line.startswith("| ")]
    messages = [m for cell in rows for m in re.findall(r"`([^`]+)`", cell) if m.count(" ") > 2]
    assert len(messages) > 30
    assert [m for m in messages if not _is_said(m)] == []


def _is_said(message: str) -> bool:
    parts = [part.strip(" ,:;()") for part in message.split("...")]
    return any(piece in message for piece in said()) or any(
        part in piece for part in parts if len(part) >= 10 for piece in said()
    )


def test_the_table_of_scaling_is_the_planners(capsys):
    """GPUs, layouts and predicted seconds, as `megarl plan` prints them."""
    text = (ROOT / "docs" / "scaling.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `c")]
    rows += [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `r")]
    assert len(rows) == 3
    for name, _, gpus, policies, engines, seconds in rows:
        assert cli.plan([f"+experiment={name.strip('`')}", "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        layouts = [agent["layout"] for agent in plan["agents"].values()]
        assert gpus == f"{plan['gpus_used']} of {plan['nodes'] * plan['gpus_per_node']}"
        assert engines == ", ".join(f"TP{of['engine_tp']} x{of['engine_replicas']}" for of in layouts)
        assert policies == ", ".join(_spelt(of) for of in layouts)
        assert seconds == f"{plan['predicted_seconds']['step']:.0f} s"


def _spelt(layout: dict) -> str:
    sizes = [f"{key.upper()}{layout[key]}" for key in ("tp", "pp", "cp", "dp") if layout[key] > 1]
    return "x".join(sizes) + ("+SP" if layout["sp"] else "")


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (key_fault, "batch.promts_per_step=3"),
        (key_fault, "agents.a.lr"),
        (command_fault, "megarl tarin"),
        (command_fault, "megarl plan --serach"),
        (command_fault, "make nothing"),
        (file_fault, "megarl/nothing.py"),
        (metric_fault, "label/nothing_of_the_kind"),
        (lambda text: None if _is_said(text) else text, "`your computer is on fire, please ... leave`"),
    ],
)
def test_what_does_not_exist_is_found(fault, text):
    """The controls."""
    assert fault(text) is not None

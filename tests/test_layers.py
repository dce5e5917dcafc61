"""Who may import what. The text of the imports is walked, not sys.modules: torch loads torch.distributed by itself."""

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = {"megarl": "megarl", "kernels/megarl_kernels": "megarl_kernels", "launch": "launch"}  # folder -> package

FRAMEWORKS = ("ray", "vllm", "megatron", "torch.distributed")
PURE = tuple(
    f"megarl.{name}"
    for name in (
        *(
            "types",
            "settings",
            "guard_settings",
            "config",
            "algos",
            "answers",
            "deck",
            "rows",
            "shape",
            "chat",
            "packing",
            "loss",
            "advantages",
        ),
        *("schedule", "diagnostics", "verification", "rollouts", "planning", "views", "diversity"),
        *("collapse", "choices", "flow", "backends.shards", "launching.site", "launching.slurm"),
        *(f"evaluation.{part}" for part in ("estimate", "score", "sets", "pairs", "report")),
        *("report.steps", "report.page"),
    )
)
ROOT_MODULES_OF_PURE = (*PURE, "megarl_kernels")


def inside(module: str, packages: tuple[str, ...]) -> bool:
    """Is the module one of the packages, or in one?"""
    return any(module == p or module.startswith(p + ".") for p in packages)


class Rule(NamedTuple):
    name: str
    binds: Callable[[str], bool]  # importing module -> does the rule speak of it?
    allows: Callable[[str], bool]  # imported name -> may it?
    breach: tuple[str, str]  # (module, its source): caught
    fine: tuple[str, str]  # passes


def is_ours(name: str) -> bool:
    return inside(name, ("megarl", "megarl_kernels"))


RULES = [
    Rule(
        "ray, vllm, megatron and torch.distributed stay below megarl/backends",
        lambda m: not inside(m, ("megarl.backends", "megarl_kernels", "launch")),
        lambda name: not inside(name, FRAMEWORKS),
        ("megarl.loss", "import torch\ndef f():\n    from torch import distributed"),
        ("megarl.backends.megatron.worker", "import torch.distributed as dist\nimport ray"),
    ),
    Rule(
        "kernels know torch.distributed, but neither an engine, nor Megatron, nor megarl",
        lambda m: inside(m, ("megarl_kernels",)),
        lambda name: not inside(name, ("megarl", "ray", "vllm", "megatron")),
        ("megarl_kernels.logprob", "from megarl.types import Sample"),
        ("megarl_kernels.logprob", "import torch.distributed\nfrom . import reference"),
    ),
    Rule(
        "pure modules import nothing of megarl but pure modules",
        lambda m: inside(m, PURE),
        lambda name: not is_ours(name) or name == "megarl" or inside(name, ROOT_MODULES_OF_PURE),
        ("megarl.packing", "from megarl import backends"),
        ("megarl.loss", "from megarl.types import Microbatch\nfrom megarl_kernels.token_loss import token_loss"),
    ),
    Rule(
        "types and settings import nothing of megarl",
        lambda m: inside(m, ("megarl.types", "megarl.settings")),
        lambda name: not is_ours(name),
        ("megarl.settings", "from megarl.algos import AnyAlgorithm"),
        ("megarl.settings", "import math"),
    ),
    Rule(
        "algorithms see neither the deck, which holds the true answers, nor diagnostics",
        lambda m: inside(m, ("megarl.algos",)),
        lambda name: not inside(name, ("megarl.deck", "megarl.diagnostics")),
        ("megarl.algos.ttrl", "from ..deck import Deck"),
        ("megarl.algos.ttrl", "from .common import tally"),
    ),
    Rule(
        "backends know no algorithm, no run configuration and nobody who drives them",
        lambda m: inside(m, ("megarl.backends",)),
        lambda name: (
            not is_ours(name)
            or name == "megarl"
            or inside(
                name,
                (
                    *("megarl.backends", "megarl.types", "megarl.settings", "megarl.packing", "megarl.loss"),
                    *("megarl.chat", "megarl.rollouts", "megarl.planning", "megarl.profiling", "megarl_kernels"),
                ),
            )
        ),
        ("megarl.backends.reference", "from megarl.config import RunConfig"),
        ("megarl.backends.megatron.worker", "from megarl.backends.protocols import Policy\nimport megarl_kernels"),
    ),
    Rule(
        "the report reads what runs left behind, and knows nobody who makes it",
        lambda m: inside(m, ("megarl.report",)),
        lambda name: (
            not is_ours(name)
            or name in ("megarl", "megarl.__version__")
            or inside(name, ("megarl.report", "megarl.log", *PURE))
        ),
        ("megarl.report.run", "from megarl.agents import open_agents"),
        ("megarl.report.run", "from megarl.log import read_metrics\nfrom megarl.collapse import signs"),
    ),
    Rule(
        "nothing imports train but commands",
        lambda m: m not in ("megarl.cli", "megarl.train", "megarl.demo.command"),
        lambda name: not inside(name, ("megarl.train",)),
        ("megarl.demo.run", "from megarl.train import train"),
        ("megarl.cli", "from megarl.train import train"),
    ),
    Rule(
        "launch scripts run before anything is installed: the standard library only",
        lambda m: inside(m, ("launch",)),
        lambda name: name.partition(".")[0] in sys.stdlib_module_names,
        ("launch.node", "import yaml"),
        ("launch.node", "import json, os.path"),
    ),
]


def imported(source: str, module: str, is_package: bool) -> Iterator[str]:
    """Every dotted name that the source imports: for ``from a import b`` both a and a.b; also by import_module."""
    home = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = home[: len(home) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))


def breaches(rule: Rule, module: str, source: str, is_package: bool = False) -> list[str]:
    """What the module imports against the rule."""
    if not rule.binds(module):
        return []
    return sorted(
        {f"{module} imports {name}" for name in imported(source, module, is_package) if not rule.allows(name)}
    )


def modules() -> Iterator[tuple[str, Path]]:
    """Every Python file of the shipped sources under its import name."""
    for folder, package in SOURCES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(p for p in parts if p != "__init__")]), path


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_imports_keep_their_direction(rule):
    found = [b for m, path in modules() for b in breaches(rule, m, path.read_text("utf-8"), path.name == "__init__.py")]
    assert not found, rule.name


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_each_rule_catches_its_breach_and_passes_what_is_fine(rule):
    assert breaches(rule, *rule.breach)
    assert rule.binds(rule.breach[0])
    assert not breaches(rule, *rule.fine)


@pytest.mark.parametrize(
    "source",
    [
        "import ray",
        "import torch.distributed as dist",
        "from torch import distributed as dist",
        "from torch.distributed import all_reduce",
        "def late():\n    from vllm import LLM",
        "import importlib\nimportlib.import_module('megatron.core')",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import ray.actor",
    ],
)
def test_every_way_of_importing_is_seen(source):
    assert breaches(RULES[0], "megarl.train", source)


def test_relative_imports_are_resolved():
    assert list(imported("from ..config import RunConfig", "megarl.backends.reference", False)) == [
        "megarl.config",
        "megarl.config.RunConfig",
    ]
    assert list(imported("from . import deck", "megarl", True)) == ["megarl", "megarl.deck"]


def test_the_walk_finds_the_house():
    names = {m for m, _ in modules()}
    assert {"megarl.types", "megarl.backends", "megarl.backends.protocols", "megarl_kernels"} <= names


def test_folders_that_must_not_be_packages():
    """``import kernels`` belongs to another project, which transformers looks for; see README of kernels/."""
    found = [f for f in (".", "kernels", "configs", "launch") if (ROOT / f / "__init__.py").exists()]
    assert not found

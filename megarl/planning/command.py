"""`megarl plan`: does this cohort fit on those GPUs, how is it best laid out, and how long will a step take?"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megarl.config import RunConfig, compose
from megarl.planning.advice import Problem, changes, missing
from megarl.planning.calibration import learn, load_rates, report
from megarl.planning.devices import DEVICES
from megarl.planning.picture import draw
from megarl.planning.request import choices_of, needs_of, setting_of
from megarl.planning.search import Plan
from megarl.planning.show import misfit_as_data, plan_as_data, print_misfit, print_plan, print_study
from megarl.planning.studies import by_interval, by_nodes
from megarl.planning.workload import Expectations

MISFIT = 2


def run(argv: Sequence[str]) -> int:
    """0: it fits; 2: it does not. The words `published`, `learn` and `simulate` are commands of their own."""
    others = {"published": published, "learn": learn_rates, "simulate": simulate}
    if argv and argv[0] in others:
        return others[argv[0]](argv[1:])
    args = _parser().parse_intermixed_args(argv)
    cfg = compose(args.overrides, args.config_dir)
    expect = _expectations(args)
    problem = _problem(cfg, args, expect, free=args.search)
    found = problem.solve()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if isinstance(found, Plan):
        data = plan_as_data(cfg, found, problem, expect)
        print(json.dumps(data, indent=1)) if args.json else print_plan(console, data)
        return 0
    stated = any(need.layout is not None for need in problem.needs)
    remedies = changes(problem, (lambda: _problem(cfg, args, expect, free=True)) if stated else None)
    data = misfit_as_data(cfg, problem, missing(problem, found), remedies, expect)
    print(json.dumps(data, indent=1)) if args.json else print_misfit(console, data)
    return MISFIT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megarl plan", description=__doc__)
    parser.add_argument("overrides", nargs="*", help="+experiment=NAME and key=value")
    parser.add_argument("--json", action="store_true", help="for scripts")
    parser.add_argument("--device", choices=tuple(DEVICES), default="h100")
    parser.add_argument("--placement", choices=("dedicated", "shared"), default="dedicated")
    parser.add_argument("--search", action="store_true", help="look for better layouts than the configuration states")
    parser.add_argument("--rates", type=Path, help="what your cluster reaches, from `megarl plan learn`")
    parser.add_argument("--prompt-tokens", type=float, help="mean of a prompt")
    parser.add_argument("--response-share", type=float, default=Expectations().response_share, help="mean / max_tokens")
    parser.add_argument("--response-spread", type=float, default=Expectations().spread, help="sigma of log tokens")
    parser.add_argument("--refit", choices=("gathered", "planned"), default="gathered")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own experiment/, algo/ ... YAML files")
    return parser


def _expectations(args: Any) -> Expectations:
    return Expectations(
        prompt_tokens=args.prompt_tokens, response_share=args.response_share, spread=args.response_spread
    )


def _problem(cfg: RunConfig, args: Any, expect: Expectations, *, free: bool) -> Problem:
    needs = needs_of(cfg, expect, layouts="none" if free else "stated")
    return Problem(
        needs=needs,
        choices=choices_of(cfg, needs, free=free),
        setting=setting_of(cfg, DEVICES[args.device], load_rates(args.rates), refit=args.refit),
        saves=cfg.checkpoint.every_steps is not None,
        placement=args.placement,
    )


def published(argv: Sequence[str]) -> int:
    """Predictions against published runs, fitted rows marked: megarl plan published [--refit] [--json]"""
    parser = argparse.ArgumentParser(prog="megarl plan published", description=published.__doc__)
    parser.add_argument("--refit", action="store_true", help="fit anew instead of reading the shipped rates")
    parser.add_argument("--write", type=Path, help="write the rates there")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args(argv)
    report(refit=args.refit, write=args.write, markdown=args.markdown)
    return 0


def learn_rates(argv: Sequence[str]) -> int:
    """Rates of a cluster from the metrics of finished runs: megarl plan learn RUN_DIR... --write FILE"""
    parser = argparse.ArgumentParser(prog="megarl plan learn", description=learn_rates.__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--device", choices=tuple(DEVICES), default="h100")
    parser.add_argument("--write", type=Path, required=True)
    args = parser.parse_args(argv)
    learn(args.runs, DEVICES[args.device], args.write)
    return 0


def simulate(argv: Sequence[str]) -> int:
    """Barriers against dataflow, dedicated against shared, 1 to 1,024 nodes: megarl plan simulate --plot FILE"""
    parser = _parser()
    parser.description = simulate.__doc__
    parser.add_argument("--plot", type=Path, help="PNG")
    parser.add_argument("--steps", type=int, default=300, help="steps of every simulated run")
    args = parser.parse_intermixed_args(argv)
    overrides = args.overrides or ["+experiment=plan_7b_32b_70b_16nodes"]
    cfg = compose(overrides, args.config_dir)
    plans = {}
    for placement in ("dedicated", "shared"):
        args.placement = placement
        plans[placement] = _problem(cfg, args, _expectations(args), free=args.search).solve()
        if not isinstance(plans[placement], Plan):
            raise ValueError(
                f"{cfg.experiment}: no {placement} plan fits, so there is nothing to simulate; see megarl plan"
            )
    phases = {kind: {name: option.seconds for name, option in plan.options.items()} for kind, plan in plans.items()}
    options = plans["dedicated"].options
    used = sum(option.gpus for option in options.values())
    shares = {name: option.gpus / used for name, option in options.items()}
    rows = by_nodes(phases["dedicated"], phases["shared"], shares, args.steps)
    rows += by_interval(phases["dedicated"], shares, args.steps)
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print_study(Console(width=100), rows)
    if args.plot:
        draw(rows, f"{cfg.experiment}, simulated, {args.steps} steps", args.plot)
    return 0

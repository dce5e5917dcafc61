"""`megarl diversity`: which of several models make a cohort, told by their answers to one problem file."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megarl import rollouts
from megarl.agents import open_agents, open_chats, reshard_all, rolling
from megarl.answers.read import read_answers
from megarl.backends.cluster import WorkerLost
from megarl.config import CONFIG_DIR, compose_raw, validate
from megarl.deck import open_deck
from megarl.diversity import Answers, Overlap, Ring, alone, answers_of, pairs, rings
from megarl.evaluation.ask import ask, deck_of, seats
from megarl.evaluation.command import completed, prepared
from megarl.evaluation.sets import ExamSet, open_set
from megarl.types import Gold, Rollout

_LOST = 1


def run(argv: Sequence[str]) -> int:
    """Ask the models (or read what they said), print pairs and rings, the most promising first."""
    args = _parse(argv)
    exam = open_set(args.set, [CONFIG_DIR, *([args.config_dir] if args.config_dir else [])])
    try:
        seen = _recorded(args.rollouts) if args.rollouts else _asked(args, exam)
    except (WorkerLost, TimeoutError) as lost:
        print(f"megarl diversity: {lost}", file=sys.stderr)
        return _LOST
    answers = answers_of(read_answers(seen, exam.answers))
    if len(answers) < 2:
        raise ValueError(
            f"diversity compares agents, and there is only {', '.join(answers) or 'none'}: name two models"
        )
    if args.ring and not all(2 <= size <= len(answers) for size in args.ring):
        raise ValueError(f"--ring {args.ring}: there are {len(answers)} agents, so rings of 2 to {len(answers)}")
    gold = open_deck(exam.data, {}, 0).gold
    found = pairs(answers, gold)
    sizes = [size for size in args.ring or (2, 3) if size <= len(answers)]
    ranked = rings(answers, gold, sizes=sizes, votes=args.votes) if gold else []
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_pair_table(found))
    if gold:
        console.print(_agent_table(answers, gold, args.votes))
        console.print(_ring_table(ranked[: args.top], args.votes))
    samples = min(len(of) for uids in answers.values() for of in uids.values())
    if samples < 4:
        console.print(f"{samples} samples per problem: p_A + p_B > 1 is a coarse guess; 4 or more tell more")
    if args.out:
        _write(args.out, found, ranked)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megarl diversity",
        description="Pairwise agreement, kappa, shared errors and complementarity of models, and the rings that theory "
        "expects most of. Name the models by agents.NAME.model=DIR (or +experiment=NAME), or give their rollouts.",
    )
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. evaluation.samples_per_prompt=8")
    parser.add_argument("--set", required=True, metavar="NAME=PATH", help="a known set, or a YAML file of your own")
    parser.add_argument("--rollouts", nargs="+", metavar="[NAME=]FILE", help="recorded, instead of models; as NAME")
    parser.add_argument("--ring", type=int, action="append", metavar="N", help="size of rings, repeatable; 2 and 3")
    parser.add_argument("--votes", type=int, default=11, help="K of the predicted flow, odd")
    parser.add_argument("--top", type=int, default=10, help="rings that are shown")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own data/, experiment/ ... YAML files")
    parser.add_argument("--out", type=Path, help="a JSON file for pairs and rings")
    args = parser.parse_intermixed_args(argv)
    if args.votes < 1 or args.votes % 2 == 0:
        raise ValueError(f"--votes {args.votes}: the flow is that of an odd number of votes")
    if args.ring and min(args.ring) < 2:
        raise ValueError(f"--ring {min(args.ring)}: a ring has at least 2 agents")
    if args.top < 1:
        raise ValueError(f"--top {args.top}: show at least one ring")
    if args.out and (args.out.is_dir() or any(p.exists() and not p.is_dir() for p in args.out.parents)):
        raise ValueError(f"--out {args.out}: no place for a file")
    return args


def _recorded(spelled: Sequence[str]) -> list[Rollout]:
    """Rollouts of files; NAME=FILE names the file's one agent anew, so that files of equal names can be told apart."""
    out: list[Rollout] = []
    for text in spelled:
        name, _, path = text.rpartition("=")
        if not Path(path).is_file():
            raise ValueError(f"--rollouts {text}: no such file")
        seen = [r for r in rollouts.read(Path(path)) if r.prompt.role == "solve"]
        agents = sorted({r.prompt.agent for r in seen})
        if name and len(agents) != 1:
            raise ValueError(f"--rollouts {text}: a name is for a file of one agent; it holds {', '.join(agents)}")
        out += [replace(r, prompt=replace(r.prompt, agent=name or r.prompt.agent)) for r in seen]
    twice = len(out) - len({r.key for r in out})
    if twice:
        raise ValueError(f"--rollouts: {twice} rollouts stand there twice; name files of equal agents as NAME=FILE")
    return out


def _asked(args: argparse.Namespace, exam: ExamSet) -> list[Rollout]:
    """What the models of the configuration answer."""
    raw = compose_raw(args.overrides, args.config_dir)
    if "agents" not in raw:
        raise ValueError("whom to compare? agents.NAME.model=DIR for each, +experiment=NAME, or --rollouts FILE")
    cfg = prepared(validate(completed(raw, [exam])), [exam])
    with open_agents(cfg, cfg.run_dir / "diversity", open_chats(cfg)) as agents:
        reshard_all(agents, 0, {})
        deck = deck_of(cfg, {name: agent.chat for name, agent in agents.items()}, exam.data)
        prompts = deck.everything(seats(cfg.agents, exam.data, cfg.evaluation.samples_per_prompt))
        once = cfg.evaluation.model_copy(update={"revise": False})
        with rolling(agents):
            return ask(agents, prompts, once, cfg.seed, answers=exam.answers, requests=exam.requests).rollouts


def _pair_table(found: Sequence[Overlap]) -> Table:
    """Pairs as rows, the most promising first."""
    table = Table(title="pairs: errors in common (%, and Cohen's kappa of being right)")
    columns = ("pair", "problems", "agree", "kappa", "one right", "same wrong", "either", "p_A+p_B>1", "=1")
    for title in columns:
        table.add_column(title, justify="left" if title == "pair" else "right", no_wrap=title == "pair")
    for o in found:
        shares = (o.complementarity, o.same_wrong, o.either, o.rising, o.even)
        kappa = "-" if o.kappa is None else f"{o.kappa:.2f}"
        table.add_row(" ~ ".join(o.agents), str(o.problems), _percent(o.agreement), kappa, *map(_percent, shares))
    return table


def _agent_table(answers: Mapping[str, Answers], gold: Gold, votes: int) -> Table:
    table = Table(title=f"agents: accuracy (%), and where teaching itself leads each (K = {votes})")
    for title in ("agent", "now", "TTRL"):
        table.add_column(title, justify="left" if title == "agent" else "right")
    for name in sorted(answers):
        table.add_row(name, *map(_percent, alone(answers[name], gold, votes=votes)))
    return table


def _ring_table(found: Sequence[Ring], votes: int) -> Table:
    table = Table(title=f"rings: where the predicted flow leads (%, K = {votes}); each is taught by the one before it")
    for title in ("ring", "mean", "by agent"):
        table.add_column(title, justify="left" if title == "ring" else "right", no_wrap=title == "ring")
    for ring in found:
        table.add_row(" > ".join(ring.agents), _percent(ring.mean), " ".join(map(_percent, ring.accuracies)))
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f}"


def _write(path: Path, found: Sequence[Overlap], ranked: Sequence[Ring]) -> None:
    out = {
        "pairs": [{**asdict(o), "predicted": o.predicted} for o in found],
        "rings": [{**asdict(ring), "mean": ring.mean} for ring in ranked],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")

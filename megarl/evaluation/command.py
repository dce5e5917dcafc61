"""`megarl eval`: whom to examine (a run's checkpoint, a configuration's models, or recorded rollouts), and on what."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from transformers import AutoConfig

from megarl import __version__, checkpoint, rollouts
from megarl.agents import Agents, fitting, open_agents, open_chats, reshard_all, rolling
from megarl.algos.ttrl import TTRL
from megarl.backends.cluster import WorkerLost
from megarl.config import CONFIG_DIR, RunConfig, compose_raw, validate
from megarl.deck import open_deck
from megarl.evaluation.ask import ask, deck_of, seats
from megarl.evaluation.pairs import Pair, judgements, read_pairs, score_pairs, uids
from megarl.evaluation.report import Report, SetResult, Subject, write_report
from megarl.evaluation.score import Rules, Scores, score
from megarl.evaluation.sets import ExamSet, open_set
from megarl.types import Rollout, RolloutKey

_REQUEST_TOKENS = 160  # of a request to verify or to revise, with a template's marks around it
_LOST = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A configuration whose agents are examined at one step of its run."""

    cfg: RunConfig
    run: Path | None  # None: no run, the models as they are
    step: int  # 0: the models the run began with
    trained_in: Mapping[str, bool]  # agent of the run -> did it train in its chat template


def run(argv: Sequence[str]) -> int:
    """Parse the command line, examine, print the table and leave it in files."""
    args = _parse(argv)
    folders = [CONFIG_DIR, *([args.config_dir] if args.config_dir else [])]
    sets = [open_set(spelled, folders) for spelled in args.set]
    try:
        report, out = _recorded(args, sets) if args.rollouts else _live(args, sets)
    except (WorkerLost, TimeoutError) as lost:
        print(f"megarl eval: {lost}", file=sys.stderr)
        return _LOST
    console = Console()
    for table in report.tables():
        console.print(table)
    for fact in report.facts():
        console.print(fact, markup=False, highlight=False, soft_wrap=True)
    if out is not None:
        write_report(report, out)
        console.print(f"{out}/results.json  {out}/results.md", markup=False, highlight=False, soft_wrap=True)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="megarl eval",
        description="Accuracy, votes and verification of a cohort. Name the models by --run, by a configuration "
        "(+experiment=NAME, or agents.NAME.model=DIR), or give --rollouts that were recorded.",
    )
    parser.add_argument("overrides", nargs="*", help="key=value, e.g. evaluation.samples_per_prompt=16")
    parser.add_argument("--run", type=Path, metavar="RUN_DIR", help="a run: its agents, at its newest checkpoint")
    parser.add_argument("--step", type=int, help="that many steps done; 0: the models the run began with")
    parser.add_argument("--rollouts", type=Path, nargs="+", metavar="PATH", help="parquet files, or a run directory")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=PATH", help="a known set, or a YAML file of your own"
    )
    parser.add_argument("--config-dir", type=Path, help="a folder of your own data/, experiment/ ... YAML files")
    parser.add_argument("--out", type=Path, help="where results.json and results.md go")
    args = parser.parse_intermixed_args(argv)
    if args.run and args.rollouts:
        raise ValueError("--run and --rollouts: give one of them; rollouts of a run are --rollouts RUN_DIR")
    return args


def _live(args: argparse.Namespace, sets: Sequence[ExamSet]) -> tuple[Report, Path]:
    """Examine agents that answer now."""
    candidate = _candidate(args, sets)
    sets = sets or [_own_set(candidate.cfg)]
    cfg = prepared(candidate.cfg, sets)
    name = "+".join(s.name for s in sets)
    home = candidate.run / "eval" / f"step_{candidate.step}-{name}" if candidate.run else cfg.run_dir / f"eval-{name}"
    out = args.out or home
    _claim(out)
    with open_agents(cfg, out, open_chats(cfg)) as agents:
        if candidate.run and candidate.step:
            checkpoint.load_weights(candidate.run / "checkpoints" / f"step_{candidate.step}", agents)
        reshard_all(agents, candidate.step, {})
        with rolling(agents):
            results = []
            for exam in sets:
                asked = len(agents) * cfg.evaluation.samples_per_prompt
                print(f"{exam.name}: {exam.data.path}, {asked} samples per problem", file=sys.stderr)
                result, seen = _examine(agents, exam, cfg)
                rollouts.write(out / "rollouts" / f"{exam.name}.parquet", seen, step=candidate.step)
                results.append(result)
        subjects = {name: _subject(name, candidate, agents) for name in agents}
    return _report(cfg, subjects, results, live=True), out


def _claim(out: Path) -> None:
    """Make the folder of results, before hours are spent on what goes into it; refuse one that holds some."""
    if (out / "results.json").exists():
        raise ValueError(f"{out} holds results already: choose another --out")
    for folder in (out, *out.parents):
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--out {out}: {folder} is a file; name a folder")
    out.mkdir(parents=True, exist_ok=True)
    if not os.access(out, os.W_OK):
        raise ValueError(f"--out {out}: not to be written to; name a folder of your own")


def _candidate(args: argparse.Namespace, sets: Sequence[ExamSet]) -> Candidate:
    raw = compose_raw(args.overrides, args.config_dir)
    if args.run is None:
        if "agents" not in raw:
            raise ValueError(
                "whom to examine? --run RUN_DIR, +experiment=NAME, agents.NAME.model=DIR or --rollouts PATH"
            )
        if args.step:
            raise ValueError(f"--step {args.step} is a step of a run: name it by --run RUN_DIR")
        return Candidate(cfg=validate(completed(raw, sets)), run=None, step=0, trained_in={})
    cfg, own = validate(_merged(args.run, raw)), validate(_merged(args.run, {}))
    step = 0 if args.step == 0 else checkpoint.find(args.run, args.step).step
    trained_in = {name: agent.chat_template for name, agent in own.agents.items()}
    return Candidate(cfg=cfg, run=args.run, step=step, trained_in=trained_in)


def completed(raw: dict[str, Any], sets: Sequence[ExamSet]) -> dict[str, Any]:
    """What a run must say and an examination need not. Lengths of training are the least, so that they refuse nothing;
    those that count are in the set and in evaluation.sampling."""
    sampling = {"max_tokens": 1, **raw.get("sampling", {})}
    data = {**(sets[0].data.model_dump() | {"max_prompt_tokens": 1} if sets else {}), **raw.get("data", {})}
    return {"steps": 1, "algo": {"name": "ttrl"}, **raw, "sampling": sampling, **({"data": data} if data else {})}


def _merged(run_dir: Path, changes: dict[str, Any]) -> dict[str, Any]:
    """A run's own configuration, with what the user changes."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ValueError(f"{run_dir}: no run there (no config.yaml)")
    merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(file), changes), resolve=True)
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _own_set(cfg: RunConfig) -> ExamSet:
    """The problems a configuration itself names: those of its evaluation, else those it trains on."""
    name, data = ("evaluation", cfg.evaluation.data) if cfg.evaluation.data else ("data", cfg.data)
    if data.gold is None:
        raise ValueError("data.gold names no column of true answers: give --set NAME=PATH, or data.gold=COLUMN")
    return ExamSet(name=name, data=data, answers=cfg.answers)


def prepared(cfg: RunConfig, sets: Sequence[ExamSet], max_tokens: str = "evaluation.sampling.max_tokens") -> RunConfig:
    """The configuration with engines that take every turn and without reference models; ``max_tokens`` is what the
    user knows the length of a response by."""
    settings = cfg.evaluation
    longest = max(exam.data.max_prompt_tokens for exam in sets)
    if settings.revise or any(exam.pairs for exam in sets):
        longest += 2 * (settings.sampling.max_tokens + _REQUEST_TOKENS)
    positions = {name: _positions(agent.model) for name, agent in cfg.agents.items()}
    tightest = min(positions, key=lambda name: positions[name])
    room = positions[tightest] - settings.sampling.max_tokens
    if room < 1:
        raise ValueError(
            f"{max_tokens}={settings.sampling.max_tokens} fills the {positions[tightest]} positions "
            f"of agents.{tightest}: lower it"
        )
    longest = min(longest, room)
    agents = {
        name: agent.model_copy(update={"max_tokens": None, "kl_coef": None}) for name, agent in cfg.agents.items()
    }
    changes = {
        "algo": TTRL(),  # asks nothing more, so the longest prompt is that of the data
        "agents": agents,
        "data": cfg.data.model_copy(update={"max_prompt_tokens": longest}),
        "sampling": settings.sampling,
        "loss": cfg.loss.model_copy(update={"kl_coef": 0.0}),
    }
    return cfg.model_copy(update=changes)


def _positions(model: str) -> int:
    try:
        return AutoConfig.from_pretrained(model).get_text_config().max_position_embeddings
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"model {model}: no such directory, nor to be had from the hub ({reason})") from error


def _examine(agents: Agents, exam: ExamSet, cfg: RunConfig) -> tuple[SetResult, list[Rollout]]:
    """One set's outcome, and the rollouts it rests on."""
    settings, rules = cfg.evaluation, Rules.of(cfg.evaluation, exam.answers, cfg.seed)
    samples = settings.samples_per_prompt
    if exam.pairs:
        pairs, left_out = _fitting_pairs(agents, exam)
        prompts = [p for name in agents for p in judgements(pairs, name, samples, exam.requests)]
        once = settings.model_copy(update={"revise": False})
        seen = ask(agents, prompts, once, cfg.seed, answers=exam.answers, requests=exam.requests).rollouts
        counts = {"problems": len(pairs), "left_out": left_out, "too_long": 0}
        return _result(exam, samples, counts, score_pairs(seen, pairs, rules)), seen
    longest = min(exam.data.max_prompt_tokens, cfg.max_prompt_tokens)
    data = exam.data.model_copy(update={"max_prompt_tokens": longest})
    deck = deck_of(cfg, {name: agent.chat for name, agent in agents.items()}, data)
    if deck.gold is None:
        raise ValueError(f"--set {exam.name}: data.gold names no column of true answers in {exam.data.path}")
    prompts = deck.everything(seats(cfg.agents, data, samples))
    asked = ask(agents, prompts, settings, cfg.seed, answers=exam.answers, requests=exam.requests)
    counts = {"problems": len(deck), "left_out": deck.filtered + deck.unanswered, "too_long": asked.too_long}
    return _result(exam, samples, counts, score(asked.rollouts, deck.gold, rules)), asked.rollouts


def _fitting_pairs(agents: Agents, exam: ExamSet) -> tuple[list[Pair], int]:
    """The pairs of which every agent can read both solutions, and how many others there are."""
    pairs = read_pairs(exam)
    long: set[tuple[str, RolloutKey | None]] = set()
    fit = {
        (p.agent, p.uid) for name in agents for p in fitting(agents, judgements(pairs, name, 1, exam.requests), long)
    }
    kept = [pair for pair in pairs if all((name, uid) in fit for name in agents for uid in uids(pair))]
    return kept, len(pairs) - len(kept)


def _result(exam: ExamSet, samples: int, counts: dict[str, int], scores: Scores) -> SetResult:
    views = {name: f"{view.before}{{}}{view.after}" for name, view in exam.data.views.items()}
    return SetResult(
        name=exam.name,
        path=exam.data.path,
        samples=samples,
        answers=exam.answers,
        requests=exam.requests,
        prompts=views,
        scores=scores,
        **counts,
    )


def _subject(name: str, candidate: Candidate, agents: Agents) -> Subject:
    weights = f"step {candidate.step} of {candidate.run}" if candidate.run and candidate.step else "as published"
    template = "its chat template" if agents[name].chat.templated else "no template: contents joined by newlines"
    trained_in = candidate.trained_in.get(name)
    if trained_in is not None and trained_in != agents[name].config.chat_template:
        template += f" (the run trains with agents.{name}.chat_template={str(trained_in).lower()})"
    return Subject(model=agents[name].config.model, weights=weights, template=template)


def _recorded(args: argparse.Namespace, sets: Sequence[ExamSet]) -> tuple[Report, Path | None]:
    """Score rollouts that were recorded, without any model."""
    if args.out is not None:
        _claim(args.out)
    raw = compose_raw(args.overrides, args.config_dir)
    run_dir = next((path for path in args.rollouts if path.is_dir()), None)
    if run_dir is not None:
        cfg = validate(_merged(run_dir, raw))
    elif sets:
        cfg = validate(completed(raw, sets) | {"agents": {"recorded": {"model": "recorded"}}})
    else:
        raise ValueError("--rollouts FILE says nothing of true answers: give --set NAME=PATH, or the run's directory")
    exam = sets[0] if sets else _training_set(cfg)
    if len(sets) > 1:
        raise ValueError(f"--rollouts are of one set, and there are {len(sets)}: {', '.join(s.name for s in sets)}")
    seen = [r for path in args.rollouts for r in rollouts.read(_file(path, args.step))]
    if not seen:
        raise ValueError(f"--rollouts {' '.join(map(str, args.rollouts))}: there is no rollout in it")
    twice = len(seen) - len({r.key for r in seen})
    if twice:
        raise ValueError(f"--rollouts: {twice} rollouts stand there twice; give the files of one step")
    rules = Rules.of(cfg.evaluation, exam.answers, cfg.seed)
    if exam.pairs:
        scores = score_pairs(seen, read_pairs(exam), rules)
        problems = {r.prompt.uid.rpartition("/")[0] for r in seen}
    else:
        gold = open_deck(exam.data, {}, cfg.seed).gold
        if gold is None:
            raise ValueError(f"--set {exam.name}: data.gold names no column of true answers in {exam.data.path}")
        scores = score(seen, gold, rules)
        problems = {r.prompt.uid for r in seen}
    agents = {r.prompt.agent: r.version for r in seen}
    subjects = {
        name: Subject(model="recorded", weights=f"version {version}", template="as recorded")
        for name, version in agents.items()
    }
    samples = max((r.prompt.n for r in seen if r.prompt.parent is None), default=0)
    counts = {"problems": len(problems), "left_out": 0, "too_long": 0}
    return _report(cfg, subjects, [_result(exam, samples, counts, scores)], live=False), args.out


def _training_set(cfg: RunConfig) -> ExamSet:
    if cfg.data.gold is None:
        raise ValueError("the run knows no true answers: give data.gold=COLUMN, or --set NAME=PATH")
    return ExamSet(name="data", data=cfg.data, answers=cfg.answers)


def _file(path: Path, step: int | None) -> Path:
    """A file of rollouts: itself, or that of a run's step (its newest, if none is named)."""
    if not path.is_dir():
        if not path.is_file():
            raise ValueError(f"--rollouts {path}: no such file")
        return path
    found = sorted((path / "rollouts").glob("step_*.parquet"))
    wanted = rollouts.step_path(path, step) if step is not None else (found or [None])[-1]
    if wanted is None or not wanted.is_file():
        raise ValueError(f"--rollouts {path}: it holds no rollouts of step {'any' if step is None else step}")
    return wanted


def _report(cfg: RunConfig, subjects: dict[str, Subject], results: Sequence[SetResult], *, live: bool) -> Report:
    settings = cfg.evaluation
    verified = any("verify_accuracy" in found for s in results for found in s.scores.values())
    return Report(
        version=__version__,
        subjects=subjects,
        sampling=settings.sampling if live else None,
        seed=cfg.seed,
        revise=verified,
        confidence=settings.confidence,
        resamples=settings.resamples,
        sets=tuple(results),
    )

"""The one entry point: ``megarl VERB ...``, the same as ``python -m megarl VERB ...``.

Exit codes: 0 done, 1 a worker, a disk or a network was lost (or a bug, with its traceback), 2 bad input, 3 stopped by
a guard, 75 checkpointed and wants to be taken up again (SIGUSR1, or a time limit), 128 + the signal's number where one
ended the run (130: Ctrl-C, 143: SIGTERM).
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import yaml

from megarl import __version__, leaving
from megarl.config import compose, resumed

LOST, BAD_INPUT, GUARD, CHECKPOINTED = 1, 2, 3, 75


class Ended(KeyboardInterrupt):
    """A signal that asks to end; raised in the main thread, so that everything is closed on the way out."""


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(signal.Signals(number).name)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a verb and exit with its code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv == ["--version"]:
        print(f"megarl {__version__}")
        sys.exit(0)
    if not argv or argv[0] in ("-h", "--help") or argv[0] not in VERBS:
        known = "\n".join(f"  {verb:10} {(fn.__doc__ or '').splitlines()[0]}" for verb, fn in VERBS.items())
        asked_for_help = bool(argv) and argv[0] in ("-h", "--help")
        unknown = f"megarl: no verb {argv[0]!r}\n" if argv and not asked_for_help else ""
        print(f"{unknown}usage: megarl VERB ...\n{known}", file=sys.stderr)
        sys.exit(0 if asked_for_help else BAD_INPUT)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: engines, ranks and files are closed
        signal.signal(number, _end)
    try:
        code = VERBS[argv[0]](argv[1:])
    except (ValueError, OSError) as error:
        if os.environ.get("MEGARL_TRACEBACK"):
            raise
        print(f"megarl {argv[0]}: {told(error)}", file=sys.stderr)
        code = BAD_INPUT if isinstance(error, ValueError) else LOST
    except KeyboardInterrupt as end:
        name = str(end) or "SIGINT"
        print(f"megarl {argv[0]}: ended by {name}", file=sys.stderr)
        code = 128 + signal.Signals[name]
    sys.exit(code)


def told(error: BaseException) -> str:
    """The message, and the first line of every note: which worker it came from, where its log is."""
    notes = [note.splitlines()[0] for note in getattr(error, "__notes__", ()) if note]
    return "\n  ".join([str(error), *notes])


def train(argv: Sequence[str]) -> int:
    """Train a cohort: megarl train +experiment=NAME [key=value ...] [--resume RUN_DIR] [--cfg job]"""
    parser = argparse.ArgumentParser(prog="megarl train", description=train.__doc__)
    parser.add_argument("overrides", nargs="*", help="+experiment=NAME and key=value")
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on from a run's newest checkpoint")
    parser.add_argument("--cfg", choices=("job",), help="print the resolved run and stop")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own experiment/, algo/ ... YAML files")
    args = parser.parse_intermixed_args(argv)
    if args.resume and args.config_dir:
        raise ValueError("--resume takes the run's own configuration: --config-dir has no place beside it")
    cfg = resumed(args.resume, args.overrides) if args.resume else compose(args.overrides, args.config_dir)
    if args.cfg:
        print(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False), end="")
        return 0
    leaving.listen()  # before the imports: until then the signal would kill
    from safetensors import SafetensorError

    from megarl.backends.cluster import WorkerLost  # here: a typo is refused before torch, Ray and vLLM are imported
    from megarl.backends.fingerprints import RefitMismatch
    from megarl.guards import GuardStop
    from megarl.run_dir import Superseded
    from megarl.train import train as run

    try:
        run(cfg, resume=args.resume)
    except leaving.Left as left:
        print(f"megarl train: {left}", file=sys.stderr)
        return CHECKPOINTED
    except (GuardStop, FloatingPointError, RefitMismatch, Superseded) as stop:
        print(f"megarl train: stopped: {stop}", file=sys.stderr)
        return GUARD
    except (WorkerLost, TimeoutError, SafetensorError) as lost:  # the last: a full disk, under a library's own name
        print(f"megarl train: {told(lost)}", file=sys.stderr)
        return LOST
    return 0


def demo(argv: Sequence[str]) -> int:
    """The main job in miniature: warm-start two tiny models, then TTRL, Co-RL and RLVR side by side"""
    from megarl.demo import main as run

    run(argv)
    return 0


def evaluate(argv: Sequence[str]) -> int:
    """Examine a checkpoint, models or recorded rollouts: megarl eval [--run RUN_DIR] --set NAME=PATH [key=value ...]"""
    from megarl.evaluation.command import run

    return run(argv)


def diversity(argv: Sequence[str]) -> int:
    """Which models make a cohort: megarl diversity agents.NAME.model=DIR ... --set NAME=PATH, or --rollouts FILE ..."""
    from megarl.diversity_command import run

    return run(argv)


def answers(argv: Sequence[str]) -> int:
    """Judge, extract and vote on files of answers: megarl answers judge|extract|vote IN.jsonl OUT.jsonl"""
    from megarl.answers.command import main as run

    return run(argv)


def rewrite(argv: Sequence[str]) -> int:
    """A second wording of every prompt: megarl rewrite IN OUT --endpoint URL --model NAME, or agents.NAME.model=DIR"""
    from megarl.rewrite_command import run

    return run(argv)


def plan(argv: Sequence[str]) -> int:
    """Does a cohort fit, how is it best laid out, how long is a step: megarl plan +experiment=NAME [--json]"""
    from megarl.planning.command import run

    return run(argv)


def reshard(argv: Sequence[str]) -> int:
    """What a refit moves over which links, without weights: megarl reshard --explain +experiment=NAME [--json]"""
    from megarl.reshard_command import run

    return run(argv)


def convert(argv: Sequence[str]) -> int:
    """Models into checkpoints and back: megarl convert hf-to-megatron MODEL OUT, or megatron-to-hf CHECKPOINT OUT"""
    from megarl.convert_command import run

    return run(argv)


def launch(argv: Sequence[str]) -> int:
    """Start a run here, or print its batch script: megarl launch local|slurm +experiment=NAME [--dry-run]"""
    from megarl.launching.command import run

    return run(argv)


def report(argv: Sequence[str]) -> int:
    """What runs did, as one HTML page: megarl report RUN_DIR ... [--out FILE] [--rollouts-mb N]"""
    from megarl.report.command import run

    return run(argv)


def doctor(argv: Sequence[str]) -> int:
    """Is this machine fit to train on, or every node of an allocation: megarl doctor [--nodes] [--json]"""
    from megarl.doctor_command import run

    return run(argv)


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "answers": answers,
    "plan": plan,
    "reshard": reshard,
    "convert": convert,
    "diversity": diversity,
    "launch": launch,
    "rewrite": rewrite,
    "doctor": doctor,
    "report": report,
    "demo": demo,
}

"""The one entry point: ``megarl VERB ...``, the same as ``python -m megarl VERB ...``.

Exit codes: 0 done, 1 a worker was lost (or a bug, with its traceback), 2 bad input, 3 stopped by a guard, 130
interrupted.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from megarl.config import RunConfig, compose, validate

LOST, BAD_INPUT, GUARD, INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run a verb and exit with its code."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv or argv[0] in ("-h", "--help") or argv[0] not in VERBS:
        known = "\n".join(f"  {verb:10} {(fn.__doc__ or '').splitlines()[0]}" for verb, fn in VERBS.items())
        print(f"usage: megarl VERB ...\n{known}", file=sys.stderr)
        sys.exit(0 if argv and argv[0] in ("-h", "--help") else BAD_INPUT)
    try:
        code = VERBS[argv[0]](argv[1:])
    except ValueError as error:
        print(f"megarl {argv[0]}: {error}", file=sys.stderr)
        code = BAD_INPUT
    except KeyboardInterrupt:
        print(f"megarl {argv[0]}: interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)


def train(argv: Sequence[str]) -> int:
    """Train a cohort: megarl train +experiment=NAME [key=value ...] [--resume RUN_DIR] [--cfg job]"""
    parser = argparse.ArgumentParser(prog="megarl train", description=train.__doc__)
    parser.add_argument("overrides", nargs="*", help="+experiment=NAME and key=value")
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="go on from a run's newest checkpoint")
    parser.add_argument("--cfg", choices=("job",), help="print the resolved run and stop")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own experiment/, algo/ ... YAML files")
    args = parser.parse_intermixed_args(argv)
    cfg = resumed(args.resume, args.overrides) if args.resume else compose(args.overrides, args.config_dir)
    if args.cfg:
        print(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False), end="")
        return 0
    from megarl.backends.cluster import WorkerLost  # here: a typo is refused before torch, Ray and vLLM are imported
    from megarl.train import GuardStop
    from megarl.train import train as run

    try:
        run(cfg, resume=args.resume)
    except GuardStop as stop:
        print(f"megarl train: stopped: {stop}", file=sys.stderr)
        return GUARD
    except (WorkerLost, TimeoutError) as lost:
        print(f"megarl train: {lost}", file=sys.stderr)
        return LOST
    return 0


def resumed(run_dir: Path, overrides: Sequence[str]) -> RunConfig:
    """The configuration of a run that is taken up again, with what the user changes now (a layout, more steps)."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise ValueError(f"--resume {run_dir}: no run there (no config.yaml)")
    changes = OmegaConf.from_dotlist([text.lstrip("+") for text in overrides])
    raw = OmegaConf.to_container(OmegaConf.merge(OmegaConf.load(file), changes), resolve=True)
    assert isinstance(raw, dict)
    return validate({str(key): value for key, value in raw.items()})


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


VERBS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "eval": evaluate,
    "diversity": diversity,
    "demo": demo,
}

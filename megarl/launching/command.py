"""`megarl launch slurm|local`: a run on the nodes of a cluster, or on this machine."""

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml import YAMLError

from megarl.config import RunConfig, compose, resumed
from megarl.launching.site import Site, load_site
from megarl.launching.slurm import TEMPLATE, Component, Job, render

PORTS = """ports
  Ray's head      free when the head starts, below the kernel's own range (from 20000 on); told to the other nodes by a
                  file of this job and try
  Ray's daemons   given by the kernel of each node
  rank 0 of each  free on its node when the agent's ranks start, below the kernel's own range (from 20000 on)"""


def run(argv: Sequence[str]) -> int:
    """0: printed, or the local run ended well; else the code of what was run."""
    args = _parser().parse_intermixed_args(argv)
    if args.resume and args.config_dir:
        raise ValueError("--resume takes the run's own configuration: --config-dir has no place beside it")
    site = load_site(args.site, _changes(args.ask)) if args.where == "slurm" else Site()
    words = [*args.overrides, *_words_of_groups(site)]
    nodes = [f"cluster.nodes={sum(group.nodes for group in site.groups.values())}"] if site.groups else []
    cfg = resumed(args.resume, words + nodes) if args.resume else compose(words + nodes, args.config_dir)
    if args.where == "local":
        return _local(cfg, args)
    components = components_of(cfg, site)
    plan = plan_text(cfg, components)
    run_dir = (args.resume or cfg.run_dir).resolve()
    job = Job(
        name=cfg.name,
        components=components,
        device=cfg.cluster.device,
        overrides=tuple(words),
        work_dir=Path.cwd(),
        log_dir=Path(cfg.output).resolve() / "launch" / cfg.experiment / cfg.name,
        run_dir=run_dir,
        resume=args.resume is not None,
        config_dir=args.config_dir.resolve() if args.config_dir else None,
    )
    template = Path(site.template) if site.template else TEMPLATE
    if not template.is_file():
        raise ValueError(f"template={template}: no such file")
    script = render(job, site, template.read_text())
    if not args.dry_run:
        return _submit(script, job)
    print(script, *(f"# {line}" for line in f"{plan}\n{PORTS}".splitlines()), sep="\n")  # the whole is a script
    return 0


def _submit(script: str, job: Job) -> int:
    """Hand it to sbatch; ValueError with sbatch's own words where Slurm will not have it."""
    if not job.resume and (job.run_dir / "config.yaml").exists():
        raise ValueError(f"{job.run_dir} exists already: choose another name=..., or go on with --resume {job.run_dir}")
    job.log_dir.mkdir(parents=True, exist_ok=True)
    file = job.log_dir / "batch.sh"
    file.write_text(script, encoding="utf-8")
    try:
        done = subprocess.run(["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise ValueError("sbatch is not on PATH: submit from a login node of the cluster") from error
    if done.returncode:
        raise ValueError(f"sbatch {file}: {done.stderr.strip()}")
    number = done.stdout.strip().split(";")[0]
    print(f"job {number}: output in megarl-{number}.out, logs in {job.log_dir}/job-{number}.0, run in {job.run_dir}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megarl launch", description=__doc__)
    parser.add_argument("where", choices=("slurm", "local"))
    parser.add_argument("overrides", nargs="*", help="+experiment=NAME and key=value, as for `megarl train`")
    parser.add_argument("--dry-run", action="store_true", help="print script, placement and ports, and stop")
    parser.add_argument("--resume", type=Path, metavar="RUN_DIR", help="take up a run that stopped")
    parser.add_argument("--site", default="slurm", help="a file of configs/cluster, or a .yaml file of your own")
    parser.add_argument("--ask", action="append", default=[], metavar="KEY=VALUE", help="instead of the file's value")
    parser.add_argument("--config-dir", type=Path, help="a folder of your own experiment/, algo/ ... YAML files")
    return parser


def _changes(asked: Sequence[str]) -> Mapping[str, Any]:
    changes: dict[str, Any] = {}
    for text in asked:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"--ask {text}: wanted KEY=VALUE")
        try:
            # time=2:00 is no number of minutes times sixty, and a word stays the word it is
            changes[key] = yaml.safe_load(value) if value[:1] in "[{" or not _is_text(key) else value
        except YAMLError as error:
            raise ValueError(f"--ask {text}: {' '.join(str(error).split())}") from error
    return changes


_NUMBERS = ("object_store_mib", "beat_timeout_s", "warn_s", "max_tries")


def _is_text(key: str) -> bool:
    return key not in ("cpus_per_node", "exclusive", "form_timeout_s", *_NUMBERS)


def _words_of_groups(site: Site) -> list[str]:
    """What a run is told of nodes that differ: the size of the largest, and who sits where."""
    if not site.groups:
        return []
    seated = ", ".join(f"{name}: [{', '.join(group.agents)}]" for name, group in site.groups.items())
    largest = max(group.gpus_per_node for group in site.groups.values())
    return [f"cluster.gpus_per_node={largest}", f"cluster.groups={{{seated}}}"]


def components_of(cfg: RunConfig, site: Site) -> tuple[Component, ...]:
    """What is asked of Slurm: equal nodes, or one component per group."""
    if not site.groups:
        return (Component(nodes=cfg.cluster.nodes, slots=cfg.cluster.gpus_per_node),)
    return tuple(
        Component(
            nodes=group.nodes,
            slots=group.gpus_per_node,
            group=name,
            partition=group.partition,
            options=group.options,
        )
        for name, group in site.groups.items()
    )


def plan_text(cfg: RunConfig, components: Sequence[Component]) -> str:
    """Which agent sits on which node, by the rule that the run itself follows. ValueError where one does not fit."""
    from megarl.agents import one_node  # here: what is mistyped is refused before torch and Ray are imported
    from megarl.backends.cluster import Node
    from megarl.backends.placement import plan_groups

    nodes = [(part.slots, part.group) for part in components for _ in range(part.nodes)]
    planned = plan_groups(
        {Node(str(n), f"node {n}", slots, group): slots for n, (slots, group) in enumerate(nodes)},
        {name: agent.slots for name, agent in cfg.agents.items()},
        {name: one_node(agent) for name, agent in cfg.agents.items()},
        cfg.cluster.groups,
    )
    lines = ["placement"]
    for name, chunks in planned.items():
        kind = f" ({group})" if (group := cfg.cluster.group_of(name)) else ""
        where = ", ".join(f"{node.address}{kind}: {size} of {node.slots} slots" for node, size in chunks)
        lines.append(f"  {name:15} {where}")
    return "\n".join(lines)


def _local(cfg: RunConfig, args: argparse.Namespace) -> int:
    if cfg.cluster.nodes > 1 and cfg.cluster.address is None:
        raise ValueError(f"cluster.nodes={cfg.cluster.nodes}: this machine is one; `megarl launch slurm` asks for more")
    own = ["--config-dir", str(args.config_dir)] if args.config_dir else []
    own += ["--resume", str(args.resume)] if args.resume else []
    command = [sys.executable, "-m", "megarl", "train", *own, *args.overrides]
    if args.dry_run:
        site = Site()
        print(shlex.join(command), plan_text(cfg, components_of(cfg, site)), PORTS, sep="\n")
        return 0
    sys.stdout.flush()
    os.execv(command[0], command)  # signals and the exit code are then the run's own

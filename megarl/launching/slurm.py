"""A batch script for Slurm, of a template and a checked Site: text in, text out. Pure.

A value reaches the script in one of two ways: as a bare word behind #SBATCH, where ``Site`` admits only characters
that mean nothing to sbatch's own reader, or quoted for the shell.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from megarl.launching.site import Container, Site

_HERE = Path(__file__).resolve().parents[1]
TEMPLATE = (_HERE if (_HERE / "launch").is_dir() else _HERE.parent) / "launch" / "slurm.sh"
_PLACE = re.compile(r"@([A-Z_]+)@")


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Equal nodes, asked for together; a job of several is heterogeneous."""

    nodes: int
    slots: int
    partition: str | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is run, and where it is run from."""

    name: str
    components: tuple[Component, ...]
    device: str
    overrides: tuple[str, ...]
    work_dir: Path
    log_dir: Path
    config_dir: Path | None = None

    @property
    def nodes(self) -> int:
        return sum(part.nodes for part in self.components)


def render(job: Job, site: Site, template: str) -> str:
    """The script. Raises ValueError where the template names an unknown place, or leaves out one of them."""
    if job.device == "auto":
        raise ValueError("cluster.device=auto: no node has been seen yet; say cluster.device=cuda or =cpu")
    values = {
        "SBATCH": _directives(job, site),
        "WORK_DIR": shlex.quote(str(job.work_dir)),
        "LOG_DIR": shlex.quote(str(job.log_dir)),
        "ENVIRONMENT": _environment(site),
        "PYTHON": shlex.quote(site.python),
        "SCRATCH": shlex.quote(site.scratch),
        "FORM_TIMEOUT_S": str(site.form_timeout_s),
        "NODES": str(job.nodes),
        "SLOTS": f"({' '.join(str(part.slots) for part in job.components for _ in range(part.nodes))})",
        "DEVICE": shlex.quote(job.device),
        "SRUN": shlex.join(_srun(job, site.container)),
        "INSIDE": shlex.join(_inside(site.container)),
        "TRAIN": shlex.join(_train(job)),
    }
    asked = set(_PLACE.findall(template))
    if unknown := asked - set(values):
        raise ValueError(f"template: no such place: {', '.join(sorted(unknown))}; known: {', '.join(values)}")
    if absent := set(values) - asked:
        raise ValueError(f"template leaves out {', '.join(f'@{name}@' for name in sorted(absent))}")
    return _PLACE.sub(lambda found: values[found[1]], template)  # one pass: what a value says is never looked at


def _directives(job: Job, site: Site) -> str:
    blocks = []
    for number, part in enumerate(job.components):
        options = _component_options(part, site)
        if number == 0:  # what the whole job has; a rerun would meet its own run directory and be refused
            whole = [f"--job-name={job.name}", f"--time={site.time}", "--output=megarl-%j.out", "--no-requeue"]
            options = [*whole, *options]
        blocks.append("\n".join(f"#SBATCH {option}" for option in options))
    return "\n#SBATCH hetjob\n".join(blocks)


def _component_options(part: Component, site: Site) -> list[str]:
    kind = f"{site.gpu_type}:" if site.gpu_type else ""
    options = [f"--nodes={part.nodes}", "--ntasks-per-node=1"]
    if site.gpu_request == "gres":
        options.append(f"--gres=gpu:{kind}{part.slots}")
    elif site.gpu_request == "gpus-per-node":
        options.append(f"--gpus-per-node={kind}{part.slots}")
    named = {
        "partition": part.partition or site.partition,
        "account": site.account,
        "qos": site.qos,
        "cpus-per-task": site.cpus_per_node,
        "mem": site.memory,
    }
    options += [f"--{name}={value}" for name, value in named.items() if value is not None]
    options += ["--exclusive"] if site.exclusive else []
    return [*options, *site.options, *part.options]


def _environment(site: Site) -> str:
    lines = [f"module load {shlex.quote(name)} || exit 1" for name in site.modules]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in site.env.items()]
    return "\n".join(lines)


def _srun(job: Job, container: Container) -> list[str]:
    """One task on every node, in all components, numbered through."""
    command = ["srun", "--overlap", "--kill-on-bad-exit=1", "--cpu-bind=none", "--ntasks-per-node=1"]
    if len(job.components) > 1:
        command.append(f"--het-group={','.join(str(number) for number in range(len(job.components)))}")
    if container.kind == "pyxis":
        command.append(f"--container-image={container.image}")
        if container.mounts:
            command.append(f"--container-mounts={','.join(container.mounts)}")
    return command


def _inside(container: Container) -> list[str]:
    """The words in front of a command that put it into the container, where srun does not."""
    if container.kind != "apptainer":
        return ["env"]
    binds = [word for mount in container.mounts for word in ("--bind", mount)]
    return ["apptainer", "exec", "--nv", *binds, str(container.image)]


def _train(job: Job) -> list[str]:
    own = ["--config-dir", str(job.config_dir)] if job.config_dir else []
    return ["-m", "megarl", "train", *own, *job.overrides, f"cluster.nodes={job.nodes}"]

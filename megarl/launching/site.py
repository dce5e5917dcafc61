"""What a cluster wants to be asked: one YAML file of configs/cluster, checked. Pure."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator
from yaml import YAMLError

from megarl.config import CONFIG_DIR
from megarl.settings import Name, Section

_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def _line(value: str) -> str:
    if _CONTROL.search(value):
        raise ValueError(f"{value!r} holds a control character (a newline, a tab): write one line")
    return value


Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.,:@%/+=*\[\]&|-]+$")]  # sbatch reads it bare, after #SBATCH
Line = Annotated[str, Field(min_length=1), AfterValidator(_line)]  # for the shell, which gets it quoted
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Container(Section):
    """What every process of the job runs in; ``bare`` is the environment of ``Site.python`` itself."""

    kind: Literal["bare", "apptainer", "pyxis"] = "bare"
    image: Line | None = None
    mounts: tuple[Line, ...] = Field(default=(), description="HOST:CONTAINER, or one path for both")

    @model_validator(mode="after")
    def _an_image_exactly_where_one_is_used(self) -> "Container":
        if (self.kind == "bare") != (self.image is None):
            raise ValueError(f"container.image={self.image} with container.kind={self.kind}: bare has none, others one")
        if self.kind == "bare" and self.mounts:
            raise ValueError("container.mounts has no meaning where container.kind is bare")
        return self


class Group(Section):
    """One component of a heterogeneous job: nodes of one kind, and the agents that sit there."""

    agents: tuple[Name, ...] = Field(min_length=1)
    nodes: int = Field(ge=1)
    gpus_per_node: int = Field(ge=1, description="on CPU: process slots per node")
    partition: Word | None = Field(default=None, description="instead of the site's")
    options: tuple[Word, ...] = ()


class Site(Section):
    """A cluster as its users ask it for nodes."""

    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    time: Annotated[str, Field(pattern=r"^\d+-\d{1,2}(:\d\d){0,2}$|^\d+(:\d\d){0,2}$")] = "24:00:00"
    gpu_request: Literal["gres", "gpus-per-node", "none"] = Field(
        default="gres", description="how GPUs are asked for; none: nodes are given whole, or have no GPU"
    )
    gpu_type: Word | None = None
    cpus_per_node: int | None = Field(default=None, ge=1)
    memory: Word | None = Field(default=None, description="per node, as --mem takes it")
    exclusive: bool = False
    options: tuple[Word, ...] = Field(default=(), description="further options of sbatch, e.g. --constraint=ib")
    modules: tuple[Line, ...] = ()
    env: dict[Variable, Annotated[str, AfterValidator(_line)]] = Field(default={})
    python: Line = Field(default=sys.executable, description="interpreter that has megarl, the same on every node")
    scratch: Line = Field(default="/tmp", description="a short path on every node's own disk, for Ray's sockets")
    object_store_mib: int = Field(default=1024, ge=128, description="of Ray on each node; /dev/shm has twice that free")
    form_timeout_s: int = Field(default=300, ge=1, description="for all nodes to come up")
    beat_timeout_s: int = Field(default=90, ge=10, description="a node without a sign of life for so long is lost")
    warn_s: int = Field(default=600, ge=10, description="before the time limit: a step and a checkpoint fit in there")
    max_tries: int = Field(default=10, ge=1, description="starts of a job, requeues included")
    container: Container = Container()
    groups: dict[Name, Group] = Field(default={}, description="a heterogeneous job; empty: cluster.nodes equal nodes")
    template: Line | None = Field(default=None, description="batch script of your own, instead of launch/slurm.sh")

    @model_validator(mode="after")
    def _options_are_long(self) -> "Site":
        for option in (*self.options, *(option for group in self.groups.values() for option in group.options)):
            if not option.startswith("--"):
                raise ValueError(f"options: {option} is no long option of sbatch: --NAME or --NAME=VALUE")
        return self

    @model_validator(mode="after")
    def _the_warning_comes_while_something_can_be_done(self) -> "Site":
        if self.warn_s >= (limit := _seconds(self.time)):
            raise ValueError(f"warn_s={self.warn_s} is not before the end of time={self.time}, {limit} s")
        return self


def _seconds(time: str) -> int:
    """Of minutes, minutes:seconds, hours:minutes:seconds, days-hours:minutes and so on, as sbatch reads them."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:  # without days the first of one or two is minutes
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def load_site(name: str, changes: Mapping[str, Any]) -> Site:
    """``configs/cluster/NAME.yaml``, or the file NAME where it ends in .yaml, with ``changes`` on top.

    Raises ValueError where there is no such file, or with one line per fault in it.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else CONFIG_DIR / "cluster" / f"{name}.yaml"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in (CONFIG_DIR / "cluster").glob("*.yaml")))
        raise ValueError(f"--site {name}: no such cluster; shipped: {known}, or give a .yaml file of your own")
    try:
        raw = yaml.safe_load(file.read_text()) or {}
    except YAMLError as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ValueError(
            f"{file} holds {type(raw).__name__}: wanted keys of a cluster ({', '.join(Site.model_fields)})"
        )
    try:
        return Site.model_validate({**raw, **changes}, strict=False)
    except ValidationError as error:
        faults = [f"{file}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise ValueError("\n".join(faults)) from error

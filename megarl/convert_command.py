"""`megarl convert`: Hugging Face folders into Megatron checkpoints and back, on this machine's CPU, without a network.

A checkpoint that is made here holds the model's weights in Megatron's distributed format, which any layout reads, its
``config.json``, and under ``hf/`` what lay beside the weights. A run's checkpoint (``--run``) is read the same way.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megarl import checkpoint, hf_folder
from megarl.backends.checksum import checksum
from megarl.backends.local_ranks import run_ranks
from megarl.backends.megatron.records import Job
from megarl.config import resumed
from megarl.settings import AgentConfig, LayoutConfig

_RANKS = "megarl.backends.megatron.convert"
_COMPANIONS = "hf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint to be exported, and the folder that has the model's configuration and tokenizer."""

    path: Path
    folder: Path
    dtype: Literal["bfloat16", "float32"]
    backend: str


def run(argv: Sequence[str]) -> int:
    """0: converted and verified. Raises ValueError for what cannot be converted."""
    args = _parse(argv)
    if args.out.exists():
        raise ValueError(f"{args.out} exists already: name a folder that does not")
    partial = args.out.with_name(f"{args.out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        said = (_to_megatron if args.way == "hf-to-megatron" else _to_huggingface)(args, partial)
        partial.rename(args.out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(f"{args.out}: {said}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="megarl convert", description=__doc__)
    ways = parser.add_subparsers(dest="way", required=True, metavar="hf-to-megatron|megatron-to-hf")
    into = ways.add_parser("hf-to-megatron", help="a model folder into a checkpoint")
    into.add_argument("model", metavar="MODEL", help="folder, or hub name in the local cache")
    into.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 where all weights are")
    back = ways.add_parser("megatron-to-hf", help="a checkpoint into a model folder")
    back.add_argument("checkpoint", nargs="?", type=Path, metavar="CHECKPOINT", help="or --run and --agent")
    back.add_argument("--run", type=Path, metavar="RUN_DIR", help="a run: one agent of one of its checkpoints")
    back.add_argument("--agent", metavar="NAME", help="of the run; may be left out where it has one")
    back.add_argument("--step", type=int, help="of the run, default: its newest checkpoint")
    back.add_argument(
        "--model", metavar="MODEL", help="folder with configuration and tokenizer, where not the saved one"
    )
    for way in (into, back):
        way.add_argument("out", type=Path, metavar="OUT", help="folder to make")
        way.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks, processes on this machine")
        way.add_argument("--pp", type=int, default=1, help="pipeline stages, likewise")
        way.add_argument("--ep", type=int, default=1, help="expert-parallel ranks, likewise")
    return parser.parse_args(argv)


def _layout(args: argparse.Namespace, folder: Path) -> LayoutConfig:
    if min(args.tp, args.pp, args.ep) < 1:
        raise ValueError(f"--tp={args.tp}, --pp={args.pp}, --ep={args.ep}: ranks are counted from 1")
    experts = "num_experts" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return LayoutConfig(tp=args.tp, pp=args.pp, dp=args.ep, ep=args.ep, sp=experts and args.tp > 1)


def _to_megatron(args: argparse.Namespace, out: Path) -> str:
    folder = hf_folder.find_folder(args.model)
    hf_folder.check_tensors(folder)
    dtype = args.dtype or ("bfloat16" if hf_folder.tensors_of(folder)[1] == {"BF16"} else "float32")
    layout = _layout(args, folder)
    sums = _on_ranks("to_megatron", AgentConfig(model=str(folder), dtype=dtype, layout=layout), folder, out)
    hf_folder.copy_companions(folder, out / _COMPANIONS)
    return f"{len(sums)} tensors in {dtype} at {layout}, each read back from Megatron's parameters bit for bit"


def _to_huggingface(args: argparse.Namespace, out: Path) -> str:
    source = _source(args)
    hf_folder.copy_companions(source.folder, out)
    _set_dtype(out / "config.json", source.dtype)
    if source.backend == "reference":
        dtype = getattr(torch, source.dtype)
        weights = load_file(source.path / "weights.safetensors")
        save_file({n: t.to(dtype) for n, t in weights.items()}, out / "part-0.safetensors", metadata={"format": "pt"})
        sums: dict[str, int] = {}
    else:
        agent = AgentConfig(model=str(source.folder), dtype=source.dtype, layout=_layout(args, source.folder))
        sums = _on_ranks("to_huggingface", agent, source.path, out)
    hf_folder.finish_safetensors(out)
    hf_folder.check_tensors(out)
    _verify(out, sums)
    count = len(hf_folder.tensors_of(out)[0])
    return f"{count} tensors in {source.dtype}, read back as they were written and loaded by transformers"


def _source(args: argparse.Namespace) -> Source:
    if (args.checkpoint is None) == (args.run is None):
        raise ValueError("what is to be converted? CHECKPOINT OUT, or --run RUN_DIR --agent NAME OUT")
    if args.run is None:
        path, model, dtype, backend = args.checkpoint, args.checkpoint / _COMPANIONS, None, "megatron"
        if args.agent or args.step is not None:
            raise ValueError("--agent and --step are of a run: name it by --run RUN_DIR")
    else:
        path, agent = _of_run(args.run, args.step, args.agent)
        model, dtype, backend = agent.model, agent.dtype, agent.backend
    if not path.is_dir():
        raise ValueError(f"{path}: no such checkpoint")
    folder = hf_folder.find_folder(args.model or str(model))
    if (path / "config.json").is_file():
        hf_folder.check_same_model(path, folder)
        dtype = dtype or json.loads((path / "config.json").read_text(encoding="utf-8")).get("dtype")
    elif dtype is None:
        raise ValueError(f"{path}: no config.json there, so not a checkpoint that megarl made")
    return Source(path=path, folder=folder, dtype=dtype, backend=backend)


def _of_run(run_dir: Path, step: int | None, name: str | None) -> tuple[Path, AgentConfig]:
    cfg = resumed(run_dir, [])
    if name is None and len(cfg.agents) > 1:
        raise ValueError(f"--agent: which one of {run_dir}? {', '.join(cfg.agents)}")
    name = name or next(iter(cfg.agents))
    if name not in cfg.agents:
        raise ValueError(f"--agent {name}: {run_dir} has {', '.join(cfg.agents)}")
    found = checkpoint.find(run_dir, step)
    if found.path is None:
        raise ValueError(
            f"{run_dir}: no complete checkpoint (checkpoint.every_steps was not set, or it did not get there)"
        )
    return found.path / "agents" / name, cfg.agents[name]


def _on_ranks(task: str, agent: AgentConfig, source: Path, out: Path) -> dict[str, int]:
    """``task`` of the ranks' module, on every rank; what rank 0 says."""
    return run_ranks(agent.layout.world, _task, task, agent, source, out, preload=(_RANKS,))[0]


def _task(task: str, agent: AgentConfig, source: Path, out: Path) -> dict[str, int]:
    from megarl.backends.megatron import convert  # in the rank: this process stays without Megatron

    todo: Callable[[Any], dict[str, int]] = getattr(convert, task)
    return todo(Job(agent=agent, source=source, out=out))


def _set_dtype(file: Path, dtype: str) -> None:
    config = json.loads(file.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    file.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _verify(folder: Path, sums: dict[str, int]) -> None:
    """Read everything back: the bytes are those that were written, and transformers finds all it looks for."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                if sums and checksum(opened.get_tensor(name)) != sums.pop(name):
                    raise ValueError(f"{file}: {name} is not what was written")
    if sums:
        raise ValueError(f"{folder}: {len(sums)} tensors were not written: {', '.join(sorted(sums)[:3])}")
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    notes = loaded[1]
    if odd := [f"{kind}: {sorted(map(str, names))[:3]}" for kind, names in notes.items() if names]:
        raise ValueError(f"{folder}: transformers does not load it whole: {'; '.join(odd)}")

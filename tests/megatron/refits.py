"""What the ranks of a policy do in the tests of planned refits: many models under one layout, one launch for all."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoConfig

from megarl.backends.exchange import Exchange, place
from megarl.backends.megatron import patches
from megarl.backends.megatron.model import Model, build_model
from megarl.backends.shards.boxes import sizes
from megarl.backends.shards.families import parts
from megarl.backends.shards.layout import Layout
from megarl.backends.shards.plan import make_plan
from megarl.backends.shards.topology import Topology
from megarl.backends.shards.training import training_layout
from megarl.planning.models import read_shape
from megarl.planning.request import layout_of
from megarl.settings import AgentConfig, LayoutConfig

UNWRITTEN = 7.0
# Bridge's mapping class of every kind of tensor; AutoMapping takes row, column or neither from the module
MAPPINGS = {
    **dict.fromkeys(("q", "k", "v"), "QKVMapping"),
    **dict.fromkeys(("gate", "up", "expert_gate", "expert_up"), "GatedMLPMapping"),
    **dict.fromkeys(("row", "expert_row", "replicated", "vocabulary"), "AutoMapping"),
}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes that arrive at this rank from others by any collective that a refit or an export of Bridge uses."""
    seen = {"bytes": 0}
    real = {name: getattr(dist, name) for name in ("all_to_all_single", "all_gather", "broadcast")}

    def all_to_all_single(output: torch.Tensor, input_: torch.Tensor, out_splits, in_splits, group=None) -> Any:
        own = out_splits[dist.get_rank(group)] * output.itemsize
        seen["bytes"] += output.nbytes - own
        return real["all_to_all_single"](output, input_, out_splits, in_splits, group=group)

    def all_gather(outputs: list[torch.Tensor], tensor: torch.Tensor, group=None, **kwargs: Any) -> Any:
        seen["bytes"] += sum(t.nbytes for t in outputs) - tensor.nbytes
        return real["all_gather"](outputs, tensor, group=group, **kwargs)

    def broadcast(tensor: torch.Tensor, src: int | None = None, group=None, **kwargs: Any) -> Any:
        sender = src if src is not None else dist.get_global_rank(group, kwargs["group_src"])
        seen["bytes"] += tensor.nbytes if dist.get_rank() != sender else 0
        return real["broadcast"](tensor, src, group=group, **kwargs)

    fakes: dict[str, Callable[..., Any]] = {
        "all_to_all_single": all_to_all_single,
        "all_gather": all_gather,
        "broadcast": broadcast,
    }
    try:
        for name, fake in fakes.items():
            setattr(dist, name, fake)
        yield seen
    finally:
        for name, function in real.items():
            setattr(dist, name, function)


def refit(
    worker: Any, layout: LayoutConfig, jobs: Sequence[tuple[Path, Sequence[Layout]]], gpus: int, bucket_bytes: int
) -> list[dict[str, Any]]:
    """Per model and engine: this rank's engine parameters after a refit, and what it took; or why there is no model."""
    found = []
    for path, engines in jobs:
        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            os.environ.pop(name, None)  # megatron-core sets them for one model and checks the next
        agent = AgentConfig(model=str(path), dtype="float32", layout=layout)
        try:
            model = build_model(agent, worker.groups, worker.device, {})
        except ValueError as refused:
            found += [{"absent": str(refused)} for _ in engines]
            continue
        training = training_layout(read_shape(str(path)), layout_of(layout), 4)
        wrong = differences(model, training, path)
        exported = export(model)
        for engine in engines:
            found.append(one(model, training, engine, gpus, bucket_bytes) | exported | {"wrong": wrong})
    return found


def one(model: Model, training: Layout, engine: Layout, gpus: int, bucket_bytes: int) -> dict[str, Any]:
    rank = dist.get_rank()
    topology = Topology(
        name="test", gpus_per_node=gpus, memory_bytes_per_s=100.0, nvlink_bytes_per_s=10.0, network_bytes_per_s=1.0
    )
    plan = make_plan(training, engine, topology)
    plan.check()
    exchange = Exchange(
        plan, dist.group.WORLD, bucket_bytes=bucket_bytes, dtype=torch.float32, device=torch.device("cpu")
    )
    params = {
        name: torch.full(shape, 0.0 if name in engine.padding(rank) else UNWRITTEN)
        for name, shape in (engine.params[rank] if rank < engine.world else {}).items()
    }
    buckets: list[int] = []

    def take(bucket: torch.Tensor, pieces: Sequence[Any]) -> None:
        buckets.append(bucket.nbytes)
        place(params, bucket, pieces)

    dist.barrier()
    start = time.perf_counter()
    with counted() as planned:
        moved = exchange.run(model.named_parameters(), take)
    seconds = time.perf_counter() - start
    return {
        "params": params,
        "moved": moved,
        "counted": planned["bytes"],
        "plan": sum(c.nbytes for c in plan.copies if c.destination == rank and c.tier != "local"),
        "bound": plan.lower_bound_bytes,
        "wire": plan.wire_bytes,
        "largest": max(buckets, default=0),
        "seconds": seconds,
        "key": plan.key(),
        "forwarded": sum(c.forwarded for c in plan.copies),
    }


def export(model: Model) -> dict[str, Any]:
    """Bridge's way: every rank gets every whole tensor."""
    dist.barrier()
    start = time.perf_counter()
    with counted() as exported:
        for _ in model.exported():
            pass
    return {"exported": exported["bytes"], "export_seconds": time.perf_counter() - start}


def registry(worker: Any, folders: Sequence[Path]) -> dict[str, list[str]]:
    """Per model: tensors that Bridge's registry maps elsewhere, or otherwise, than the description does."""
    found = {}
    for folder in folders:
        names = patches.import_bridge().from_hf_config(AutoConfig.from_pretrained(folder))._model_bridge
        mappings, wrong = names.mapping_registry(), []
        for part in parts(read_shape(str(folder)), 4):
            mapping = mappings.hf_to_megatron_lookup(part.tensor.name)
            layer = part.place if isinstance(part.place, int) else 0
            wanted = part.training.format(layer, e=part.expert)
            if mapping is None or (mapping.megatron_param, type(mapping).__name__) != (wanted, MAPPINGS[part.kind]):
                wrong.append(f"{part.tensor.name}: {mapping}")
        found[folder.name] = wrong
    return found


def differences(model: Model, layout: Layout, path: Path) -> list[str]:
    """Where this rank's parameters, loaded by Bridge, are not what the layout says."""
    rank, source = dist.get_rank(), load_file(path / "model.safetensors")
    params = model.named_parameters()
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    found = [f"{name}: {shape}" for name, shape in shapes.items() if layout.params[rank].get(name) != shape]
    found += [f"{name}: missing" for name in layout.params[rank].keys() - shapes.keys()]
    for shard in layout.shards[rank]:
        param = params[shard.param].detach()
        held = param.as_strided(sizes(shard.box), shard.strides, param.storage_offset() + shard.offset)
        if not torch.equal(held, source[shard.tensor][tuple(slice(*edge) for edge in shard.box)]):
            found.append(f"{shard.tensor} {shard.box}")
    return found


def refit_after_a_change(worker: Any, path: Path, layout: LayoutConfig, engine: Layout, param: str) -> dict[str, Any]:
    """A refit after one element of one parameter has moved, on the rank that has it."""
    model = build_model(AgentConfig(model=str(path), dtype="float32", layout=layout), worker.groups, worker.device, {})
    if dist.get_rank() == dist.get_world_size() - 1:
        model.named_parameters()[param].data.view(-1)[5] += 0.5
    return one(model, training_layout(read_shape(str(path)), layout_of(layout), 4), engine, 8, 4096)

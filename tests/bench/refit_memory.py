"""How much memory a planned refit takes beyond what its processes hold anyway.

A policy of two tensor-parallel Megatron ranks and two vLLM engines of one rank each, in processes of their own as in a
run. Of each process the most resident memory during a refit (the kernel's own high-water mark, mapped bucket files
included) over that before it; a refit has gone before, so that nothing is counted that is taken once and kept.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

MIB = 1 << 20
# 66 million parameters in float32: 252 MiB
SIZES = {
    "hidden_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "intermediate_size": 2304,
    "vocab_size": 4096,
}
# every larger block is mapped by itself, so that what is freed is given back and shows
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "2"}


def resident(pid: int, key: str) -> int:
    """Bytes of a line of /proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def peaks(pids: Mapping[str, int], refit: Any) -> dict[str, int]:
    """Name -> bytes of each process's high-water mark during ``refit()`` over what it held before."""
    for pid in pids.values():
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the mark falls to what is resident now
    before = {name: resident(pid, "VmRSS") for name, pid in pids.items()}
    refit()
    return {name: resident(pid, "VmHWM") - before[name] for name, pid in pids.items()}


def measure(bucket_bytes: int) -> dict[str, Any]:
    """Bytes: of the model, its largest tensor, a bucket, and by way of refitting of every process's peak."""
    os.environ.update(MALLOC)  # before the first process is started
    from megarl.backends.cluster import connect
    from megarl.backends.megatron.policy import MegatronPolicy
    from megarl.backends.placement import place
    from megarl.backends.planned import PlannedReshard
    from megarl.backends.reshard import reshard
    from megarl.backends.vllm.engine import VllmEngine
    from megarl.chat import open_chat
    from megarl.planning.models import read_shape
    from megarl.settings import (
        AgentConfig,
        ClusterConfig,
        EngineConfig,
        LayoutConfig,
        OptimizerConfig,
        ReshardConfig,
    )
    from tests import tiny
    from tests.megatron.ranks import LocalRanks

    with tempfile.TemporaryDirectory() as folder:
        agent = AgentConfig(
            model=str(tiny.write(Path(folder) / "model", "llama", **SIZES)),
            dtype="float32",
            layout=LayoutConfig(tp=2),
            optimizer=OptimizerConfig(name="sgd", lr=0.1),
            engine=EngineConfig(kv_cache_gib=0.05, max_sequences=8, replicas=2),
        )
        shape = read_shape(agent.model)
        cluster = connect(ClusterConfig(device="cpu", gpus_per_node=2), Path(folder) / "run")
        engine = ranks = None
        try:
            placement = place(cluster, {"a": 2}, one_node={"a": 1}, timeout_s=60)["a"]
            engine = VllmEngine("a", agent, placement, open_chat(agent.model), 128, {})
            ranks = LocalRanks(agent=agent, temperature=1.0)
            policy = MegatronPolicy(agent, ranks, tokens_per_microbatch=512)

            def planned(verify_every: int | None) -> PlannedReshard:
                cfg = ReshardConfig(bucket_bytes=bucket_bytes, verify_every=verify_every)
                return PlannedReshard(agent, policy, engine, (0, 0), cfg, temperature=1.0, drift_limit=1.0)

            pids = {f"policy rank {rank}": p.pid for rank, p in enumerate(ranks.processes)}
            pids |= {f"engine rank {rank}": pid for rank, pid in enumerate(_logging_to(engine))}
            found = {}
            for way, refit in (
                ("planned", planned(None)),
                ("planned, verified", planned(1)),
                ("gathered", lambda version: reshard(policy, engine, version, bucket_bytes)),
            ):
                refit(0)
                found[way] = peaks(pids, lambda refit=refit: refit(0))
        finally:
            if ranks is not None:
                ranks.close()
            if engine is not None:
                engine.close()
            cluster.close()
    return {
        "model": 4 * shape.parameters,
        "tensor": 4 * shape.hidden * 2 * shape.ffn,  # the engine's largest parameter: gate and up are one
        "bucket": bucket_bytes,
        "peaks": found,
    }


def _logging_to(engine: Any) -> list[int]:
    """The process of each replica."""
    logs = [str(engine._workers.log_file(rank)) for rank in range(2)]
    writers = {os.readlink(f"/proc/{p.pid}/fd/1"): p.pid for p in psutil.Process().children(recursive=True)}
    return [writers[log] for log in logs]


def show(found: dict[str, Any], console: Console) -> bool:
    """Does no process take more than two buckets and one tensor in a planned refit?"""
    limit = 2 * found["bucket"] + found["tensor"]
    console.print(
        f"model {found['model'] / MIB:.0f} MiB; MiB of each process above what it held before the refit; two buckets "
        f"of {found['bucket'] / MIB:.0f} and a tensor: {limit / MIB:.1f}"
    )
    table = Table()
    for column in ("process", *found["peaks"]):
        table.add_column(column, justify="left" if column == "process" else "right")
    for name in found["peaks"]["planned"]:
        table.add_row(name, *(f"{of_way[name] / MIB:.1f}" for of_way in found["peaks"].values()))
    console.print(table)
    return max(found["peaks"]["planned"].values()) <= limit

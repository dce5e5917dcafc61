"""What vLLM's loaders make of a checkpoint on every tensor-parallel rank, and what is recorded of them.

``python -m tests.vllm_layouts JOBS.json``: a list of {"model": folder, "tp": size, "out": folder}. Real models of real
ranks over gloo, without an engine around them: one import of vLLM for all jobs. Per rank r it writes ``out/r.pt``, a
dictionary of ``params`` (loaded by vLLM's own load_weights over what was filled with 7.0), ``shards``, ``shapes`` and
``failed`` (see megarl.backends.vllm.record).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


def load(jobs: Sequence[tuple[Path, int]], folder: Path) -> dict[tuple[Path, int], list[dict[str, Any]]]:
    """(model, tp) -> what each rank wrote."""
    import torch

    listed = [{"model": str(model), "tp": tp, "out": str(folder / f"{n}")} for n, (model, tp) in enumerate(jobs)]
    file = folder / "jobs.json"
    file.write_text(json.dumps(listed))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm_layouts", str(file)],
        env=os.environ | SETTINGS,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {
        job: [torch.load(Path(entry["out"]) / f"{rank}.pt", weights_only=False) for rank in range(job[1])]
        for job, entry in zip(jobs, listed, strict=True)
    }


def main(file: Path) -> int:
    """Fork the ranks of every size in turn."""
    jobs = json.loads(file.read_text())
    from vllm import ModelRegistry  # before the fork: every rank would take ten seconds for it

    import megarl.backends.vllm.record  # noqa: F401

    groups: dict[tuple[int, bool], list[dict[str, Any]]] = {}  # vLLM makes its expert group with the others or never
    for job in jobs:
        config = json.loads((Path(job["model"]) / "config.json").read_text())
        (architecture,) = config["architectures"]
        # a class that is given is looked at here; one that vLLM finds itself, in a process of its own
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
        groups.setdefault((job["tp"], "num_experts_per_tok" in config), []).append(job)
    failed = 0
    for (tp, moe), group in groups.items():
        os.environ["VLLM_DIST_IDENT"] = f"layouts{os.getpid()}-{tp}-{int(moe)}"  # names shared memory
        with tempfile.TemporaryDirectory() as store:
            pids = []
            for rank in range(tp):
                if (pid := os.fork()) == 0:
                    ranks_work(rank, tp, f"file://{store}/store", group)
                pids.append(pid)
            failed |= max(os.waitpid(pid, 0)[1] for pid in pids)
        for left in Path("/dev/shm").glob(f"{os.environ['VLLM_DIST_IDENT']}-*"):
            left.unlink()  # vLLM's ranks do so where they end in turn
    return 1 if failed else 0


def ranks_work(rank: int, tp: int, store: str, jobs: Sequence[dict[str, Any]]) -> None:
    """Never returns."""
    import traceback

    try:
        for number, job in enumerate(jobs):
            one(rank, tp, store if number == 0 else None, job)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def one(rank: int, tp: int, store: str | None, job: dict[str, Any]) -> None:
    import torch
    from safetensors.torch import load_file
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    from megarl.backends.shards.layout import Tensor
    from megarl.backends.vllm.record import record

    config = EngineArgs(
        model=job["model"], dtype="float32", enforce_eager=True, max_model_len=64, tensor_parallel_size=tp
    ).create_engine_config()
    source = load_file(Path(job["model"]) / "model.safetensors")
    with set_current_vllm_config(config):
        if store is not None:
            parallel_state.init_distributed_environment(tp, rank, store, rank, "gloo")
            parallel_state.initialize_model_parallel(tp, backend="gloo")
        torch.set_default_dtype(torch.float32)
        model = initialize_model(config)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
        model.load_weights(iter(source.items()))
    tensors = [Tensor(name=name, shape=tuple(value.shape), itemsize=4) for name, value in source.items()]
    shards, shapes, failed = record(config, tensors)
    out = Path(job["out"])
    out.mkdir(exist_ok=True)
    params = {name: param.detach() for name, param in model.named_parameters()}
    torch.save({"params": params, "shards": shards, "shapes": shapes, "failed": failed}, out / f"{rank}.pt")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

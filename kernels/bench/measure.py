"""Seconds and peak memory of a call, on CPU and CUDA."""

import datetime
import importlib.metadata
import multiprocessing
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch


def seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median wall seconds; on CUDA after three warm-up calls, by events."""
    if device.type != "cuda":
        return statistics.median(_timed(call) for _ in range(repeats))
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in events:
        start.record()
        call()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cuda_peak(call: Callable[[], Any]) -> int:
    """Bytes that one call allocates beyond what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def in_fresh_process(prepare: Callable[..., Callable[[], Any]], arguments: tuple[Any, ...], repeats: int) -> dict:
    """On CPU: {"seconds", "cpu_seconds", "peak_bytes"} of ``prepare(*arguments)()``, in a process of its own.

    A process's peak of resident memory only rises, so the peak before the first call is that of the arguments.
    ``prepare`` is a function of an importable module.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, prepare, arguments, repeats, torch.get_num_threads()))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found


def _serve(pipe: Any, prepare: Callable[..., Callable[[], Any]], arguments: tuple, repeats: int, threads: int) -> None:
    torch.set_num_threads(threads)
    call = prepare(*arguments)
    before = _peak_resident()
    started = time.process_time()
    taken = [_timed(call) for _ in range(repeats)]
    busy = (time.process_time() - started) / repeats
    pipe.send({"seconds": statistics.median(taken), "cpu_seconds": busy, "peak_bytes": _peak_resident() - before})


def _peak_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def facts(device: torch.device, dry: bool) -> dict[str, Any]:
    """What ran where and when: versions, and on CUDA the card's copy bandwidth and matrix rate as the roof."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "device": str(device),
        "dry": dry,
    }
    if device.type != "cuda":
        return found | {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    found |= {"gpu": torch.cuda.get_device_name(device), "driver": _driver(), "cuda": torch.version.cuda}
    found |= {name: _version(name) for name in ("liger-kernel", "cut-cross-entropy")}
    x = torch.empty(1 << 30, device=device)
    y = torch.empty_like(x)
    found["copy_TBs"] = 2 * x.nbytes / seconds(lambda: y.copy_(x), device, 10) / 1e12
    a = torch.randn(8192, 8192, device=device).bfloat16()
    found["matmul_TFLOPs"] = 2 * 8192**3 / seconds(lambda: a @ a, device, 10) / 1e12
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Of the NVIDIA card; None where nvidia-smi is not on PATH."""
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None

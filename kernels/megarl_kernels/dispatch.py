"""Which implementation of a kernel serves a tensor, and why."""

import importlib.util
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("torch", "triton")
MIN_CAPABILITY = (8, 0)  # the Triton kernels are compiled and checked for sm_80 and sm_90

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT64_TOO = frozenset({"grouped_advantage"})  # its Triton kernel computes in float64 whatever comes in

_log = logging.getLogger(__name__)


def pick(name: str, tensor: Tensor) -> tuple[str, str]:
    """(backend, reason) that ``auto`` gives the function ``name`` for a tensor of this device and dtype."""
    if tensor.device.type != "cuda":
        return "torch", f"the tensors are on {tensor.device.type}: Triton's kernels need a CUDA device"
    if importlib.util.find_spec("triton") is None:
        return "torch", "triton is not installed"
    capability = torch.cuda.get_device_capability(tensor.device)
    if capability < MIN_CAPABILITY:
        return "torch", f"the device is sm_{capability[0]}{capability[1]}: the Triton kernels need sm_80 or newer"
    if tensor.dtype not in _DTYPES and not (tensor.dtype == torch.float64 and name in _FLOAT64_TOO):
        return "torch", f"{tensor.dtype}: the Triton kernel of {name} computes in float32"
    return "triton", f"sm_{capability[0]}{capability[1]} and {tensor.dtype}"


def resolve(name: str, backend: str, tensor: Tensor, known: tuple[str, ...] = BACKENDS) -> str:
    """The backend to run: ``backend`` itself after a check that it can, or what ``auto`` picks (logged once, at INFO).

    ``known`` are the backends that the function has. ``triton`` on a CPU tensor is right only under Triton's
    interpreter (TRITON_INTERPRET=1 before the first import of the kernels).
    """
    if backend == "auto":
        choice, reason = pick(name, tensor)
        _explain(name, choice, reason)
        return choice
    if backend not in known:
        raise ValueError(f"backend={backend!r}: there are {', '.join(('auto', *known))}")
    if backend == "triton":
        _check_triton(name, tensor)
    return backend


def _check_triton(name: str, tensor: Tensor) -> None:
    if importlib.util.find_spec("triton") is None:
        raise ValueError("backend='triton': triton is not installed; 'torch' runs everywhere")
    if tensor.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend='triton': {name} got a CPU tensor, which only Triton's interpreter takes "
            "(TRITON_INTERPRET=1); 'torch' or 'auto' runs on CPU"
        )


def launching_on(tensor: Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device, whatever its tensors are on."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@lru_cache(maxsize=256)
def _explain(name: str, backend: str, reason: str) -> None:
    _log.info("%s runs on %s: %s", name, backend, reason)

"""Run megatron-core on a machine without CUDA: every redirection of a CUDA call, in one place.

``enable()`` does nothing where CUDA exists, so one program serves both. Each patch redirects something that would
raise without CUDA and changes nothing that worked. The worker process owns the effect: it serves nothing but Megatron.
Line numbers in the reasons are of megatron-core 0.19.2. ``tests/megatron/test_shim.py`` fails for a patch that is
no longer used.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import ModuleType
from typing import Any

import torch

CORE = "0.19."
PATCHES = ("compile", "device", "synchronize", "stream", "factory", "to_device", "random", "type_name", "splits")
used: set[str] = set()  # names of the patches that have been called in this process

_CPU = torch.device("cpu")


@functools.cache
def enable() -> None:
    """Apply the patches once per process. Raises RuntimeError under another megatron-core than they are written for."""
    if torch.cuda.is_available():
        return
    found = version("megatron-core")
    if not found.startswith(CORE):
        raise RuntimeError(
            f"the CPU shim is written for megatron-core {CORE}x, found {found}: check each patch in {__file__}"
        )
    _no_compile()
    _device_calls()
    _factories()
    _moves()
    _random_states()
    _type_names()
    _splits()


def _no_compile() -> None:
    """Fused element-wise functions are ``torch.compile`` calls (jit.py), which compile C++ for minutes on a CPU.

    Decorated functions stay as written where this comes before megatron-core's import, which then takes 2.4 s less.
    """

    def as_written(function: Callable | None = None, **options: object) -> Callable:
        used.add("compile")
        return function if function is not None else as_written

    torch.compile = as_written


def _device_calls() -> None:
    """The current device as a value of ``device=`` (mappings.py 95, layers.py 647, p2p_communication.py 334), waiting
    for it (p2p_communication.py 419), and its streams (param_and_grad_buffer.py 632, token_dispatcher.py 469, 925).
    """

    def current_device() -> torch.device:
        used.add("device")
        return _CPU

    def synchronize(device: object = None) -> None:
        used.add("synchronize")

    def current_stream(device: object = None) -> "_Stream":
        used.add("stream")
        return _Stream()

    torch.cuda.current_device = current_device
    torch.cuda.synchronize = synchronize
    torch.cuda.current_stream = current_stream
    torch.cuda.Stream = _Stream
    torch.cuda.stream = lambda stream: contextlib.nullcontext()


class _Stream:
    """A stream on which everything has already happened."""

    def wait_stream(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self) -> "_Stream":
        return self  # an event is waited for, as a stream is


def _on_cuda(device: object) -> bool:
    return device is not None and not isinstance(device, int) and str(device).startswith("cuda")


def _factories() -> None:
    """``device="cuda"`` written out (schedules.py 749, clip_grads.py 108, optimizer.py 702)."""

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _on_cuda(kwargs.get("device")):
                used.add("factory")
                kwargs["device"] = _CPU
            return make(*args, **kwargs)

        return made

    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))


def _moves() -> None:
    """``Tensor.cuda()`` (distrib_optimizer.py 1374)."""

    def cuda(self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        used.add("to_device")
        return self

    torch.Tensor.cuda = cuda


def _random_states() -> None:
    """Random states that model-parallel regions switch to are states of the CPU generator (random.py 423-560)."""
    import megatron.core.tensor_parallel.random as random

    class CpuStates(random.CudaRNGStatesTracker):
        def add(self, name: str, seed: int) -> None:
            used.add("random")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    random.CudaRNGStatesTracker = CpuStates
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _type_names() -> None:
    """The optimizers sort parameters by ``Tensor.type()``, spelled with "cuda" (distrib_optimizer.py 401, 466, 758;
    optimizer.py 1009; clip_grads.py 174).
    """
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.distrib_optimizer as distributed
    import megatron.core.optimizer.optimizer as plain

    _spell(distributed.DistributedOptimizer, "__init__")
    _spell(plain.Float16OptimizerWithFloat16Params, "__init__")
    for module in (clip_grads, plain):
        _spell(module, "clip_grad_by_total_norm_fp32")


def _splits() -> None:
    """How many tokens go to which expert's rank: numbers once they have been moved off a GPU, and left tensors, which
    all_to_all does not take, where they were on the CPU already (moe_utils.py 1184).
    """
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    inner = dispatcher.maybe_move_tensor_to_cpu

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor):
            used.add("splits")
            return tensor.numpy()
        return inner(tensor, as_numpy, record_stream)

    dispatcher.maybe_move_tensor_to_cpu = moved


def _spell(owner: type | ModuleType, name: str) -> None:
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def spelled(*args: Any, **kwargs: Any) -> Any:
        plain = torch.Tensor.type

        def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            said = plain(self, *args, **kwargs)
            if isinstance(said, str) and said.startswith("torch.") and "cuda" not in said:
                used.add("type_name")
                return said.replace("torch.", "torch.cuda.", 1)
            return said

        torch.Tensor.type = type_
        try:
            return inner(*args, **kwargs)
        finally:
            torch.Tensor.type = plain

    setattr(owner, name, spelled)

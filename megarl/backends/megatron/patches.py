"""What is replaced in Megatron on any machine, with a GPU or without one; what only a CPU needs is in ``cpu``.

Versions are checked; each replacement has a test in ``tests/megatron/test_shim.py`` that fails once the library no
longer needs it.
"""

import functools
import queue
import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

BRIDGE = "0.6."
CORE = "0.19."
ROOTS = ("transformer_engine", "transformer_engine_torch")
DECIDING = (  # find out at their import whether TransformerEngine is there
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.dist_checkpointing",
    "megatron.core.ssm",
)


def has_transformer_engine() -> bool:
    return find_spec("transformer_engine") is not None


@functools.cache
def import_bridge() -> Any:
    """Megatron-Bridge's ``AutoBridge`` class.

    The package imports TransformerEngine unconditionally (peft/lora_layers.py 20) and derives classes from its
    modules, for features that are not used here. Where it is absent, stand-ins answer during that import only, after
    megatron-core has decided that there is none; whoever asks later gets the honest ImportError.
    """
    if has_transformer_engine():
        from megatron.bridge import AutoBridge

        return AutoBridge
    _expect("megatron-bridge", BRIDGE)
    for name in DECIDING:
        import_module(name)
    finder = _StandIns()
    sys.meta_path.append(finder)
    try:
        from megatron.bridge import AutoBridge
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in ROOTS]:
            del sys.modules[name]
    from megatron.bridge.models.conversion.param_mapping import AutoMapping

    AutoMapping.register_module_type("OurPostNormRowParallelLinear", "row")  # others of ours it knows by their names
    return AutoBridge


def _expect(package: str, prefix: str) -> None:
    found = version(package)
    if not found.startswith(prefix):
        raise RuntimeError(f"{__name__} is written for {package} {prefix}x, found {found}: check what it replaces")


class _StandInType(type):
    """Class attributes of a stand-in are stand-ins too."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInType(name, (_StandIn,), {})


class _StandIn(metaclass=_StandInType):
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ImportError(f"{type(self).__name__} needs TransformerEngine, which is not installed")


class _StandInModule(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__version__ = "0"
        self.__path__ = []  # makes it a package

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _StandInType(name, (_StandIn,), {})


class _StandIns(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.partition(".")[0] in ROOTS else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@functools.cache
def save_in_process() -> None:
    """Hand the results of a checkpoint's writes over in this process.

    megarl saves synchronously; megatron-core, ready for asynchronous saving, would start a manager process per rank for
    that (filesystem_async.py 64), which outlives a killed rank.
    """
    _expect("megatron-core", CORE)
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async.get_write_results_queue = lambda mp_mode="spawn": queue.Queue()


@functools.cache
def keep_adam_step() -> None:
    """Let the distributed optimizer load a checkpoint into torch's Adam.

    It restores every state tensor of a parameter from the checkpoint, and torch's Adam, which stands in for the fused
    one, has a tensor (``step``) that checkpoints keep in the parameter group: KeyError (distrib_optimizer.py 1223).
    """
    if has_transformer_engine():
        return
    _expect("megatron-core", CORE)
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(inner)
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        inner(self, model_param, {"step": state["step"], **tensors} if "step" in state else tensors)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states

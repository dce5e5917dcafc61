"""What a live engine holds after a planned refit, against what vLLM's own loaders make of the policy's own export.

Neither side knows the plan: one is the parameters as they stand, the other the loaders' copies into a model without
storage, fed with whole Hugging Face tensors as Megatron-Bridge exports them. No second set of weights is held.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megarl.backends.exchange import region
from megarl.backends.fingerprints import MODULUS, Prints, faults, fingerprint
from megarl.backends.shards.boxes import sizes
from megarl.backends.shards.layout import Shard
from megarl.backends.vllm.record import blank, loading, named_storages, storage_of


class Seal:
    """Fingerprints of parameters as they stand after a refit, before vLLM packs them."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        """``shards``: where the plan puts each tensor, to tell tensors apart."""
        self._shards: dict[str, list[Shard]] = defaultdict(list)
        for shard in shards:
            self._shards[shard.param].append(shard)
        self.wholes: dict[str, int] = {}
        self.held: Prints = {}

    def take(self, name: str, param: torch.Tensor) -> None:
        """Note a parameter, once."""
        self.wholes[name] = fingerprint(param.reshape(-1), 0, (1,))
        parts: dict[str, int] = defaultdict(int)
        for shard in self._shards[name]:
            view = shard.view(shard.box)
            values = region(param, view, sizes(shard.box))
            parts[shard.tensor] = (parts[shard.tensor] + fingerprint(values, view.offset, view.strides)) % MODULUS
        self.held[name] = dict(parts)


class Judge:
    """Takes a policy's export bucket by bucket, then says what a seal does not hold of it."""

    def __init__(self, vllm_config: Any) -> None:
        self._config = vllm_config
        self._model = blank(vllm_config)
        self._watch = _Watch(self._model)

    def take(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Some whole tensors of the export, each once, and each of a storage of its own."""

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in named:
                self._watch.comes(name, tensor)
                yield name, tensor

        with loading(self._config), self._watch:
            self._model.load_weights(watched())

    def faults(self, seal: Seal) -> list[str]:
        return faults(seal.wholes, seal.held, self._watch.loaded)


class _Watch(TorchFunctionMode):
    """Takes fingerprints of copies from the export's tensors into the blank model's parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.loaded: Prints = {}
        self._param_of = named_storages(model)
        self._tensor_of: dict[int, str] = {}

    def comes(self, name: str, tensor: torch.Tensor) -> None:
        self._tensor_of[storage_of(tensor)] = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.Tensor.copy_:
            self._note(args[0], args[1] if len(args) > 1 else (kwargs or {})["src"])
            return args[0]
        return func(*args, **(kwargs or {}))

    def _note(self, into: torch.Tensor, source: torch.Tensor) -> None:
        name, param = self._tensor_of.get(storage_of(source)), self._param_of.get(storage_of(into))
        if name is None or param is None or source.numel() == 0:
            return
        parts = self.loaded.setdefault(param, {})
        value = fingerprint(source.to(into.dtype), int(into.storage_offset()), into.stride())
        parts[name] = (parts.get(name, 0) + value) % MODULUS

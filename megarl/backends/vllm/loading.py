"""Inside vLLM's own worker processes: weights from files into the live model.

vLLM adds the methods of ``WeightLoading`` to its worker class (``worker_extension_cls``) and calls them by name through
``collective_rpc``, on every tensor-parallel rank.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from megarl.backends.exchange import Piece, place
from megarl.backends.shards.layout import Shard, Tensor
from megarl.backends.vllm.judge import Judge, Seal
from megarl.backends.vllm.record import record

Files = Sequence[tuple[str, Sequence[Piece]]]  # buckets and what they hold, of one rank


class WeightLoading:
    """Whole tensors by layerwise reload, or this rank's own boxes of them (``*_boxes``).

    On CPU vLLM packs its linear weights and drops the originals, so that a plain load cannot work. Between begin and
    finish the model is in pieces; whoever calls sees to it that nothing generates.
    """

    vllm_config: Any  # of the worker that this class is mixed into
    model_config: Any
    model_runner: Any
    rank: int

    _boxes: "Boxes | None" = None
    _seal: Seal | None = None
    _judge: Judge | None = None
    _shards: Sequence[Shard] = ()

    def megarl_begin_reload(self) -> None:
        initialize_layerwise_reload(self.model_runner.get_model())

    def megarl_load_file(self, path: str, names: Sequence[str]) -> None:
        """Load the named Hugging Face tensors of a safetensors file; the file may go once this has returned."""
        with safe_open(path, framework="pt") as file:
            # A layer waits until all its tensors have come, perhaps in another file: it must not wait on a mapped one.
            named = [(name, file.get_tensor(name).clone()) for name in names]
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(iter(named))

    def megarl_finish_reload(self) -> None:
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, self.model_config)
            if current_platform.is_cpu():
                _repack_heads(model)

    def megarl_record(
        self, tensors: Sequence[Tensor]
    ) -> tuple[list[Shard], dict[str, tuple[int, ...]], dict[str, str]]:
        """See ``record``."""
        recorded = record(self.vllm_config, tensors)
        self._shards = recorded[0]
        return recorded

    def megarl_begin_boxes(
        self, shapes: Sequence[Mapping[str, tuple[int, ...]]], wanted: Sequence[Mapping[str, int]], verify: bool
    ) -> None:
        """A planned refit begins. Per rank the shapes of parameters as recorded, and how many elements of each come."""
        self._seal = Seal(self._shards) if verify else None
        self._boxes = Boxes(self.model_runner.get_model(), shapes[self.rank], wanted[self.rank], self._seal)

    def megarl_take(self, files: Sequence[Files]) -> None:
        """This rank's buckets; the files may go once this has returned."""
        assert self._boxes is not None, "megarl_take outside a planned refit"
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            for path, pieces in files[self.rank]:
                with safe_open(path, framework="pt") as file:
                    self._boxes.write(file.get_tensor("bucket"), pieces)

    def megarl_finish_boxes(self) -> list[str]:
        """Parameters of which not all elements came; none: the model is complete."""
        assert self._boxes is not None, "megarl_finish_boxes outside a planned refit"
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            missing = self._boxes.finish()
        self._boxes = None
        return missing

    def megarl_begin_judging(self) -> None:
        """The policy's export comes, whole; one that was given up half-way is forgotten."""
        self._judge = Judge(self.vllm_config)

    def megarl_judge(self, path: str, names: Sequence[str]) -> None:
        """Take the named tensors of a file of the export; the file may go once this has returned."""
        assert self._judge is not None, "megarl_judge before megarl_begin_judging"
        with safe_open(path, framework="pt") as file:
            # copies, one by one: tensors of one file may be views of one storage
            self._judge.take((name, file.get_tensor(name).clone()) for name in names)

    def megarl_verdict(self) -> list[str]:
        """What this rank, as the last refit with ``verify`` has left it, does not hold of the export."""
        assert self._seal is not None, "megarl_verdict without a refit that is verified"
        assert self._judge is not None, "megarl_verdict before megarl_begin_judging"
        judge, self._judge = self._judge, None
        return judge.faults(self._seal)


class Boxes:
    """Writes pieces into a model's parameters, in place where they are as their loaders left them.

    On CPU vLLM packs the weights of linear layers and empties the parameters: such a one is put together beside the
    model, and its layer packed anew as soon as all of it has come, so that few weights are held twice.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
        wanted: Mapping[str, int],
        seal: Seal | None,
    ) -> None:
        """``wanted``: elements per parameter; fewer than it has where some of its rows belong to no tensor."""
        self._model, self._shapes, self._wanted, self._seal = model, shapes, wanted, seal
        self._aside: dict[str, torch.Tensor] = {}
        self._written: dict[str, int] = dict.fromkeys(shapes, 0)
        self._layers: dict[str, list[str]] = defaultdict(list)  # module -> its parameters
        for name in shapes:
            self._layers[name.rpartition(".")[0]].append(name)

    def write(self, bucket: torch.Tensor, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            name = piece.into.param
            place({name: self._open(name, bucket)}, bucket, [piece])
            self._written[name] += prod(piece.shape)
            if self._written[name] == self._wanted[name]:
                self._pack(name.rpartition(".")[0])

    def _open(self, name: str, bucket: torch.Tensor) -> torch.Tensor:
        if name in self._aside:
            return self._aside[name]
        param = self._model.get_parameter(name)
        fits = tuple(param.shape) == tuple(self._shapes[name]) and param.dtype == bucket.dtype
        into = param.data if fits else torch.empty(self._shapes[name], dtype=bucket.dtype, device=param.device)
        if not fits:
            self._aside[name] = into
        if not self._written[name] and self._wanted[name] < prod(self._shapes[name]):
            into.zero_()
        return into

    def _pack(self, layer: str) -> None:
        """Give a layer the parameters that were put together beside it, once all of its own have come."""
        names = self._layers[layer]
        aside = [name for name in names if name in self._aside]
        if not aside or any(self._written[name] != self._wanted[name] for name in names):
            return
        module = self._model.get_submodule(layer)
        for name in aside:
            if self._seal is not None:
                self._seal.take(name, self._aside[name])
            setattr(module, name.rpartition(".")[2], torch.nn.Parameter(self._aside.pop(name), requires_grad=False))
        method: Any = module.quant_method
        method.process_weights_after_loading(module)

    def finish(self) -> list[str]:
        """Parameters of which not all has come; where there are none, the model is complete."""
        missing = sorted(name for name, count in self._wanted.items() if self._written[name] != count)
        if missing:
            return missing
        for name, count in self._wanted.items():
            if not count:  # all of this rank's rows are padding
                self._model.get_parameter(name).data.zero_()
        if self._seal is not None:
            for name in self._shapes.keys() - self._seal.wholes.keys():
                self._seal.take(name, self._model.get_parameter(name).data)
        if current_platform.is_cpu():
            _repack_heads(self._model)
        return []


def _repack_heads(model: torch.nn.Module) -> None:
    """A head tied to the embedding owns a packed copy for the CPU, which layerwise reload leaves at the old weights."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)

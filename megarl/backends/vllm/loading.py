"""Inside vLLM's own worker processes: weights from files into the live model.

vLLM adds the methods of ``WeightLoading`` to its worker class (``worker_extension_cls``) and calls them by name through
``collective_rpc``, on every tensor-parallel rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform


class WeightLoading:
    """Layerwise reload: on CPU vLLM packs its linear weights and drops the originals, so that a plain load cannot work.

    Between begin and finish the model is in pieces; whoever calls sees to it that nothing generates.
    """

    vllm_config: Any  # of the worker that this class is mixed into
    model_config: Any
    model_runner: Any

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


def _repack_heads(model: torch.nn.Module) -> None:
    """A head tied to the embedding owns a packed copy for the CPU, which layerwise reload leaves at the old weights."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)

"""Norms, alone and beside linear layers, under the parameter names of TransformerEngine's modules."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm in float32, usable under sequence parallelism: its gradient is then summed over tp."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object) -> None:
        super().__init__()
        self.eps = eps
        self.offset = _offset(config)
        self.weight = _norm_weight(config, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _rms_norm(x, self.weight, self.eps, self.offset)


class OurLayerNormColumnParallelLinear(ColumnParallelLinear):
    """RMS norm, then a column-parallel linear. Bridge knows the kind of its parameters by the end of the name."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(config, input_size)
        self.layer_norm_eps = config.layernorm_epsilon
        self.layer_norm_offset = _offset(config)

    def forward(self, input_: torch.Tensor, *args, **kwargs):
        normed = _rms_norm(input_, self.layer_norm_weight, self.layer_norm_eps, self.layer_norm_offset)
        return super().forward(normed, *args, **kwargs)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata: Any = None):
        tp_group: Any = self.tp_group
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0, "bias": 0},  # the norm's weight is whole on every rank
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )


class OurPostNormRowParallelLinear(RowParallelLinear):
    """A row-parallel linear without bias, then an RMS norm: of what a Gemma layer adds to its input."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.post_layernorm = RMSNorm(config, output_size, config.layernorm_epsilon)

    def forward(self, input_: torch.Tensor):
        output, bias = super().forward(input_)
        assert bias is None, "a norm before the bias is another model"
        return self.post_layernorm(output), bias


def _offset(config: TransformerConfig) -> float:
    """What is added to a norm's weight: Gemma's are stored as their distance from 1."""
    return 1.0 if config.layernorm_zero_centered_gamma else 0.0


def _norm_weight(config: TransformerConfig, size: int) -> torch.nn.Parameter:
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    weight: Any = torch.nn.Parameter(torch.ones(size, dtype=config.params_dtype, device=device))
    weight.sequence_parallel = config.sequence_parallel
    return weight


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).to(x.dtype)

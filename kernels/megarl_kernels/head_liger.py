"""The head by Liger's fused linear scaled cross-entropy, where liger-kernel is installed: an option, never a default.

Its kernels for sm_90 are the fastest published, under tensor parallelism too, but they stage logits through 16 bits
(errors of about 3e-3 in a logprob) and know fewer cases; what they do not know is refused.
"""

import importlib.util

import torch.distributed as dist
from torch import Tensor

from megarl_kernels.moments import LogprobOutput, Options


def liger_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    options: Options,
    *,
    temperature: float | Tensor,
    bias: Tensor | None,
    sequence_parallel: bool,
) -> LogprobOutput:
    """As ``linear_logprob``. Raises ValueError for what Liger's function cannot compute."""
    if importlib.util.find_spec("liger_kernel") is None:
        raise ValueError("backend='liger': liger-kernel is not installed")
    ranks = dist.get_world_size(options.tp_group) if options.tp_group is not None else 1
    unknown = [
        text
        for wrong, text in (
            (set(options.stats) - {"entropy"}, f"stats={options.stats}"),
            (options.softcap > 0, f"softcap={options.softcap}"),
            (options.logit_scale != 1.0, f"logit_scale={options.logit_scale}"),
            (isinstance(temperature, Tensor), "a temperature per row"),
            (bias is not None, "a bias"),
            (sequence_parallel and ranks > 1, "sequence_parallel=True"),
            (options.vocab_size != ranks * weight.shape[0], f"a head padded beyond vocab_size={options.vocab_size}"),
            (hidden.shape[0] == 0, "no rows"),
        )
        if wrong
    ]
    if unknown:
        raise ValueError(f"backend='liger' does not know {', '.join(unknown)}: use auto, torch or triton")
    from liger_kernel.ops import (  # type: ignore[reportMissingImports]
        LigerFusedLinearScaledCrossEntropyFunction,
        LigerFusedLinearScaledCrossEntropyTPFunction,
    )

    if options.tp_group is None:
        loss, entropy = LigerFusedLinearScaledCrossEntropyFunction.apply(
            hidden, weight, target, temperature, options.ignore_index, 1, True
        )
    else:
        loss, entropy = LigerFusedLinearScaledCrossEntropyTPFunction.apply(
            hidden, weight, target, options.tp_group, temperature, options.ignore_index, 1, True
        )
    stats = {"entropy": entropy.float()} if options.stats else {}
    return LogprobOutput(-loss.float(), stats)

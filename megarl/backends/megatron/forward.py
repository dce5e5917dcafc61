"""Packed microbatches through the pipeline schedule: logprobs out, or a loss and its gradients.

Axes: T tokens of a pack, T / cp of them on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megarl.backends.megatron import head
from megarl.backends.megatron.head import IGNORED, Differences, Question
from megarl.backends.megatron.model import Model
from megarl.backends.megatron.order import context_rows
from megarl.loss import TokenBatch
from megarl.settings import KernelsConfig
from megarl.types import Microbatch
from megarl_kernels import LogprobOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Pack:
    """A microbatch as this rank sees it."""

    batch: TokenBatch  # its T / cp tokens
    params: PackedSeqParams

    @classmethod
    def of(cls, microbatch: Microbatch, model: Model, device: torch.device) -> "Pack":
        cp = model.groups.cp
        rows = torch.from_numpy(context_rows(microbatch.cu_seqlens, cp.size(), cp.rank())).to(device)
        batch = TokenBatch.of(microbatch, device).at(rows)
        return cls(batch=batch, params=model.layers.describe(microbatch.cu_seqlens, batch.positions, cp))


Consume = Callable[[LogprobOutput, TokenBatch], tuple[torch.Tensor, Any]]


def run(
    model: Model,
    packs: Sequence[Pack],
    consume: Consume,
    *,
    temperature: float,
    stats: Sequence[str],
    train: bool,
    kernels: KernelsConfig,
    differences: Differences,
) -> list[Any]:
    """What ``consume`` returns beside the loss, per microbatch; empty on all pipeline stages but the last.

    ``consume`` gets the logprobs of each response token (0 elsewhere). With ``train`` its loss is differentiated and
    gradients are summed over microbatches, data- and context-parallel ranks, with no division anywhere.
    ``differences`` are noted where ``kernels.compare``.
    """
    groups, config = model.groups, model.config
    tp = groups.tp if groups.tp.size() > 1 else None

    def take(pack: Pack, answer: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor, Any]:
        output = LogprobOutput(*answer)  # Megatron's Float16Module makes a plain tuple of it
        loss, kept = consume(output, pack.batch)
        return loss, torch.zeros((), dtype=torch.int, device=output.logprob.device), kept

    def step(iterator: Any, chunk: torch.nn.Module) -> tuple[torch.Tensor, Callable]:
        pack: Pack = next(iterator)
        question = Question(
            target=torch.where(pack.batch.mask, pack.batch.labels, IGNORED),
            temperature=temperature,
            stats=tuple(stats),
            vocab_size=model.vocab_size,
            tp_group=tp,
            kernels=kernels,
            differences=differences,
        )
        out = chunk(
            input_ids=pack.batch.token_ids[None],
            position_ids=pack.batch.positions[None],
            attention_mask=None,
            packed_seq_params=pack.params,
            output_processor=head.process,
            output_processor_context=question,
        )
        return out, partial(take, pack)

    pipeline: dict[str, Any] = {} if groups.pp.size() == 1 else {"p2p_communicator": P2PCommunicator(groups.pp, config)}
    schedule = get_forward_backward_func(pp_size=groups.pp.size(), vp_size=None)
    with torch.set_grad_enabled(train):
        return schedule(
            forward_step_func=step,
            data_iterator=iter(packs),
            model=[model.chunk],
            num_microbatches=len(packs),
            seq_length=1,  # told per microbatch (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=not train,
            pg_collection=groups,
            **pipeline,
        )

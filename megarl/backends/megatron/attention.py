"""Attention inside packed sequences, and the rotary angles of their tokens, where TransformerEngine is not used.

Axes: T tokens, H query heads and G key/value heads of this rank, D head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.distributed import ProcessGroup

from megarl.backends.megatron.order import Grid, Order


@dataclass
class Packed(PackedSeqParams):
    """A pack as our modules see it. Megatron's own fields but ``qkv_format`` stay empty: see ``PackedRotary``."""

    order: Order = field(default_factory=lambda: Order(gather=None, grids=()))
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # int64[T], of each token in its sequence


class PackedRotary(torch.nn.Module):
    """Rotary angles [T, 1, D] of the tokens of a pack, in place of Megatron's table of angles by position; [N, T, 1, D]
    where layers choose among N tables.

    With a table and sequence bounds Megatron rotates one sequence after the other and writes each into a shared tensor
    (rope_utils.py, ``_apply_rotary_pos_emb_thd``), whose gradient costs sequences times tokens; without bounds it
    rotates all tokens at once.
    """

    def __init__(self, *tables: RotaryEmbedding) -> None:
        super().__init__()
        # no buffer: a bfloat16 model would round it
        self.inv_freq = torch.stack([t.inv_freq / (t.seq_len_interpolation_factor or 1.0) for t in tables])

    def get_rotary_seq_len(
        self, context: object, block: object, hidden: object, config: object, pack: Packed
    ) -> Packed:
        return pack

    def forward(self, pack: Packed, packed_seq: bool = True, cp_group: object = None) -> torch.Tensor:
        self.inv_freq = self.inv_freq.to(pack.positions.device)
        angles = pack.positions[:, None] * self.inv_freq[:, None]  # [N, T, D / 2]
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]
        return angles[0] if len(angles) == 1 else angles


Window = Callable[[Any, int], int | None]  # configuration, layer number from 1 -> tokens that a query sees; None: all


class PackedAttention(MegatronModule):
    """Causal attention inside each packed sequence, query groups and context parallelism included; where a family has
    them, with a window and with scores that are capped.

    Context parallelism gathers keys and values of all ranks (their gradients are reduce-scattered), each rank
    attending with the queries it holds: chunks r and 2 cp - 1 - r of every sequence, which balances the work.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        window: Window | None = None,
        cap: float | None = None,
        **unused: object,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout or config.apply_query_key_layer_scaling or (config.window_size and not window):
            raise ValueError(
                "attention without TransformerEngine knows no dropout or layer scaling, and no window but a family's: "
                f"attention_dropout={config.attention_dropout}, window_size={config.window_size}, "
                f"apply_query_key_layer_scaling={config.apply_query_key_layer_scaling}"
            )
        if pg_collection is None:
            raise ValueError("PackedAttention takes its process groups as an argument: pg_collection is None")
        self.scale = softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.cp_group = pg_collection.cp
        self.window = window(config, layer_number) if window else None
        self.cap = cap

    def forward(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [T, G, D]
        value: torch.Tensor,  # [T, G, D]
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """[T, H * D]"""
        if not isinstance(packed_seq_params, Packed):
            raise ValueError("PackedAttention takes packed sequences only, described by describe_for_ours")
        order = packed_seq_params.order
        if order.gather is not None:
            both = torch.stack((key, value), dim=1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=True, group=self.cp_group)
            key, value = both.index_select(0, order.gather).unbind(1)
        out = torch.zeros_like(query)
        for grid in order.grids:
            out = out.index_copy(0, grid.query_rows, self._attend(grid, query, key, value))
        return out.flatten(1)

    def _attend(self, grid: Grid, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        def cells(rows: torch.Tensor, taken: torch.Tensor, placed: torch.Tensor, length: int) -> torch.Tensor:
            flat = rows.new_zeros(grid.sequences * length, *rows.shape[1:])
            flat = flat.index_copy(0, placed, rows.index_select(0, taken))
            return flat.view(grid.sequences, length, *rows.shape[1:]).transpose(1, 2)

        q = cells(query, grid.query_rows, grid.query_cells, grid.query_length)
        k = cells(key, grid.key_rows, grid.key_cells, grid.key_length)
        v = cells(value, grid.key_rows, grid.key_cells, grid.key_length)
        if self.cap is None:
            mask = grid.visible(self.window)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
            )
        else:
            attended = _capped_attention(q, k, v, grid.mask(self.window), self.scale, self.cap)
        return attended.transpose(1, 2).flatten(0, 1).index_select(0, grid.query_cells)


def _capped_attention(
    q: torch.Tensor,  # [S, H, Lq, D]
    k: torch.Tensor,  # [S, G, Lk, D]
    v: torch.Tensor,  # [S, G, Lk, D]
    mask: torch.Tensor,  # bool, broadcasts to [S, H, Lq, Lk]
    scale: float,
    cap: float,
) -> torch.Tensor:
    """[S, H, Lq, D]; scores s become cap * tanh(s / cap). All of them exist at once: torch has no fused form of it."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    scores = cap * torch.tanh(q @ k.transpose(2, 3) * scale / cap)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def describe_for_te(cu_seqlens: np.ndarray, positions: torch.Tensor, cp: ProcessGroup) -> PackedSeqParams:
    bounds = torch.tensor(cu_seqlens, dtype=torch.int32, device=positions.device)
    # the true maximum: a table of exactly as many angles as the pack has tokens would be taken for angles by place in
    # the pack (rope_utils.py, _apply_rotary_pos_emb_thd)
    longest = int(np.diff(cu_seqlens).max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def describe_for_ours(cu_seqlens: np.ndarray, positions: torch.Tensor, cp: ProcessGroup) -> PackedSeqParams:
    order = Order.of(cu_seqlens, cp.size(), cp.rank(), positions.device)
    return Packed(qkv_format="thd", order=order, positions=positions)

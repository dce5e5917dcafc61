"""vLLM's layout: which rows and columns of which tensor an engine rank holds.

For plans without an engine. What vLLM itself does is recorded from its own loaders where one runs (``vllm/record``);
tests hold this description against the recording.
"""

from collections.abc import Sequence

from megarl.backends.shards.families import Kind, parts
from megarl.backends.shards.layout import Layout, Run, Shard, Split
from megarl.planning.models import Shape

PADDING = 64  # rows: vLLM's DEFAULT_VOCAB_PADDING_SIZE


def engine_layout(shape: Shape, tp: int, replicas: int, itemsize: int) -> Layout:
    """All ranks of an agent's engine, replica after replica. Raises ValueError for a size that does not divide."""
    check_divides(shape, tp)
    every = parts(shape, itemsize)
    ranks: list[tuple[tuple[Shard, ...], dict[str, tuple[int, ...]]]] = []
    for rank in range(tp):
        shards: list[Shard] = []
        params: dict[str, tuple[int, ...]] = {}
        for part in every:
            assert part.engine is not None
            how = split(shape, part.kind, part.tensor.shape, part.expert, tp, rank)
            params[part.engine] = how.param_shape(part.tensor.shape)
            shards += how.shards(part.tensor, part.engine)
        ranks.append((tuple(shards), params))
    ranks = ranks * replicas
    return Layout(
        {part.tensor.name: part.tensor for part in every}, tuple(s for s, _ in ranks), tuple(p for _, p in ranks)
    )


def check_divides(shape: Shape, tp: int) -> None:
    """Raise ValueError, naming the key, for an engine that vLLM could not build of this model."""
    padded = -(-shape.vocab // PADDING) * PADDING
    wide = shape.expert_ffn if shape.experts else shape.ffn
    for name, size in (("attention heads", shape.heads), ("rows of the MLP", wide), ("padded vocabulary rows", padded)):
        if size % tp:
            raise ValueError(f"engine.tp={tp} does not divide the {size} {name} of {shape.name}")
    if shape.kv_heads % tp and tp % shape.kv_heads:
        raise ValueError(
            f"engine.tp={tp} and the {shape.kv_heads} key/value heads of {shape.name}: one must divide the other"
        )


def split(shape: Shape, kind: Kind, dims: Sequence[int], expert: int, tp: int, rank: int) -> Split:
    """How an engine rank holds a tensor of that kind."""
    match kind:
        case "q" | "k" | "v":
            return _qkv(shape, kind, tp, rank)
        case "gate" | "up":
            each = dims[0] // tp
            return Split((Run(rank * each, (rank + 1) * each, each if kind == "up" else 0),), axis=0, size=2 * each)
        case "row":
            each = dims[1] // tp
            return Split((Run(rank * each, (rank + 1) * each, 0),), axis=1, size=each)
        case "vocabulary":
            each = -(-dims[0] // PADDING) * PADDING // tp
            start, stop = rank * each, min((rank + 1) * each, dims[0])
            return Split((Run(start, stop, 0),) if start < stop else (), axis=0, size=each)
        case "replicated":
            return Split((Run(0, dims[0], 0),), axis=0, size=dims[0])
        case "expert_gate" | "expert_up":  # one stack of matrices for all experts
            each = dims[0] // tp
            run = Run(rank * each, (rank + 1) * each, each if kind == "expert_up" else 0)
            return Split((run,), axis=0, size=2 * each, index=expert, count=shape.experts)
        case "expert_row":
            each = dims[1] // tp
            return Split((Run(rank * each, (rank + 1) * each, 0),), 1, each, index=expert, count=shape.experts)


def _qkv(shape: Shape, kind: str, tp: int, rank: int) -> Split:
    """Rows of qkv_proj: this rank's queries, then its keys, then its values; few key/value heads are repeated."""
    queries = shape.heads // tp * shape.head_dim
    if shape.kv_heads >= tp:
        each, first = shape.kv_heads // tp * shape.head_dim, rank
    else:
        each, first = shape.head_dim, rank // (tp // shape.kv_heads)
    size = queries + 2 * each
    if kind == "q":
        return Split((Run(rank * queries, (rank + 1) * queries, 0),), axis=0, size=size)
    return Split((Run(first * each, (first + 1) * each, queries + (each if kind == "v" else 0)),), axis=0, size=size)

"""Megatron's layout: which rows and columns of which tensor a training rank holds."""

from collections.abc import Sequence

from megarl.backends.shards.families import Kind, Part, parts
from megarl.backends.shards.layout import Layout, Run, Shard, Split
from megarl.planning import memory
from megarl.planning.models import Shape


def training_layout(shape: Shape, layout: memory.Layout, itemsize: int) -> Layout:
    """All ranks of a policy. Ranks count tp, then cp, then dp, then pp (Megatron's order tp-cp-ep-dp-pp).

    Experts are spread over ``layout.ep`` of the tp-cp-dp ranks of a stage, and each expert over tp of them. Raises
    ValueError for a size that does not divide.
    """
    check_divides(shape, layout)
    every = parts(shape, itemsize, stages=layout.pp)
    stages = stage_slices(shape.layers, layout.pp)
    shards: list[tuple[Shard, ...]] = []
    params: list[dict[str, tuple[int, ...]]] = []
    per_stage = layout.tp * layout.cp * layout.dp
    made: dict[tuple[int, int, int], tuple[tuple[Shard, ...], dict[str, tuple[int, ...]]]] = {}
    for rank in range(layout.world):
        stage, within = divmod(rank, per_stage)
        place = (stage, within % layout.tp, within // layout.tp % layout.ep)
        if place not in made:  # data-parallel ranks hold the same
            here = [part for part in every if _is_here(part, stage, layout.pp, stages[stage])]
            made[place] = _rank(shape, here, layout, stages[stage].start, *place[1:])
        shards.append(made[place][0])
        params.append(made[place][1])
    return Layout({part.tensor.name: part.tensor for part in every}, tuple(shards), tuple(params))


def check_divides(shape: Shape, layout: memory.Layout) -> None:
    """Raise ValueError, naming the key, for a layout that Megatron could not build of this model."""
    tp, kv = layout.tp, shape.kv_heads
    wide = shape.expert_ffn if shape.experts else shape.ffn
    for name, size in (("attention heads", shape.heads), ("rows of the MLP", wide)):
        if size % tp:
            raise ValueError(f"layout.tp={tp} does not divide the {size} {name} of {shape.name}")
    if kv % tp and tp % kv:
        raise ValueError(f"layout.tp={tp} and the {kv} key/value heads of {shape.name}: one must divide the other")
    if shape.layers < layout.pp:
        raise ValueError(f"layout.pp={layout.pp} stages, but {shape.name} has {shape.layers} layers")
    if layout.ep == 1:
        return
    if (layout.cp * layout.dp) % layout.ep or shape.experts % layout.ep or not shape.experts:
        raise ValueError(
            f"layout.ep={layout.ep} must divide the {shape.experts} experts of {shape.name} and cp * dp = "
            f"{layout.cp * layout.dp}"
        )


def stage_slices(layers: int, pp: int) -> list[range]:
    """Layers of each pipeline stage as the Megatron backend cuts them: equal, else one more in the first ones."""
    least, more = divmod(layers, pp)
    ends = [stage * least + min(stage, more) for stage in range(pp + 1)]
    return [range(ends[stage], ends[stage + 1]) for stage in range(pp)]


def _is_here(part: Part, stage: int, pp: int, layers: range) -> bool:
    if isinstance(part.place, int):
        return part.place in layers
    return stage == (0 if part.place == "first" else pp - 1)


def _rank(
    shape: Shape, here: Sequence[Part], layout: memory.Layout, first_layer: int, tp_rank: int, ep_rank: int
) -> tuple[tuple[Shard, ...], dict[str, tuple[int, ...]]]:
    shards: list[Shard] = []
    params: dict[str, tuple[int, ...]] = {}
    local_experts = shape.experts // layout.ep
    splits: dict[tuple[Kind, tuple[int, ...]], Split] = {}
    for part in here:
        owner, expert = divmod(part.expert, local_experts) if part.kind.startswith("expert") else (ep_rank, 0)
        if owner != ep_rank:
            continue
        key = (part.kind, part.tensor.shape)
        if key not in splits:
            splits[key] = split(shape, part.kind, part.tensor.shape, layout.tp, tp_rank)
        layer = part.place - first_layer if isinstance(part.place, int) else 0
        name = part.training.format(layer, e=expert)
        params[name] = splits[key].param_shape(part.tensor.shape)
        shards += splits[key].shards(part.tensor, name)
    return tuple(shards), params


def split(shape: Shape, kind: Kind, dims: Sequence[int], tp: int, rank: int) -> Split:
    """How a tensor-parallel rank holds a tensor of that kind."""
    match kind:
        case "q" | "k" | "v":
            return _query_groups(shape, kind, tp, rank)
        case "gate" | "up" | "expert_gate" | "expert_up":  # gate over up, each rank its part of both
            each = dims[0] // tp
            at = each if kind.endswith("up") else 0
            return Split((Run(rank * each, (rank + 1) * each, at),), axis=0, size=2 * each)
        case "row" | "expert_row":
            each = dims[1] // tp
            return Split((Run(rank * each, (rank + 1) * each, 0),), axis=1, size=each)
        case "vocabulary":  # padded to a multiple of tp; the last rows belong to no tensor
            each = -(-dims[0] // tp)
            start, stop = rank * each, min((rank + 1) * each, dims[0])
            return Split((Run(start, stop, 0),) if start < stop else (), axis=0, size=each)
        case "replicated":
            return Split((Run(0, dims[0], 0),), axis=0, size=dims[0])


def _query_groups(shape: Shape, kind: str, tp: int, rank: int) -> Split:
    """Rows of linear_qkv: per key/value head its queries, its key and its value; then cut evenly, wherever that falls.

    With more ranks than key/value heads a group is shared by several ranks (megatron-core 0.19, attention.py 1839).
    """
    head, queries = shape.head_dim, shape.heads // shape.kv_heads * shape.head_dim
    group = queries + 2 * head
    each = shape.qkv_rows // tp
    low, high = rank * each, (rank + 1) * each
    length, within = {"q": (queries, 0), "k": (head, queries), "v": (head, queries + head)}[kind]
    runs = []
    for index in range(shape.kv_heads):
        start = index * group + within  # of this run in the fused rows of all ranks
        a, b = max(start, low), min(start + length, high)
        if a < b:
            moved = index * length - start  # from a fused row to the tensor's
            runs.append(Run(a + moved, b + moved, a - low))
    return Split(tuple(runs), axis=0, size=each)

"""Layouts and plans against models small enough to own every element by name.

Every element of every tensor has its own number. What Megatron and vLLM would hold is built here by splitting and
joining whole arrays; what a plan does is done, copy by copy, on flat memories.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from megarl.backends.shards.boxes import covered, meet, sizes, subtract, volume, whole, without
from megarl.backends.shards.engine import engine_layout
from megarl.backends.shards.layout import Layout, View
from megarl.backends.shards.plan import Plan, lower_bound, make_plan
from megarl.backends.shards.schedule import rounds
from megarl.backends.shards.topology import Topology
from megarl.backends.shards.training import stage_slices, training_layout
from megarl.planning import memory
from megarl.planning.models import Shape

DENSE = Shape(
    name="tiny",
    architecture="LlamaForCausalLM",
    layers=3,
    hidden=6,
    heads=4,
    kv_heads=2,
    head_dim=2,
    ffn=8,
    vocab=10,
    tied=False,
)
SHAPES = {
    "llama": DENSE,
    "mistral": replace(DENSE, architecture="MistralForCausalLM", head_dim=4),
    "qwen2": replace(DENSE, architecture="Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": replace(DENSE, architecture="Qwen3ForCausalLM", qk_norm=True, tied=True, layers=4),
    "gemma2": replace(DENSE, architecture="Gemma2ForCausalLM", norms_per_layer=4, tied=True, vocab=70),
    "gemma3": replace(
        DENSE, architecture="Gemma3ForCausalLM", norms_per_layer=4, qk_norm=True, tied=True, kv_heads=1, layers=2
    ),
    "qwen3_moe": replace(
        DENSE, architecture="Qwen3MoeForCausalLM", qk_norm=True, layers=2, experts=4, experts_per_token=2, expert_ffn=4
    ),
}
L = memory.Layout
LAYOUTS = (L(), L(tp=2), L(tp=4), L(pp=2), L(tp=2, pp=2), L(dp=2), L(tp=2, cp=2, dp=2), L(tp=4, pp=2))
EXPERTS = (L(ep=2, dp=2), L(tp=2, dp=4, ep=4), L(tp=2, pp=2, cp=2, ep=2))
CASES = [(name, layout) for name in SHAPES for layout in LAYOUTS]
CASES += [("qwen3_moe", layout) for layout in EXPERTS]


def machine(gpus: int, network: float = 1.0) -> Topology:
    return Topology(
        name="test", gpus_per_node=gpus, memory_bytes_per_s=100.0, nvlink_bytes_per_s=10.0, network_bytes_per_s=network
    )


# ---------------------------------------------------------------- what the two sides hold, from whole arrays

Memory = dict[str, np.ndarray]
GAP = -1  # an element of no tensor


def numbered(shape: Shape) -> Memory:
    """Every tensor of the model under its Hugging Face name; no two elements are equal."""
    h, kv, hidden = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.hidden
    dims: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for i in range(shape.layers):
        here = f"model.layers.{i}."
        dims |= {here + f"self_attn.{x}_proj.weight": (n, hidden) for x, n in (("q", h), ("k", kv), ("v", kv))}
        if shape.qkv_bias:
            dims |= {here + f"self_attn.{x}_proj.bias": (n,) for x, n in (("q", h), ("k", kv), ("v", kv))}
        dims[here + "self_attn.o_proj.weight"] = (hidden, h)
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if shape.norms_per_layer == 4 else []
        dims |= {f"{here}{norm}.weight": (hidden,) for norm in norms}
        if shape.qk_norm:
            dims |= {here + f"self_attn.{x}_norm.weight": (shape.head_dim,) for x in "qk"}
        blocks = [f"experts.{e}." for e in range(shape.experts)] or [""]
        wide = shape.expert_ffn or shape.ffn
        for block in blocks:
            dims |= {f"{here}mlp.{block}{x}_proj.weight": (wide, hidden) for x in ("gate", "up")}
            dims[f"{here}mlp.{block}down_proj.weight"] = (hidden, wide)
        if shape.experts:
            dims[here + "mlp.gate.weight"] = (shape.experts, hidden)
    dims["model.norm.weight"] = (hidden,)
    if not shape.tied:
        dims["lm_head.weight"] = (shape.vocab, hidden)
    made, start = {}, 0
    for name, size in dims.items():
        made[name] = np.arange(start, start + np.prod(size)).reshape(size)
        start += made[name].size
    return made


def padded(rows: np.ndarray, multiple: int) -> np.ndarray:
    return np.pad(rows, ((0, -len(rows) % multiple), (0, 0)), constant_values=GAP)


def megatron(shape: Shape, hf: Memory, layout: memory.Layout) -> list[Memory]:
    """Per rank its parameters, as Megatron's documentation and Bridge's mappings describe them."""
    cut = lambda array, axis, part: np.split(array, layout.tp, axis)[part]  # noqa: E731
    ranks = []
    for pp, _, t in product(range(layout.pp), range(layout.cp * layout.dp), range(layout.tp)):
        data = len(ranks) // layout.tp % (layout.cp * layout.dp)
        held: Memory = {}
        if pp == 0:
            held["embedding.word_embeddings.weight"] = cut(padded(hf["model.embed_tokens.weight"], layout.tp), 0, t)
        each, more = divmod(shape.layers, layout.pp)
        first = pp * each + min(pp, more)
        for local in range(each + (pp < more)):
            own = {n.split(".", 3)[3]: a for n, a in hf.items() if n.startswith(f"model.layers.{first + local}.")}
            layer = megatron_layer(shape, own, cut, t, data % layout.ep, shape.experts // layout.ep)
            held |= {f"decoder.layers.{local}.{name}": array for name, array in layer.items()}
        if pp == layout.pp - 1:
            held["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
            head = hf["model.embed_tokens.weight"] if shape.tied else hf["lm_head.weight"]
            if not shape.tied or layout.pp > 1:
                held["output_layer.weight"] = cut(padded(head, layout.tp), 0, t)
        ranks.append({name: np.ascontiguousarray(array) for name, array in held.items()})
    return ranks


def megatron_layer(shape: Shape, own: Memory, cut, t: int, ep: int, experts: int) -> Memory:
    held: Memory = {}
    for what in ("weight", "bias") if shape.qkv_bias else ("weight",):
        q, k, v = (np.split(own[f"self_attn.{x}_proj.{what}"], shape.kv_heads) for x in "qkv")
        fused = np.concatenate([np.concatenate(group) for group in zip(q, k, v, strict=True)])
        held[f"self_attention.linear_qkv.{what}"] = cut(fused, 0, t)
    held["self_attention.linear_qkv.layer_norm_weight"] = own["input_layernorm.weight"]
    held["self_attention.linear_proj.weight"] = cut(own["self_attn.o_proj.weight"], 1, t)
    if shape.qk_norm:
        held |= {f"self_attention.{x}_layernorm.weight": own[f"self_attn.{x}_norm.weight"] for x in "qk"}
    before = "pre_mlp_layernorm.weight" if shape.experts else "mlp.linear_fc1.layer_norm_weight"
    if shape.norms_per_layer == 4:
        held["self_attention.linear_proj.post_layernorm.weight"] = own["post_attention_layernorm.weight"]
        held[before] = own["pre_feedforward_layernorm.weight"]
        held["mlp.linear_fc2.post_layernorm.weight"] = own["post_feedforward_layernorm.weight"]
    else:
        held[before] = own["post_attention_layernorm.weight"]
    if shape.experts:
        held["mlp.router.weight"] = own["mlp.gate.weight"]
    names = [(f"experts.{ep * experts + e}.", f"experts.linear_fc{{}}.weight{e}") for e in range(experts)]
    for block, name in names or [("", "linear_fc{}.weight")]:
        gate, up = (cut(own[f"mlp.{block}{x}_proj.weight"], 0, t) for x in ("gate", "up"))
        held[f"mlp.{name.format(1)}"] = np.concatenate([gate, up])
        held[f"mlp.{name.format(2)}"] = cut(own[f"mlp.{block}down_proj.weight"], 1, t)
    return held


def vllm(shape: Shape, hf: Memory, tp: int, replicas: int) -> list[Memory]:
    ranks = []
    for t in range(tp):
        held = {"model.norm.weight": hf["model.norm.weight"]}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            if name in hf:
                held[name] = np.split(padded(hf[name], 64), tp)[t]
        for i in range(shape.layers):
            here = f"model.layers.{i}."
            own = {n.removeprefix(here): a for n, a in hf.items() if n.startswith(here)}
            held |= {here + name: array for name, array in vllm_layer(shape, own, tp, t).items()}
        ranks.append(held)
    return ranks * replicas


def vllm_layer(shape: Shape, own: Memory, tp: int, t: int) -> Memory:
    held = {name: array for name, array in own.items() if "norm" in name or name == "mlp.gate.weight"}
    for what in ("weight", "bias") if shape.qkv_bias else ("weight",):
        q, k, v = (own[f"self_attn.{x}_proj.{what}"] for x in "qkv")
        repeat = max(1, tp // shape.kv_heads)
        k, v = (np.concatenate([h for h in np.split(x, shape.kv_heads) for _ in range(repeat)]) for x in (k, v))
        held[f"self_attn.qkv_proj.{what}"] = np.concatenate([np.split(x, tp)[t] for x in (q, k, v)])
    held["self_attn.o_proj.weight"] = np.split(own["self_attn.o_proj.weight"], tp, 1)[t]
    blocks = [f"mlp.experts.{e}." for e in range(shape.experts)] or ["mlp."]
    wide = [
        np.concatenate([np.split(own[f"{block}{x}_proj.weight"], tp)[t] for x in ("gate", "up")]) for block in blocks
    ]
    down = [np.split(own[f"{block}down_proj.weight"], tp, 1)[t] for block in blocks]
    if shape.experts:
        stacks = {"w13_weight": np.stack(wide), "w2_weight": np.stack(down)}
        return held | {f"mlp.experts.routed_experts.{name}": stack for name, stack in stacks.items()}
    return held | {"mlp.gate_up_proj.weight": wide[0], "mlp.down_proj.weight": down[0]}


# ---------------------------------------------------------------- flat memories


def region(memory_: Memory, view: View, shape: tuple[int, ...]) -> np.ndarray:
    assert memory_[view.param].flags.c_contiguous
    flat = memory_[view.param].reshape(-1)
    strides = tuple(stride * flat.itemsize for stride in view.strides)
    return np.lib.stride_tricks.as_strided(flat[view.offset :], shape, strides)


def filled(layout: Layout, hf: Memory) -> list[Memory]:
    """What a layout says that each rank holds."""
    made = []
    for shards, params in zip(layout.shards, layout.params, strict=True):
        held = {name: np.full(shape, GAP) for name, shape in params.items()}
        for shard in shards:
            box = tuple(slice(*edge) for edge in shard.box)
            region(held, shard.view(shard.box), sizes(shard.box))[...] = hf[shard.tensor][box]
        made.append(held)
    return made


def same(one: list[Memory], other: list[Memory]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def carried_out(plan: Plan, training: list[Memory]) -> tuple[list[Memory], int]:
    """The engine's memories after every copy, and the elements that went over a wire."""
    engine = [{name: np.full(shape, GAP) for name, shape in params.items()} for params in plan.engine.params]
    wire = 0
    for copy in sorted(plan.copies, key=lambda c: c.forwarded):
        source = engine if copy.forwarded else training
        read = region(source[copy.source], copy.read, sizes(copy.box))
        write = region(engine[copy.destination], copy.write, sizes(copy.box))
        assert (write == GAP).all(), "written twice"
        write[...] = read
        wire += read.size if copy.source != copy.destination else 0
    return engine, wire


def owned(memories: list[Memory], ranks: range) -> set[int]:
    return {int(x) for rank in ranks if rank < len(memories) for a in memories[rank].values() for x in a.flat} - {GAP}


# ---------------------------------------------------------------- boxes


def test_boxes_are_sets_of_points():
    """Every pair of boxes in a 4 x 3 grid, and many coverings, against sets of points."""
    intervals = lambda n: [(a, b) for a in range(n) for b in range(a + 1, n + 1)]  # noqa: E731
    points = lambda box: set(product(*(range(*edge) for edge in box)))  # noqa: E731
    boxes = list(product(intervals(4), intervals(3)))
    for one, other in product(boxes, boxes):
        common = meet(one, other)
        assert (points(common) if common else set()) == points(one) & points(other)
        left = subtract(one, other)
        assert sum(map(volume, left)) == len(points(one) - points(other))
        assert set().union(*map(points, left)) == points(one) - points(other)
    random = np.random.default_rng(0)
    for _ in range(500):
        one, *others = (boxes[i] for i in random.integers(len(boxes), size=5))
        union = set().union(*map(points, others))
        assert covered(one, frozenset(others)) == len(points(one) & union)
        assert set().union(*map(points, without(one, others))) == points(one) - union


# ---------------------------------------------------------------- layouts


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_training_layout_is_megatrons(name, layout):
    shape, hf = SHAPES[name], numbered(SHAPES[name])
    described = training_layout(shape, layout, 2)
    described.check()
    assert {n: t.shape for n, t in described.tensors.items()} == {n: a.shape for n, a in hf.items()}
    assert described.nbytes == 2 * shape.parameters
    assert same(filled(described, hf), megatron(shape, hf, layout))


@pytest.mark.parametrize("tp", (1, 2, 4))
@pytest.mark.parametrize("name", SHAPES)
def test_engine_layout_is_vllms(name, tp):
    shape, hf = SHAPES[name], numbered(SHAPES[name])
    described = engine_layout(shape, tp, 2, 2)
    described.check()
    assert same(filled(described, hf), vllm(shape, hf, tp, 2))


def test_wrong_layouts_are_told_apart():
    """What the comparison above would say of a wrong description: groups not interleaved, gate and up swapped."""
    shape, hf = SHAPES["llama"], numbered(SHAPES["llama"])
    right = training_layout(shape, L(tp=2), 2)
    for param, move in (
        ("decoder.layers.0.self_attention.linear_qkv.weight", 6),
        ("decoder.layers.0.mlp.linear_fc1.weight", 6),
    ):
        shards = tuple(
            tuple(replace(s, offset=(s.offset + 6) % 24) if s.param == param else s for s in rank)
            for rank in right.shards
        )
        wrong = Layout(right.tensors, shards, right.params)
        assert not same(filled(wrong, hf), megatron(shape, hf, L(tp=2)))


def test_layers_of_uneven_stages():
    """case-D7."""
    assert [list(s) for s in stage_slices(7, 2)] == [[0, 1, 2, 3], [4, 5, 6]]
    for layers, pp in product(range(1, 20), range(1, 6)):
        if layers >= pp:
            slices = stage_slices(layers, pp)
            assert [layer for s in slices for layer in s] == list(range(layers)) and all(slices)


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"layout": L(tp=3)}, "layout.tp=3 does not divide the 4 attention heads"),
        ({"layout": L(pp=4)}, "layout.pp=4 stages, but tiny has 3 layers"),
        ({"layout": L(dp=2, ep=2)}, "layout.ep=2 must divide the 0 experts"),
        ({"tp": 3}, "engine.tp=3 does not divide the 4 attention heads"),
        ({"shape": replace(DENSE, kv_heads=3, heads=6, head_dim=2, ffn=12), "layout": L(tp=2)}, "one must divide"),
        ({"shape": replace(DENSE, architecture="MixtralForCausalLM")}, "MixtralForCausalLM is not one of Llama"),
        ({"shape": replace(DENSE, qkv_bias=True)}, "biases of attention are known of Qwen2ForCausalLM alone"),
    ),
    ids=str,
)
def test_what_cannot_be_laid_out_is_refused(change, message):
    shape = change.get("shape", DENSE)
    with pytest.raises(ValueError, match=message):
        training_layout(shape, change.get("layout", L()), 2)
        engine_layout(shape, change.get("tp", 1), 1, 2)


# ---------------------------------------------------------------- plans

PAIRS = [(n, layout, tp, gpus) for n, layout in CASES for tp in (1, 2, 4) for gpus in (1, 2, 8)]


def planned(name: str, layout: memory.Layout, tp: int, gpus: int, network: float = 1.0) -> Plan:
    replicas = max(1, layout.world // tp)
    training, engine = training_layout(SHAPES[name], layout, 2), engine_layout(SHAPES[name], tp, replicas, 2)
    return make_plan(training, engine, machine(gpus, network))


@pytest.mark.parametrize("name", SHAPES)
def test_a_plan_carried_out_is_what_vllm_loads_and_moves_no_byte_too_many(name):
    """Every pair of layouts: the engine is right to the element, and the wire carries the lower bound."""
    shape, hf, seen = SHAPES[name], numbered(SHAPES[name]), 0
    for _, layout, tp, gpus in (pair for pair in PAIRS if pair[0] == name):
        plan = planned(name, layout, tp, gpus)
        plan.check()
        training = megatron(shape, hf, layout)
        engine, wire = carried_out(plan, training)
        wanted = vllm(shape, hf, tp, max(1, layout.world // tp))
        assert same(engine, wanted), (layout, tp, gpus)
        lacking = [len(owned(wanted, range(r, r + 1)) - owned(training, range(r, r + 1))) for r in range(len(wanted))]
        assert [lower_bound(plan.training, plan.engine, r) for r in range(len(wanted))] == [2 * n for n in lacking]
        assert plan.wire_bytes == plan.lower_bound_bytes == 2 * wire == 2 * sum(lacking)
        nodes = [range(n, n + gpus) for n in range(0, plan.world, gpus)]
        across = sum(len(owned(wanted, node) - owned(training, node)) for node in nodes)
        assert sum(plan.received("network")) == 2 * across, "what a node needs comes to it once"
        assert [sum(plan.sent(t)) for t in ("nvlink", "network")] == [
            sum(plan.received(t)) for t in ("nvlink", "network")
        ]
        seen += wire > 0
    assert seen > 20


@pytest.mark.parametrize("bucket_bytes", (1, 40, 200, 10_000))
@pytest.mark.parametrize(
    ("name", "layout", "tp", "gpus"),
    (("llama", L(tp=2, pp=2), 1, 2), ("qwen2", L(tp=4), 2, 2), ("qwen3_moe", L(tp=2, dp=4, ep=4), 4, 4)),
    ids=str,
)
def test_rounds_do_what_the_plan_says_in_bounded_buckets(name, layout, tp, gpus, bucket_bytes):
    """Every piece that is passed on has arrived in its own round; no piece is larger than a bucket but a row."""
    plan = planned(name, layout, tp, gpus)
    hf = numbered(SHAPES[name])
    cut = rounds(plan, bucket_bytes)
    row = 2 * max(t.shape[-1] for t in plan.engine.tensors.values())
    assert max(r.largest() for r in cut) <= max(bucket_bytes, row * plan.world * len(SHAPES))
    assert all(c.nbytes <= max(bucket_bytes, row) for r in cut for c in r.copies)
    for one in cut:
        arrived = {(c.destination, c.tensor, c.box) for c in one.first}
        for copy in one.passed_on:
            assert any(r == copy.source and t == copy.tensor and meet(b, copy.box) == copy.box for r, t, b in arrived)
    whole_plan = replace(plan, copies=tuple(copy for r in cut for copy in r.copies))
    whole_plan.check()
    assert whole_plan.wire_bytes == plan.wire_bytes
    engine, _ = carried_out(whole_plan, megatron(SHAPES[name], hf, layout))
    assert same(engine, vllm(SHAPES[name], hf, tp, max(1, layout.world // tp)))
    assert (len(cut) == 1) == (bucket_bytes == 10_000)


def test_nothing_is_forwarded_where_the_network_is_as_fast():
    plain = planned("llama", L(tp=2, pp=2), 1, 2, network=10.0)
    spared = planned("llama", L(tp=2, pp=2), 1, 2)
    plain.check()
    assert not any(copy.forwarded for copy in plain.copies) and any(copy.forwarded for copy in spared.copies)
    assert plain.wire_bytes == spared.wire_bytes
    assert sum(plain.received("network")) > sum(spared.received("network"))


def test_equal_layouts_move_nothing_but_for_padding():
    """Megatron pads 10 rows to 10, vLLM to 64: rank 0 holds all of them there."""
    plan = planned("qwen2", L(tp=2), 2, 8)
    moved = {copy.tensor for copy in plan.copies if copy.tier != "local"}
    assert moved == {"model.embed_tokens.weight", "lm_head.weight"}
    wide = replace(SHAPES["qwen2"], vocab=128)
    assert make_plan(training_layout(wide, L(tp=2), 2), engine_layout(wide, 2, 1, 2), machine(8)).wire_bytes == 0


def test_a_plan_is_the_same_whoever_makes_it():
    one, other = (planned("qwen3_moe", L(tp=2, dp=4, ep=4), 2, 4) for _ in range(2))
    assert one.key() == other.key() != planned("qwen3_moe", L(tp=2, dp=4, ep=4), 2, 2).key()


def test_replicas_share_the_sending():
    """Four data-parallel ranks hold everything, four engine ranks beside them nothing."""
    training, engine = training_layout(DENSE, L(dp=4), 2), engine_layout(DENSE, 1, 8, 2)
    plan = make_plan(training, engine, machine(8))
    assert max(plan.sent("nvlink")) < 1.2 * min(plan.sent("nvlink")[:4])
    assert plan.sent("nvlink")[4:] == [0] * 4


def break_plan(plan: Plan, how: str) -> Plan:
    copies = list(plan.copies)
    index = next(i for i, c in enumerate(copies) if c.tensor.endswith("layers.1.self_attn.k_proj.weight"))
    copy = copies[index]
    if how == "dropped":
        del copies[index]
    elif how == "doubled":
        copies.append(copy)
    elif how == "read elsewhere":
        copies[index] = replace(copy, read=replace(copy.read, offset=copy.read.offset + 6))
    elif how == "written elsewhere":
        copies[index] = replace(copy, write=replace(copy.write, offset=copy.write.offset + 6))
    elif how == "from another rank":
        copies[index] = replace(copy, source=3 - copy.source)
    return replace(plan, copies=tuple(copies))


@pytest.mark.parametrize("how", ("dropped", "doubled", "read elsewhere", "written elsewhere", "from another rank"))
def test_a_broken_plan_is_caught_and_named(how):
    plan = planned("llama", L(tp=2, pp=2), 2, 2)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        break_plan(plan, how).check()


def test_a_tensor_that_nobody_holds_is_named():
    training, engine = training_layout(DENSE, L(pp=2), 2), engine_layout(DENSE, 1, 1, 2)
    shards = (training.shards[0], tuple(s for s in training.shards[1] if s.tensor != "model.norm.weight"))
    with pytest.raises(ValueError, match=r"model\.norm\.weight: no training rank holds \(\(0, 6\),\)"):
        make_plan(Layout(training.tensors, shards, training.params), engine, machine(8))
    other = engine_layout(replace(DENSE, vocab=11), 1, 1, 2)
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight: the engine has"):
        make_plan(training, other, machine(8))


def test_seconds_by_hand():
    """One matrix pair of ranks: rank 1's engine takes the lower half of the layers from rank 0."""
    plan = planned("llama", L(pp=2), 1, 2)
    (a, b), (c, d), (e, f) = plan.received("local"), plan.received("nvlink"), plan.sent("nvlink")
    assert (c, d) == (f, e) and a + c == b + d == 2 * DENSE.parameters
    assert plan.seconds() == pytest.approx(max(2 * (n + c + d) / 100 + max(c, d) / 10 for n in (a, b)))
    assert volume(whole((3, 4))) == 12

"""The tensors of a model family, and the parameter that holds each in Megatron and in vLLM.

Names are those of Megatron-Bridge 0.6.2 with grouped experts and of vLLM 0.32; tests hold both against the real
models. ``{}`` in a name stands for the layer, ``{e}`` for the expert.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from megarl.backends.shards.layout import Tensor
from megarl.planning.models import Shape

Kind = Literal["q", "k", "v", "gate", "up", "row", "replicated", "vocabulary", "expert_gate", "expert_up", "expert_row"]
FAMILIES = (
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    *("MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
)
_LAYER, _DECODER = "model.layers.{}.", "decoder.layers.{}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor and where either side keeps it. ``engine`` None: the engine has it under another part already."""

    tensor: Tensor
    kind: Kind
    place: int | Literal["first", "last"]  # layer, or the first or last pipeline stage
    training: str  # parameter's name; {}: layer within the stage, {e}: expert within the rank
    engine: str | None
    expert: int = 0


def parts(shape: Shape, itemsize: int, *, stages: int = 1) -> list[Part]:
    """Every tensor of the model; an embedding tied to the head is held twice where there are several stages.

    Raises ValueError for a family whose names are not known here.
    """
    if shape.architecture not in FAMILIES:
        raise ValueError(f"model {shape.name}: architecture {shape.architecture} is not one of {', '.join(FAMILIES)}")
    if shape.qkv_bias and shape.architecture != "Qwen2ForCausalLM":
        raise ValueError(f"model {shape.name}: biases of attention are known of Qwen2ForCausalLM alone")
    table = (shape.vocab, shape.hidden)

    def rows(name: str, place: Literal["first", "last"], training: str, engine: str | None) -> Part:
        tensor = Tensor(name=name, shape=table, itemsize=itemsize)
        return Part(tensor=tensor, kind="vocabulary", place=place, training=training, engine=engine)

    embedding = "model.embed_tokens.weight"
    found = [rows(embedding, "first", "embedding.word_embeddings.weight", embedding)]
    for layer in range(shape.layers):
        found += _layer(shape, itemsize, layer)
    norm = Tensor(name="model.norm.weight", shape=(shape.hidden,), itemsize=itemsize)
    found.append(
        Part(tensor=norm, kind="replicated", place="last", training="decoder.final_layernorm.weight", engine=norm.name)
    )
    if not shape.tied:
        found.append(rows("lm_head.weight", "last", "output_layer.weight", "lm_head.weight"))
    elif stages > 1:
        found.append(rows(embedding, "last", "output_layer.weight", None))
    return found


def _layer(shape: Shape, itemsize: int, layer: int) -> Iterator[Part]:
    here = _LAYER.format(layer)

    def part(name: str, dims: tuple[int, ...], kind: Kind, training: str, engine: str, expert: int = 0) -> Part:
        return Part(
            tensor=Tensor(name=here + name, shape=dims, itemsize=itemsize),
            kind=kind,
            place=layer,
            training=_DECODER + training,
            engine=here + engine,
            expert=expert,
        )

    projections: tuple[tuple[Kind, int], ...] = (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads))
    for letter, heads in projections:
        size, name = heads * shape.head_dim, f"self_attn.{letter}_proj"
        dims = (size, shape.hidden)
        yield part(f"{name}.weight", dims, letter, "self_attention.linear_qkv.weight", "self_attn.qkv_proj.weight")
        if shape.qkv_bias:
            yield part(f"{name}.bias", (size,), letter, "self_attention.linear_qkv.bias", "self_attn.qkv_proj.bias")
    output = "self_attn.o_proj.weight"
    dims = (shape.hidden, shape.heads * shape.head_dim)
    yield part(output, dims, "row", "self_attention.linear_proj.weight", output)
    for name, training, size in _norms(shape):
        yield part(name, (size,), "replicated", training, name)
    if shape.experts:
        router = "mlp.gate.weight"
        yield part(router, (shape.experts, shape.hidden), "replicated", "mlp.router.weight", router)
        for expert in range(shape.experts):
            yield from _expert(shape, part, expert)
        return
    halves: tuple[Kind, ...] = ("gate", "up")
    for half in halves:
        dims = (shape.ffn, shape.hidden)
        yield part(f"mlp.{half}_proj.weight", dims, half, "mlp.linear_fc1.weight", "mlp.gate_up_proj.weight")
    down = "mlp.down_proj.weight"
    yield part(down, (shape.hidden, shape.ffn), "row", "mlp.linear_fc2.weight", down)


def _expert(shape: Shape, part: Callable[..., Part], expert: int) -> Iterator[Part]:
    name, wide, tall = f"mlp.experts.{expert}.", (shape.expert_ffn, shape.hidden), (shape.hidden, shape.expert_ffn)
    fused, down = "mlp.experts.linear_fc1.weight{e}", "mlp.experts.linear_fc2.weight{e}"
    stack = "mlp.experts.routed_experts."
    yield part(f"{name}gate_proj.weight", wide, "expert_gate", fused, f"{stack}w13_weight", expert)
    yield part(f"{name}up_proj.weight", wide, "expert_up", fused, f"{stack}w13_weight", expert)
    yield part(f"{name}down_proj.weight", tall, "expert_row", down, f"{stack}w2_weight", expert)


def _norms(shape: Shape) -> Iterator[tuple[str, str, int]]:
    """(name, Megatron's name, size) of a layer's norms."""
    before_mlp = "pre_mlp_layernorm.weight" if shape.experts else "mlp.linear_fc1.layer_norm_weight"
    yield "input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", shape.hidden
    if shape.norms_per_layer == 4:
        yield "post_attention_layernorm.weight", "self_attention.linear_proj.post_layernorm.weight", shape.hidden
        yield "pre_feedforward_layernorm.weight", before_mlp, shape.hidden
        yield "post_feedforward_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight", shape.hidden
    else:
        yield "post_attention_layernorm.weight", before_mlp, shape.hidden
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", "self_attention.q_layernorm.weight", shape.head_dim
        yield "self_attn.k_norm.weight", "self_attention.k_layernorm.weight", shape.head_dim

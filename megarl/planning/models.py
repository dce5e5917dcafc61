"""The shape of a language model, read from its Hugging Face config.json: parameters, and floating-point work per token.

Every matrix is counted; only the gated MLP, grouped-query attention and mixtures of experts of the Llama, Qwen, Gemma,
Mistral and Mixtral families are known. ``configs/model/`` holds the shapes of common models, so that a plan needs no
network.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from megarl.config import CONFIG_DIR

# parts that the name of a fine-tune adds to that of the model whose shape it has
_TUNES = ("instruct", "chat", "base", "it", "pt", "hf", "math", "coder", "thinking", "2507")
_GATED = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "mistral", "mixtral")
_TRAINABLE = (  # what the Megatron backend builds today
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"),
    *("MistralForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one model; ``experts`` 0: dense."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of a dense layer
    vocab: int
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    norms_per_layer: int = 2
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0

    @property
    def trainable(self) -> bool:
        """Does `megarl train` build this architecture? The others can be planned only."""
        return self.architecture in _TRAINABLE

    @property
    def qkv_rows(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def attention(self) -> int:
        """Parameters of one layer's projections, biases included."""
        bias = self.qkv_rows if self.qkv_bias else 0
        return self.hidden * (self.qkv_rows + self.heads * self.head_dim) + bias

    @property
    def norms(self) -> int:
        """Parameters of one layer's norms: replicated over tensor-parallel ranks."""
        return self.norms_per_layer * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def mlp(self) -> int:
        """Parameters of one layer's dense MLP, or of its router: what is no expert."""
        return self.hidden * self.experts if self.experts else 3 * self.hidden * self.ffn

    @property
    def expert(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.expert_ffn

    @property
    def table(self) -> int:
        """Parameters of the embedding; of the head as well, where it is its own."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        layer = self.attention + self.norms + self.mlp + self.experts * self.expert
        return self.layers * layer + self.hidden + self.table * (1 if self.tied else 2)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets, embedding row and head included once each."""
        layer = self.attention + self.norms + self.mlp + self.experts_per_token * self.expert
        return self.layers * layer + 2 * self.hidden + self.table

    @property
    def largest_tensor(self) -> int:
        """Elements of the largest Hugging Face tensor: what a gather during the reshard holds whole."""
        return max(self.table, self.hidden * max(self.ffn, self.expert_ffn), self.hidden * self.heads * self.head_dim)

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Key/value cache of one token over all layers and heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def forward_flops(self, tokens: float, context: float) -> float:
        """Multiply-adds times two of a forward pass over ``tokens``, each attending to ``context`` tokens on average.

        The head is counted for every token, as it is computed for every token.
        """
        matrices = self.layers * (self.attention + self.mlp + self.experts_per_token * self.expert) + self.table
        attention = 4 * self.layers * self.heads * self.head_dim * context
        return tokens * (2 * matrices + attention)

    def experts_hit(self, tokens: float) -> float:
        """Experts of a layer that a batch of ``tokens`` reads, were the router even: E (1 - (1 - k/E)^tokens)."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)


def read_shape(model: str) -> Shape:
    """Shape of a model directory, a shipped shape, or a model in the Hugging Face cache.

    Raises ValueError where there is none, or for an architecture whose matrices are not known here.
    """
    found = _find(model)
    try:
        return shape_of(model, json.loads(found.read_text(encoding="utf-8")))
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"model {model}: {found} does not describe a language model ({error!r})") from error


def shipped() -> dict[str, Path]:
    """Name -> file of the shapes in configs/model."""
    return {file.stem: file for file in sorted((CONFIG_DIR / "model").glob("*.json"))}


def _find(model: str) -> Path:
    local = Path(model) / "config.json"
    if local.is_file():
        return local
    known = shipped()
    full = model.rsplit("/", 1)[-1].lower()
    for name in (full, "-".join(part for part in full.split("-") if part not in _TUNES)):
        if name in known:
            return known[name]
    cached = try_to_load_from_cache(model, "config.json") if model.count("/") == 1 else None
    if isinstance(cached, str):
        return Path(cached)
    raise ValueError(
        f"model {model}: no directory with a config.json, not in the Hugging Face cache, and not one of the shipped "
        f"shapes ({', '.join(known)}); put its config.json into a directory and name that"
    )


def shape_of(name: str, config: Mapping[str, Any]) -> Shape:
    """Shape of a config.json's content."""
    architecture = (config.get("architectures") or ["?"])[0]
    config = config.get("text_config", config)
    kind = config["model_type"]
    if kind not in _GATED:
        raise ValueError(f"model {name}: model_type={kind} is not one of {', '.join(_GATED)}")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    mixture = kind in ("qwen3_moe", "mixtral")
    return Shape(
        name=name,
        architecture=architecture,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or hidden // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        # transformers writes only what differs from the class's default, which is True for Gemma alone
        tied=config.get("tie_word_embeddings", kind.startswith("gemma")),
        qkv_bias=kind == "qwen2" or bool(config.get("attention_bias")),
        qk_norm=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        norms_per_layer=4 if kind.startswith("gemma") else 2,
        experts=config.get("num_experts", config.get("num_local_experts", 0)) if mixture else 0,
        experts_per_token=config["num_experts_per_tok"] if mixture else 0,
        expert_ffn=config.get("moe_intermediate_size", config["intermediate_size"]) if mixture else 0,
    )

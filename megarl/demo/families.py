"""Two tiny language models of different families, each with a tokenizer of its own: the demo's cohort.

Both speak the same small language (a chat turn such as "23+45=") through different vocabularies, ids, special tokens
and chat templates, so nothing but text can pass between them. Two layers and two key/value heads allow TP=2 and PP=2.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.04,
}

_QWEN_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}[INST]{{ message['content'] }}[/INST]"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}[SYS]{{ message['content'] }}[/SYS]{% endif %}{% endfor %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How one of the tiny models is made; ``end_tokens`` are its end-of-sequence tokens, the usual one first."""

    end_tokens: tuple[str, ...]
    tokenizer: Callable[[], PreTrainedTokenizerFast]
    model: Callable[[Mapping[str, int]], PreTrainedModel]  # of the vocabulary


def build(name: str, seed: int) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A freshly initialised float32 model of a family, and its tokenizer."""
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    torch.manual_seed(seed)
    model = family.model(tokenizer.get_vocab())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids(list(family.end_tokens)),
        pad_token_id=tokenizer.pad_token_id,
    )
    return model, tokenizer


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a Hugging Face model folder: config, safetensors, tokenizer and generation config."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _qwen_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level, no BOS, two end tokens: 262 ids with the specials last, as in Qwen2."""
    vocabulary = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<|pad|>", chat_template=_QWEN_TEMPLATE
    )


def _llama_tokenizer() -> PreTrainedTokenizerFast:
    """Characters with byte fallback, specials first, as in Llama-2: 359 ids.

    Its post-processor puts a BOS before any text and its template writes one as well, as those of Llama do: encoding
    a rendered chat with special tokens added gives two, which a chat renderer has to avoid.
    """
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYS]", "[/SYS]", "<pad>"]
    symbols = [*specials, *(f"<0x{byte:02X}>" for byte in range(256)), *map(chr, range(0x20, 0x7F))]
    core = Tokenizer(
        models.BPE(
            vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    core.add_special_tokens(specials)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", symbols.index("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        chat_template=_LLAMA_TEMPLATE,
    )


def _qwen_model(vocabulary: Mapping[str, int]) -> PreTrainedModel:
    """Qwen2: biased attention projections, embeddings shared with the output layer."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(vocabulary),
            bos_token_id=None,
            eos_token_id=vocabulary["<|end|>"],
            pad_token_id=vocabulary["<|pad|>"],
            tie_word_embeddings=True,
            **_SHAPE,
        )
    )


def _llama_model(vocabulary: Mapping[str, int]) -> PreTrainedModel:
    """Llama: no biases, an output layer of its own."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            bos_token_id=vocabulary["<s>"],
            eos_token_id=vocabulary["</s>"],
            pad_token_id=vocabulary["<pad>"],
            tie_word_embeddings=False,
            **_SHAPE,
        )
    )


FAMILIES: dict[str, Family] = {
    "qwen": Family(end_tokens=("<|end|>", "<|endoftext|>"), tokenizer=_qwen_tokenizer, model=_qwen_model),
    "llama": Family(end_tokens=("</s>",), tokenizer=_llama_tokenizer, model=_llama_model),
}

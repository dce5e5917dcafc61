"""Tiny random models of the supported families as Hugging Face directories, made on the fly with a small tokenizer."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

FAMILIES = ("qwen2", "qwen3", "llama")  # most tests run all of them
_GEMMA: dict[str, object] = {"query_pre_attn_scalar": 24, "sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh"}
# name in transformers and what is not the default: windows are shorter than test sequences, caps are felt
KINDS: dict[str, tuple[str, dict[str, object]]] = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma2": ("gemma2", _GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5}),
    "gemma3": (
        "gemma3_text",
        _GEMMA | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}
TIED = ("qwen3", "gemma2", "gemma3")
SPECIAL = ("<pad>", "<bos>", "<eos>", "<user>", "<assistant>", "<system>", "<end>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges over printable ASCII and the special tokens: one token per character, 103 in all.

    Byte-level BPE, because transformers replaces the tokenizer class of some families by such a one.
    """
    spelling = bytes_to_unicode()
    characters = [spelling[code] for code in (10, *range(32, 127))]
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>", "<system>", "<end>"],
    )
    made.chat_template = TEMPLATE
    return made


def config(family: str, **overrides) -> PreTrainedConfig:
    """Configuration of a 4-layer model with 4 query and 2 key/value heads of size 16 (about 0.15M parameters)."""
    name, changes = KINDS[family]
    settings = {
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": family in TIED,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "use_cache": True,
        "dtype": "float32",
        **changes,
        **overrides,
    }
    if name != "qwen2":
        settings.setdefault("head_dim", settings["hidden_size"] // settings["num_attention_heads"])
    return AutoConfig.for_model(name, **settings)


def model(family: str, seed: int = 0, scale: float = 4.0, **overrides) -> torch.nn.Module:
    """A random model in float32 whose norms, biases and logits are not trivial; equal seeds give equal weights."""
    made = AutoModelForCausalLM.from_config(config(family, **overrides)).to(torch.float32).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if parameter.ndim == 1:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(0.02 * scale * noise)
    return made


def write(directory: Path, family: str, seed: int = 0, scale: float = 4.0, **overrides) -> Path:
    """``directory``, holding the model's weights, configuration, generation configuration and tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    model(family, seed, scale, **overrides).save_pretrained(directory)
    GenerationConfig(bos_token_id=1, eos_token_id=[2, 6], pad_token_id=0).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory

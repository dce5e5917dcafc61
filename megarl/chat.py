"""Messages to token ids and back, per tokenizer. Nothing else applies a chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from megarl.types import Message


@dataclass(frozen=True)
class Chat:
    """One model's way of writing a conversation.

    Example: ``open_chat("Qwen/Qwen2.5-7B").render((Message("user", "2+2?"),))`` is int32[Lp], ready to be continued.
    """

    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]  # every id that ends a response: the tokenizer's and the generation config's
    vocab_size: int  # rows of the model's embedding, without any padding
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of the template, passed through
    plain: bool = False  # contents joined by newlines, although the tokenizer may have a template

    @property
    def templated(self) -> bool:
        """Does the tokenizer's chat template write the conversation?"""
        return bool(self.tokenizer.chat_template) and not self.plain

    def render(self, messages: Sequence[Message]) -> np.ndarray:
        """Token ids, int32[Lp], of the conversation up to where the assistant speaks; with one BOS where the
        tokenizer writes one.

        A tokenizer without a chat template (a base model) gets the contents joined by newlines.
        """
        if self.templated:
            turns = [{"role": m.role, "content": m.content} for m in messages]
            options: dict[str, Any] = dict(self.options)
            text = str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options))
        else:
            text = "\n".join(m.content for m in messages)
        ids = [int(i) for i in self.tokenizer.encode(text, add_special_tokens=False)]
        return np.asarray(self._one_bos(ids), dtype=np.int32)

    def decode(self, token_ids: np.ndarray) -> str:
        """Text of a response, without special tokens."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def _one_bos(self, ids: list[int]) -> list[int]:
        bos = self.tokenizer.bos_token_id
        if not isinstance(bos, int):
            return ids
        while ids[:2] == [bos, bos]:
            ids = ids[1:]
        return [bos, *ids] if self._adds_bos and ids[:1] != [bos] else ids

    @cached_property
    def _adds_bos(self) -> bool:
        return self.tokenizer.encode("a")[:1] == [self.tokenizer.bos_token_id]


def open_chat(model: str, options: Mapping[str, bool | int | str] | None = None, *, plain: bool = False) -> Chat:
    """The Chat of a Hugging Face model directory or hub name; no code of the model's is run. ``options`` go to its
    chat template, which ``plain`` leaves out.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        vocab_size = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    except OSError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"model {model}: no such directory, nor to be had from the hub ({reason})") from error
    stop_ids = _stop_ids(model, tokenizer)
    return Chat(tokenizer=tokenizer, stop_ids=stop_ids, vocab_size=vocab_size, options=options or {}, plain=plain)


def _stop_ids(model: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    try:
        listed = GenerationConfig.from_pretrained(model).eos_token_id
    except OSError:  # the model has no generation_config.json
        listed = None
    found = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    stop_ids = tuple(sorted({i for i in found if isinstance(i, int)}))
    if not stop_ids:
        raise ValueError(f"{model}: neither its tokenizer nor its generation config names an end-of-sequence id")
    return stop_ids

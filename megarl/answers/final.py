"""The part of a response that counts: what was said once the thinking was over."""

import re

# a token that ends a turn, wherever it was left in the text: what follows was never said
_END = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|end_of_text|end|eom_id|return|eos|fim_end|endofassistant)\|>"
    "|<\uff5cend\u2581of\u2581sentence\uff5c>|<(?:eos|end_of_turn)>|</s>|\\[EOS\\]|<\\|im_start\\|>"
)
_THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)


def final_part(text: str) -> str:
    """What was said after the last thinking block and before the end of the sequence; nothing where a thinking block
    never ends."""
    for opener, closer in _THOUGHTS:
        opened, closed = text.rfind(opener), text.rfind(closer)
        if opened > closed:
            return ""
        if closed >= 0:
            text = text[closed + len(closer) :]
    ended = _END.search(text)
    return text[: ended.start()] if ended else text

"""Templates, BOS and end-of-sequence ids per tokenizer."""

import json

import pytest

from megarl.chat import open_chat
from megarl.types import Message
from tests import tiny

QUESTION = (Message("user", "1+1?"),)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("chat") / "qwen2", "qwen2")


def edit(folder, file, **changes):
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_render_is_the_template_and_decode_gives_the_text_back(model):
    chat = open_chat(str(model))
    ids = chat.render(QUESTION)
    assert chat.tokenizer.decode(ids) == "<user>1+1?<end><assistant>"
    assert chat.decode(chat.render((Message("user", "x = 2"),))) == "x = 2"
    assert chat.vocab_size == 128


def test_every_end_id_is_known(model):
    # tokenizer says 2, the generation config says [2, 6]
    assert open_chat(str(model)).stop_ids == (2, 6)


def test_end_ids_without_generation_config(tmp_path):
    folder = tiny.write(tmp_path / "m", "llama")
    (folder / "generation_config.json").unlink()
    assert open_chat(str(folder)).stop_ids == (2,)


@pytest.mark.parametrize("template_writes", [True, False])
@pytest.mark.parametrize("tokenizer_adds", [True, False])
def test_one_bos_at_most_and_one_where_the_tokenizer_adds_it(tmp_path, template_writes, tokenizer_adds):
    from tokenizers.processors import TemplateProcessing

    folder = tiny.write(tmp_path / "m", "qwen2")
    tokenizer = tiny.tokenizer()
    if template_writes:
        tokenizer.chat_template = "{{ bos_token }}" + tiny.TEMPLATE
    if tokenizer_adds:
        tokenizer._tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save_pretrained(folder)
    ids = open_chat(str(folder)).render(QUESTION).tolist()
    assert ids.count(1) == int(template_writes or tokenizer_adds)
    assert (ids[0] == 1) == (template_writes or tokenizer_adds)


def test_a_base_model_without_template_gets_plain_text(tmp_path):
    folder = tiny.write(tmp_path / "m", "qwen2")
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    chat = open_chat(str(folder))
    assert chat.decode(chat.render((Message("system", "be brief"), Message("user", "1+1?")))) == "be brief\n1+1?"

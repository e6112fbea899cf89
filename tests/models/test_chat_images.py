"""Chats with images to prompts: where the pictures stand, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.errors import ChatTemplateError, ParameterError
from foredraft.models.chat_template import encode_chat
from foredraft.testing import ByteTokenizer
from foredraft.types import PicturePrompt, pictures_of
from tests.models.eyes import REFUSED_WIDTH, Eyes, ask, picture, seeing_tokenizer

PAD = ByteTokenizer.PAD


def encode(*messages: dict[str, Any], eyes: Eyes | None = None) -> Any:
    return encode_chat(seeing_tokenizer(), list(messages), images=eyes or Eyes())


def test_images_stand_where_the_template_has_them() -> None:
    first, second = picture(1, 24), picture(2, 16)
    prompt = encode(ask("what?", first), {"role": "assistant", "content": "a cat"}, ask("and?", second, first))
    assert isinstance(prompt, PicturePrompt)
    assert [(p.start, p.num_tokens) for p in prompt.pictures] == [(1, 3), (18, 2), (20, 3)]
    assert all(prompt[i] == PAD for p in prompt.pictures for i in range(p.start, p.end))
    assert list(prompt).count(PAD) == 8
    keys = [p.key for p in prompt.pictures]
    assert keys[0] == keys[2] != keys[1]


def test_a_chat_without_images_is_text() -> None:
    ids = encode({"role": "user", "content": "hello"})
    assert not pictures_of(ids)
    assert ids == encode({"role": "user", "content": [{"type": "text", "text": "hello"}]})


def test_a_message_that_spells_an_image_shows_none() -> None:
    prompt = encode(ask("<pad> is a letter <pad>", picture(1, 16)))
    assert list(prompt).count(PAD) == 2
    assert not pictures_of(encode({"role": "user", "content": "<pad>"}))


def test_a_template_that_drops_an_image() -> None:
    with pytest.raises(ChatTemplateError, match="has 0 places for 1 images"):
        encode_chat(seeing_tokenizer_of_text(), [ask("what?", picture())], images=Eyes())


def seeing_tokenizer_of_text() -> ByteTokenizer:
    tokenizer = seeing_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    return tokenizer


def test_refusals_name_the_part() -> None:
    messages = [{"role": "user", "content": "first"}, ask("what?", picture())]
    with pytest.raises(ParameterError, match=r"messages\[1\].content\[0\] is an image, and this model takes text only"):
        encode_chat(ByteTokenizer(), messages)
    with pytest.raises(ParameterError, match=r"content\[0\] is an image, and it is blind"):
        encode(*messages, eyes=Eyes(refusal="it is blind"))
    narrow = picture(0, REFUSED_WIDTH)
    with pytest.raises(ParameterError, match=r"content\[0\] cannot be read by the model's processor: seven"):
        encode(ask("what?", narrow))
    with pytest.raises(ParameterError, match="is of type 'input_audio', which no model here reads"):
        encode({"role": "user", "content": [{"type": "input_audio"}]})
    with pytest.raises(ParameterError, match=r"content\[0\].image must be a data URL"):
        encode({"role": "user", "content": [{"type": "image", "image": "/etc/passwd"}]})


def test_a_blind_model_takes_text_in_its_template_s_form() -> None:
    ids = encode({"role": "user", "content": "hello"}, eyes=Eyes(refusal="it is blind"))
    assert bytes(id for id in ids if id < 256) == b"hello"


def test_parts_that_are_text_only_still_join() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ids = encode_chat(ByteTokenizer(), [{"role": "user", "content": parts}])
    assert bytes(id for id in ids if id < 256) == b"a\nb"

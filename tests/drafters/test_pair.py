from __future__ import annotations

import logging
from typing import Any

import pytest

from foredraft.drafters.cross_vocab import CrossVocabDrafter
from foredraft.drafters.model import ModelDrafter
from foredraft.drafters.pair import compare_tokenizers, warn_of_size
from foredraft.drafters.registry import DraftContext, make_drafters
from foredraft.errors import TokenizerMismatchError
from foredraft.models.tokenizer import Tokenizer
from foredraft.testing import TinyModel
from tests.drafters.translated import ToyTokenizer, byte_level, sentencepiece
from tests.models.vocabularies import byte_level_fields


def context(draft: Any, mode: Any = "auto", *, draft_vocab: int = 1300) -> DraftContext:
    return DraftContext(
        TinyModel(1300, 64, 8, name="big"),
        byte_level(),
        lambda name: draft,
        lambda name: TinyModel(draft_vocab, 64, 8, name="small"),
        cross_vocab=mode,
        native=False,
    )


def test_padding_templates_and_settings_are_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    fields = byte_level_fields()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 5, 5]
    fields |= {"tokenizer.chat_template": "another", "tokenizer.ggml.add_bos_token": True}
    pair = compare_tokenizers("big", byte_level(), "small", Tokenizer(fields))
    assert (pair.kind, pair.share) == ("native", 1.0)
    with caplog.at_level(logging.WARNING, "foredraft"):
        (drafter,) = make_drafters("model:small", context(Tokenizer(fields), draft_vocab=1206))
    assert isinstance(drafter, ModelDrafter)
    assert not caplog.messages


def test_another_tokenizer_drafts_across_and_is_named_at_start(caplog: pytest.LogCaptureFixture) -> None:
    pair = compare_tokenizers("big", byte_level(), "small", sentencepiece())
    assert pair.kind == "cross-vocabulary"
    assert 0.5 < pair.share < 1
    assert str(pair).startswith("small drafts for big across vocabularies: their tokenizers differ (token 0 is b")
    (drafter,) = make_drafters("model:small", context(sentencepiece(), draft_vocab=300))
    assert isinstance(drafter, CrossVocabDrafter)
    assert drafter.name == "model"
    assert caplog.messages == [str(pair)]  # what check-pair says


def test_across_only_if_it_may() -> None:
    with pytest.raises(TokenizerMismatchError, match="cross_vocab is off: their tokenizers differ"):
        make_drafters("model:small", context(sentencepiece(), "off"))


def test_a_vocabulary_without_text_is_impossible() -> None:
    silent = ToyTokenizer("<a>", "<b>")
    pair = compare_tokenizers("big", byte_level(), "small", silent)  # type: ignore[arg-type]
    assert pair.kind == "impossible"
    with pytest.raises(TokenizerMismatchError, match="small cannot draft for big: the vocabulary of the draft"):
        make_drafters("model:small", context(silent))


def test_a_draft_larger_than_its_target_is_told_with_the_figures(caplog: pytest.LogCaptureFixture) -> None:
    small, large = TinyModel(272, name="small"), TinyModel(2_000_000, name="large")
    assert warn_of_size(large, small) is None
    words = warn_of_size(small, large)
    assert words is not None
    assert "8 MB of large, against 0 MB of small" in words
    assert "the output stays the same" in words
    make_drafters("model:small", context(byte_level(), draft_vocab=1400))
    assert len(caplog.messages) == 1
    assert "no smaller than its target" in caplog.text

from __future__ import annotations

import numpy as np
import pytest

from foredraft.drafters.transcript import MAX_UNSETTLED, Transcript
from foredraft.models.spelling import Speller
from foredraft.models.tokenizer import Tokenizer
from foredraft.testing import ByteTokenizer
from tests.drafters.translated import ToyTokenizer, byte_level, sentencepiece
from tests.models.vocabularies import AWKWARD, sentencepiece_fields

BYTES = ByteTokenizer()


def grown(tokenizer: Tokenizer, text: bytes, seed: int) -> Transcript:
    """Taken in by pieces of a few bytes."""
    transcript = Transcript(BYTES, Speller(tokenizer), {})
    rng, end = np.random.default_rng(seed), 0
    while end < len(text):
        end = min(len(text), end + int(rng.integers(1, 9)))
        before, settled = list(transcript.ids), transcript.num_settled
        num_same = transcript.follow([*text[:end]])
        assert transcript.ids[:num_same] == before[:num_same]
        assert num_same == len(before) or transcript.ids[num_same : num_same + 1] != before[num_same : num_same + 1]
        assert num_same >= settled <= transcript.num_settled <= len(transcript.ids)
    return transcript


@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece], ids=["bpe", "spm"])
def test_a_text_that_grows_says_all_its_bytes(tokenizer: type) -> None:
    for seed, text in enumerate(AWKWARD):
        transcript = grown(tokenizer(), text.encode(), seed)
        said = b"".join(map(tokenizer().token_bytes, transcript.ids))
        assert said.removeprefix(b"<s>") in (text.encode(), b" " + text.encode())


def test_words_are_cut_as_if_the_whole_text_had_been_there() -> None:
    text = "it's a lot of words and numbers 1234, one by one; def f(x):\n\treturn x  # comment\n" * 4
    for seed in range(5):
        assert grown(byte_level(), text.encode(), seed).ids == byte_level().encode(text)


def test_most_of_a_text_is_settled() -> None:
    words = grown(byte_level(), b"one two three " * 30, 0)
    assert len(words.ids) - words.num_settled < 24
    dots = grown(byte_level(), b"....." * 60, 0)
    assert len(dots.ids) - dots.num_settled <= MAX_UNSETTLED


def test_half_a_character_is_bytes_until_it_is_whole() -> None:
    transcript = Transcript(BYTES, Speller(sentencepiece()), {})
    transcript.follow([*b"h\xc3"])
    assert transcript.ids[-1] == 4 + 0xC3
    transcript.follow([*b"h\xc3\xa9"])
    assert [sentencepiece().token_bytes(id) for id in transcript.ids[-2:]] == [b"\xc3", b"\xa9"]


def test_begin_of_text_is_the_draft_s_own() -> None:
    transcript = Transcript(BYTES, Speller(sentencepiece()), {})
    transcript.follow([BYTES.BOS, *b"hello"])
    assert transcript.ids == sentencepiece().encode("hello", add_special=True)
    assert transcript.ids[0] == sentencepiece().bos_id
    plain = Transcript(BYTES, Speller(byte_level()), {})
    plain.follow([BYTES.BOS, *b"hello"])
    assert plain.ids == byte_level().encode("hello")


def test_control_tokens_are_the_draft_s_or_letters() -> None:
    draft = byte_level()
    control = next(id for id in range(draft.vocab_size) if draft.token_bytes(id) == b"<|im_start|>")
    transcript = Transcript(BYTES, Speller(draft), {BYTES.USER: control})
    transcript.follow([*b"a", BYTES.USER, *b"b", BYTES.END, *b"c"])
    assert transcript.ids == [*draft.encode("a"), control, *draft.encode("b<|end|>c")]
    assert not any(draft.is_special(id) for id in transcript.ids if id != control)


def test_nothing_is_said_twice_where_the_control_token_opens_the_text() -> None:
    draft = sentencepiece()
    transcript = Transcript(BYTES, Speller(draft), {BYTES.BOS: draft.bos_id or 0})
    transcript.follow([BYTES.BOS, *b"hello"])
    assert transcript.ids == draft.encode("hello", add_special=True)


def test_bytes_that_the_draft_lacks_are_what_it_makes_of_them() -> None:
    fields = sentencepiece_fields()
    fields["tokenizer.ggml.token_type"][4 + 0xFF] = 5
    draft = Tokenizer(fields)
    transcript = Transcript(BYTES, Speller(draft), {})
    for end in range(1, 12):
        transcript.follow([*b"hello\xffworld"[:end]])
    assert transcript.ids[0] == draft.bos_id
    toy = Transcript(BYTES, Speller(ToyTokenizer("a", "b")), {})  # type: ignore[arg-type]
    toy.follow([*b"ab"])
    assert toy.ids == [0, 1]

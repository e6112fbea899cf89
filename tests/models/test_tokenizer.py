from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
import transformers

from foredraft.errors import ModelFileError, UnsupportedModelError
from foredraft.models.gguf import load_core, read_gguf
from foredraft.models.hub import resolve
from foredraft.models.tokenizer import LONG_TEXT, PRE_TOKENIZERS, Tokenizer, same_tokenizer

from .vocabularies import AWKWARD, CONTROL, NORMAL, UNUSED, save_vocabulary, sentencepiece_fields

GOLDEN = json.loads(Path(__file__).with_name("llama_cpp_ids.json").read_text())
FIELDS = GOLDEN["byte_level_fields"]
SENTENCEPIECE_SETTINGS = ({}, {"add_space_prefix": False, "add_bos_token": False, "add_eos_token": True})


def with_fields(**changes):
    return FIELDS | {"tokenizer.ggml." + name: value for name, value in changes.items()}


def assert_equals_llama_cpp(tokenizer: Tokenizer, golden: dict) -> None:
    for i, text in enumerate(AWKWARD):
        assert tokenizer.encode(text) == golden["plain"][i], repr(text)
        assert tokenizer.encode(text, parse_special=True) == golden["parsed"][i], repr(text)
    assert tokenizer.encode("hi", add_special=True) == golden["wrapped"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_equal_llama_cpp_for_every_pre_tokenizer(pre):
    assert_equals_llama_cpp(Tokenizer(with_fields(pre=pre)), GOLDEN["pre"][pre])


@pytest.mark.parametrize("case", range(len(SENTENCEPIECE_SETTINGS)))
def test_ids_equal_llama_cpp_for_sentencepiece(case):
    tokenizer = Tokenizer(sentencepiece_fields(**SENTENCEPIECE_SETTINGS[case]))
    assert_equals_llama_cpp(tokenizer, GOLDEN["sentencepiece"][case])


def test_merges_by_score_equal_their_plain_definition():
    pieces = [*"abé▁日", "ab", "aé", "▁a", "▁▁", "aa", "aaa", "aab", "▁ab", "éé", "日é", "<0x41>", "\udcff", "a\udcff"]
    scores = [-float(i * 7 % 5) for i in range(len(pieces))]
    scores[9] = float("nan")
    order = sorted(range(len(pieces)), key=lambda i: math.inf if math.isnan(scores[i]) else -scores[i])
    texts = [pieces[i] for i in order if "\udcff" not in pieces[i]]
    splits = [(text[:at], text[at:]) for text in texts for at in range(1, len(text))]
    expected = [(left, right) for left, right in splits if left in pieces and right in pieces]
    assert len(expected) > 8
    assert load_core().sentencepiece_merges(pieces, scores) == expected
    with pytest.raises(ValueError, match="differ in number"):
        load_core().sentencepiece_merges(pieces, scores[1:])


@pytest.mark.parametrize("text", AWKWARD)
def test_decoding_gives_the_text_back(text):
    tokenizer = Tokenizer(FIELDS)
    for parse_special in (False, True):
        ids = tokenizer.encode(text, parse_special=parse_special)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_special_tokens_in_user_text_are_text_unless_parsed():
    tokenizer = Tokenizer(FIELDS)
    end = tokenizer.encode("<|im_end|>", parse_special=True)
    assert len(end) == 1
    assert tokenizer.is_special(end[0])
    assert end[0] in tokenizer.eos_ids
    assert not any(map(tokenizer.is_special, tokenizer.encode("<|im_end|>")))
    assert tokenizer.decode([*tokenizer.encode("a"), *end]) == "a"
    assert tokenizer.decode(end, skip_special_tokens=False) == "<|im_end|>"


def test_while_a_long_text_is_encoded_other_threads_run():
    tokenizer = Tokenizer(FIELDS)
    text = "the quick brown fox; " * 30_000
    turns, is_over = [], threading.Event()

    def take_turns():
        while not is_over.wait(0.001):
            turns.append(len(turns))

    thread = threading.Thread(target=take_turns)
    thread.start()
    before = len(turns)
    ids = tokenizer.encode(text)
    num_turns = len(turns) - before
    is_over.set()
    thread.join()
    assert num_turns > 10
    assert tokenizer.decode(ids) == text


def test_long_texts_are_encoded_as_short_ones_are(monkeypatch):
    tokenizer = Tokenizer(FIELDS)
    text = "\n".join(AWKWARD) * 100
    assert len(text) > LONG_TEXT
    ids = tokenizer.encode(text)
    monkeypatch.setattr("foredraft.models.tokenizer.LONG_TEXT", len(text) + 1)
    assert tokenizer.encode(text) == ids


def test_no_token_is_longer_than_the_longest():
    tokenizer = Tokenizer(FIELDS)
    lengths = [len(tokenizer.decode([id], skip_special_tokens=False)) for id in range(tokenizer.vocab_size)]
    assert max(lengths) <= tokenizer.max_token_length


def test_invalid_utf8_becomes_the_replacement_character():
    tokenizer = Tokenizer(FIELDS)
    lead = next(id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"\xc3")
    assert tokenizer.decode([lead]) == "\ufffd"
    assert tokenizer.encode(b"a\xff".decode("utf-8", "surrogateescape")) == tokenizer.encode("a\ufffd")


def test_ids_beyond_the_vocabulary_say_nothing():
    tokenizer = Tokenizer(FIELDS)
    for id in (-1, tokenizer.vocab_size, 2**31):
        assert tokenizer.token_bytes(id) == b""
        assert not tokenizer.is_special(id)
    assert tokenizer.token_bytes(FIELDS["tokenizer.ggml.token_type"].index(UNUSED)) == b""


def with_token_at_end(text: str, kind: int = CONTROL):
    tokens, kinds = FIELDS["tokenizer.ggml.tokens"], FIELDS["tokenizer.ggml.token_type"]
    return with_fields(tokens=[*tokens, text], token_type=[*kinds, kind]), len(tokens)


@pytest.mark.parametrize(
    ("text", "kind", "ends"),
    [
        ("<|eot_id|>", CONTROL, True),
        ("<end_of_turn>", NORMAL, True),
        ("<|endoftext|>", CONTROL, True),
        ("<|file_sep|>", CONTROL, True),
        ("</s>", CONTROL, True),
        ("</s>", NORMAL, False),  # HTML in a vocabulary such as Qwen's
        ("<|box_end|>", CONTROL, False),
    ],
)
def test_ends_are_found_by_their_text(text, kind, ends):
    fields, id = with_token_at_end(text, kind)
    assert (id in Tokenizer(fields).eos_ids) is ends


def test_ends_named_by_the_file():
    tokenizer = Tokenizer(with_fields(eos_token_id=5, eot_token_id=6, eom_token_id=7))
    assert {5, 6, 7} <= tokenizer.eos_ids


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="'klingon' is not supported; these are: command-r, "):
        Tokenizer(with_fields(pre="klingon"))
    with pytest.raises(UnsupportedModelError, match="'rwkv' is not supported"):
        Tokenizer(with_fields(model="rwkv"))
    with pytest.raises(UnsupportedModelError, match=r"'\(none\)' is not supported"):
        Tokenizer({})


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": None},
        {"tokens": []},
        {"tokens": [1, 2]},
        {"tokens": "abc"},
        {"token_type": [NORMAL]},
        {"token_type": ["a"] * 2000},
        {"merges": None},
        {"merges": ["one"]},
        {"merges": ["absent absent"]},
        {"bos_token_id": 10**9, "add_bos_token": True},
        {"model": "llama", "scores": None},
        {"model": "llama", "scores": [0.0]},
    ],
    ids=str,
)
def test_malformed_fields_are_refused_in_one_line(changes):
    with pytest.raises(ModelFileError) as caught:
        Tokenizer(with_fields(**changes))
    assert "\n" not in str(caught.value)


def test_tokens_that_are_no_text_keep_their_ids():
    fields, id = with_token_at_end(b"\xff\xfe".decode("utf-8", "surrogateescape"), NORMAL)
    tokenizer = Tokenizer(fields)
    assert tokenizer.token_bytes(id) == b"\xff\xfe"
    assert tokenizer.encode("Hello world") == Tokenizer(FIELDS).encode("Hello world")


def test_same_tokenizer_ignores_padding_templates_and_settings():
    target = Tokenizer(FIELDS)
    tokens, kinds = FIELDS["tokenizer.ggml.tokens"], FIELDS["tokenizer.ggml.token_type"]
    padded = with_fields(tokens=[*tokens, "[PAD1]", "[PAD2]"], token_type=[*kinds, UNUSED, UNUSED], add_bos_token=True)
    padded["tokenizer.chat_template"] = "{{ 'another' }}"
    assert same_tokenizer(target, Tokenizer(padded)) is None
    assert same_tokenizer(Tokenizer(padded), target) is None
    assert same_tokenizer(target, Tokenizer(with_fields(tokens=tokens[:-4], token_type=kinds[:-4]))) is None
    # A padding id that the other vocabulary uses: only one of them can emit it.
    used = with_fields(tokens=[*tokens[:-1], "<extra>"], token_type=[*kinds[:-1], CONTROL])
    assert same_tokenizer(target, Tokenizer(used)) is None


def test_same_tokenizer_names_the_first_difference():
    tokens = list(FIELDS["tokenizer.ggml.tokens"])
    tokens[300], tokens[301] = tokens[301], tokens[300]
    reason = same_tokenizer(Tokenizer(FIELDS), Tokenizer(with_fields(tokens=tokens)))
    assert reason is not None
    assert reason.startswith("token 300 is b")
    assert "\n" not in reason


def test_a_missing_pre_tokenizer_is_the_default_and_reported(caplog):
    fields = {key: value for key, value in FIELDS.items() if key != "tokenizer.ggml.pre"}
    assert_equals_llama_cpp(Tokenizer(fields), GOLDEN["pre"]["default"])
    assert "names no pre-tokenizer" in caplog.text


def test_fields_may_come_from_a_file(tmp_path):
    path = save_vocabulary(tmp_path / "vocabulary.gguf", FIELDS)
    assert Tokenizer(read_gguf(path).metadata).encode(AWKWARD[2]) == GOLDEN["pre"]["gpt-2"]["plain"][2]


@pytest.mark.real
def test_smollm2_equals_llama_cpp():
    assert_real_file_equals_llama_cpp("smollm2-135m")


@pytest.mark.pair
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m"])
def test_larger_models_equal_llama_cpp(name):
    assert_real_file_equals_llama_cpp(name)


def assert_real_file_equals_llama_cpp(name: str) -> None:
    tokenizer = Tokenizer(read_gguf(resolve(name)).metadata)
    assert_equals_llama_cpp(tokenizer, GOLDEN["real"][name])
    # llama.cpp ends at </s> in every vocabulary, also in these, where it is the HTML tag.
    assert {id for id in GOLDEN["real"][name]["ends"] if tokenizer.token_bytes(id) != b"</s>"} == tokenizer.eos_ids
    for text in AWKWARD:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@pytest.mark.pair
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "gemma3-270m"])
def test_larger_models_equal_transformers(name):
    path = resolve(name)
    ours = Tokenizer(read_gguf(path).metadata)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in [*AWKWARD, "<s>strike</s> a</s>b"]:
        if name.startswith("gemma") and " " * 32 in text:
            continue  # Transformers merges long runs of blanks where the file has tokens for runs of up to 31
        assert ours.encode(text, parse_special=True) == theirs(text, add_special_tokens=False)["input_ids"], repr(text)


@pytest.mark.pair
def test_pairs_of_real_tokenizers():
    qwen, draft, smollm2 = (
        Tokenizer(read_gguf(resolve(name)).metadata)
        for name in ("qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b", "smollm2-135m")
    )
    assert qwen.chat_template != draft.chat_template
    assert same_tokenizer(qwen, draft) is None
    assert same_tokenizer(qwen, smollm2) == "token 0 is b'!' in the target and b'<|endoftext|>' in the draft"

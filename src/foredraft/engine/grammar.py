"""Grammars: JSON schemas, regular expressions and context-free grammars as masks over the tokens of a vocabulary.

llguidance does the parsing (Earley over derivatives of regular expressions); a mask takes tens of microseconds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import cached_property
from threading import Lock, Thread, stack_size
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from foredraft.algo.masks import pack_mask
from foredraft.errors import GrammarError, ParameterError
from foredraft.models.base import TextTokenizer
from foredraft.models.spelling import UNSPELT, Speller
from foredraft.types import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_FIELD = "structured_outputs"
#: White space between the parts of JSON: a line end and its indentation, or a blank or two; never an endless run.
JSON_BLANKS = r"\n[ \t]{0,64}|[ \t]{1,2}"
_ANY_OBJECT = '{"type": "object"}'

#: Characters of one grammar. References are followed by recursion, at about 10 KB of stack for each in a chain, and a
#: stack that overflows ends the process: compilation gets one that holds any chain of that many characters.
MAX_CHARACTERS = 256 * 1024
STACK_BYTES = 512 * 2**20
#: The size of new stacks is the whole process's: a thread at a time may change it, start another, and set it back.
_STACK_SIZE_LOCK = Lock()
#: Parts of regular expressions, in llguidance's count (its default is a million): thousands of properties fit.
MAX_LEXER_FUEL = 500_000


#: Characters of an explanation: it quotes the grammar.
MAX_REASON = 300
#: Keywords of JSON Schema by which schemas are put together: where their compilation fails they have a share in it.
_COMPOSITION = (
    "allOf",
    "anyOf",
    "oneOf",
    "$ref",
    "patternProperties",
    "pattern",
    "additionalProperties",
    "prefixItems",
)


class GrammarCompiler:
    """Grammars over a tokenizer's tokens, at the width of the target's logits.

    The table of tokens is built with the first grammar, or by `build_vocabulary` (half a second for 150,000 tokens).
    `compile` may be called in any thread.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(t for t in tokenizer.eos_ids if t < vocab_size)
        self._latest: tuple[StructuredOutputs, Grammar] | None = None  # requests like the one before share its own
        self._vocabulary_lock = Lock()

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """For a text that begins. Raises ParameterError where none can begin, or it is no grammar at all.

        A grammar whose texts begin but never end is taken: its text ends with `max_tokens`, or with a GrammarError.
        """
        num_characters = sum(map(len, _texts(wanted)))
        if num_characters > MAX_CHARACTERS:
            raise ParameterError(_FIELD, f"have {num_characters} characters, and {MAX_CHARACTERS} is the most")
        latest = self._latest
        if latest is None or latest[0] != wanted:
            self._latest = latest = wanted, self._compile_on_deep_stack(wanted)
        return latest[1].fork()

    def build_vocabulary(self) -> None:
        if self._ends:
            with self._vocabulary_lock:
                _ = self._tokens

    def _compile_on_deep_stack(self, wanted: StructuredOutputs) -> Grammar:
        outcome: Future[Grammar] = Future()

        def run() -> None:
            try:
                outcome.set_result(self._compile(wanted))
            except Exception as error:
                outcome.set_exception(error)
            except BaseException:  # how a panic of the compiler arrives
                outcome.set_exception(ParameterError(_FIELD, f"cannot be compiled: {_reason('panic', wanted)}"))

        with _STACK_SIZE_LOCK:
            before = stack_size(STACK_BYTES)
            try:
                Thread(target=run, name="foredraft-grammar", daemon=True).start()
            finally:
                stack_size(before)
        return outcome.result()

    def _compile(self, wanted: StructuredOutputs) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        if not self._ends:
            raise ParameterError(_FIELD, "need a model whose tokenizer has an end-of-text token")
        self.build_vocabulary()
        limits = LLParserLimits(initial_lexer_fuel=MAX_LEXER_FUEL)
        matcher = LLMatcher(self._tokens, _translate(wanted), log_level=0, limits=limits)
        if matcher.is_error():
            raise ParameterError(_FIELD, f"cannot be compiled: {_reason(matcher.get_error(), wanted)}")
        grammar = Grammar(matcher, self._ends, self._vocab_size)
        try:
            grammar.mask(())
            is_empty = grammar.is_complete(())
        except GrammarError as error:
            if matcher.is_error() and "NoExtension" not in matcher.get_error():
                raise ParameterError(_FIELD, f"cannot be followed: {_reason(matcher.get_error(), wanted)}") from error
            raise ParameterError(_FIELD, "cannot be satisfied: no text matches") from error
        if is_empty:
            raise ParameterError(_FIELD, "allow the empty text only")
        return grammar

    @cached_property
    def _tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self._ends[0])
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=self._ends)


class Grammar:
    """One text's place in a grammar; a `TokenGrammar`.

        matcher   [ committed text ][ ahead: draft tokens that were asked about last ]

    Going from one path of a draft to another undoes what they do not share, so that a rejected token leaves no trace.
    """

    def __init__(self, matcher: LLMatcher, ends: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._ends = ends
        self._vocab_size = vocab_size
        self._ahead: list[int] = []
        self._masks: dict[tuple[int, ...], NDArray[np.uint32]] = {}  # by path, since the last committed token

    def fork(self) -> Grammar:
        """Another text at the same place."""
        self._go(())
        return Grammar(self._matcher.deep_copy(), self._ends, self._vocab_size)

    def mask(self, path: Sequence[int], /) -> NDArray[np.uint32]:
        key = tuple(path)
        if key not in self._masks:
            self._go(key)
            self._check()
            mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint32, count=(self._vocab_size + 31) // 32)
            self._check()
            self._masks[key] = mask
        return self._masks[key]

    def is_complete(self, path: Sequence[int], /) -> bool:
        self._go(path)
        self._check()
        if self._matcher.is_stopped():
            return True
        return self._matcher.is_accepting() and not np.any(self.mask(path) & ~self._end_bits)

    def advance(self, token: int) -> bool:
        """Commit a token. True if it completes the text: nothing may follow."""
        self._go((token,))
        self._ahead.clear()
        self._masks.clear()
        try:
            return self.is_complete(())
        except GrammarError:
            return False  # the next mask tells

    @cached_property
    def _end_bits(self) -> NDArray[np.uint32]:
        ends = np.zeros(self._vocab_size, dtype=np.bool_)
        ends[list(self._ends)] = True
        return pack_mask(ends)

    def _go(self, path: Sequence[int]) -> None:
        shared = 0
        while shared < min(len(path), len(self._ahead)) and path[shared] == self._ahead[shared]:
            shared += 1
        if shared < len(self._ahead):
            self._matcher.rollback(len(self._ahead) - shared)
            del self._ahead[shared:]
        for token in path[shared:]:
            self._matcher.consume_token(token)
            self._ahead.append(token)

    def _check(self) -> None:
        matcher = self._matcher
        if matcher.is_error():
            raise GrammarError(f"the text cannot go on under its grammar: {_reason(matcher.get_error())}")
        if matcher.is_stopped() and not matcher.is_accepting() and matcher.stop_reason() != "EndOfSentence":
            raise GrammarError("the text cannot go on under its grammar: no token of the vocabulary fits")


class _Vocabulary:
    """The tokens as llguidance's `TokenizerWrapper` takes them."""

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int, end: int) -> None:
        known = range(min(tokenizer.vocab_size, vocab_size))
        padding = [b""] * (vocab_size - len(known))
        self.tokens = [tokenizer.token_bytes(token) for token in known] + padding
        self.special_token_ids = [token for token in known if tokenizer.is_special(token)]
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = end
        self._speller = Speller(tokenizer)

    def __call__(self, wanted: bytes) -> list[int]:
        """The model's own tokens of a text that the grammar forces."""
        return self._speller.encode(wanted)


def _translate(wanted: StructuredOutputs) -> str:
    """In the words of llguidance."""
    from llguidance import LLMatcher, grammar_from

    try:
        if wanted.regex is not None:
            return LLMatcher.grammar_from_regex(wanted.regex)
        if wanted.choice:
            return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in wanted.choice))
        if wanted.grammar is not None:
            return grammar_from("grammar", wanted.grammar)
        schema = _ANY_OBJECT if wanted.json_schema is None else wanted.json_schema
        return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": JSON_BLANKS})
    except (ValueError, RecursionError) as error:
        raise ParameterError(_FIELD, f"cannot be read: {_reason(str(error), wanted)}") from error


def _texts(wanted: StructuredOutputs) -> Iterator[str]:
    yield from wanted.choice
    yield from (text for text in (wanted.json_schema, wanted.regex, wanted.grammar) if isinstance(text, str))


def _reason(message: str, wanted: StructuredOutputs | None = None) -> str:
    """What llguidance says, for the grammar's author. Faults of its own are told without their details."""
    if "panic" not in message.lower():
        return _first_words(_plain(message, is_of_grammar=wanted is not None and wanted.grammar is not None))
    if unspelt := re.search(UNSPELT + r" b(['\"]).+?\1", message):  # our own error, from within
        return unspelt[0]
    text = "" if wanted is None else " ".join(_texts(wanted))
    used = [keyword for keyword in _COMPOSITION if f'"{keyword}"' in text]
    return f"the compiler failed on it{', which uses ' + ', '.join(used) if used else ''}; write it more simply"


def _plain(message: str, *, is_of_grammar: bool) -> str:
    """Without drawings, and without a rule that is not the author's. is_of_grammar: he wrote rules."""
    if keywords := re.fullmatch(r"Unimplemented keys: \[(.*)\]", message):
        names = keywords[1].replace('"', "")
        return f"not supported in a schema: {names}; say it by other keywords, or leave it out"
    if drawn := re.search(r"regex parse error:\n    (.*)\n    ( *)\^+\nerror: (.*)", message):
        before = message[: drawn.start()] if is_of_grammar else ""
        return f'{before}{drawn[3]}, at "{drawn[1][len(drawn[2]) :][:20]}"'
    return message


def _first_words(message: str) -> str:
    """On one line, without the parser's state and traceback behind it."""
    return " ".join(re.split("<state>|<backtrace>|, traceback:", message)[0].split())[:MAX_REASON]

"""The library behind `Grammar`: llguidance, an Earley parser over derivatives of regular expressions, in Rust.

It is faster than xgrammar (docs/structured_output.md), knows more of JSON schema, refuses unknown parts, and reports
forced tokens.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from draftree.errors import install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Made = TypeVar("Made")
NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "ebnf": "grammar",
    "choice": "choice",
    "composed": "grammar",
}
SECONDS = 10.0  # Time limit of compiling.
WAIT = 1.0  # Seconds to wait for a place; the engine's thread may wait here too.
MASK_SECONDS = 0.01  # Processor time limit of a mask (median), as the engine computes no other token meanwhile.
PROBED = 6  # Masks timed.
CHARACTERS = 1 << 20  # Length limit of a grammar's text.
STACK, STACK_A_CHARACTER = 16 << 20, 2 << 10  # Bytes; the library's recursion takes up to 863 for each character.
LEXER_STATES = 50_000  # Limit of states, of 1 to 2 kB each, so that a request stays below 100 MB.
FIXED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # As in `json.dumps`.
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
WHITESPACE: dict[str, dict[str, Any]] = {"fixed": FIXED, "compact": COMPACT, "any": {"whitespace_flexible": True}}
# Without `u`: the library has it for control characters alone, where a model that wants `\u00e9` is stuck, and for
# names, which may then be those of other properties. Schemas with control characters need it.
ESCAPES = 'nrbtf\\"'

_places = threading.BoundedSemaphore(2)  # For compiling; work beyond its time limit keeps its place.
_starting = threading.Lock()  # The stack size of new threads belongs to the process.


class GrammarError(ValueError):
    """A grammar that cannot be used, or an answer that cannot go on; the message says what to do."""


class GrammarBusyError(GrammarError):
    """No place to compile: other grammars still take longer than their time limit."""

    def __init__(self) -> None:
        super().__init__("Grammars that took too long are still being compiled: try this one again in some minutes.")


def library() -> Any:
    """Return the llguidance module, or raise a GrammarError that says how to install it."""
    try:
        import llguidance
    except ImportError:
        raise GrammarError(f"Grammars need llguidance, which is not installed: {install('grammar')}.") from None
    return llguidance


def marker_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the markers of a tokenizer by id: the tokens that Hugging Face calls special.

    Only `<[id]>` in a grammar allows a marker; a text that equals its name is spelled by ordinary tokens. All other
    tokens are texts, such as Qwen's `<think>`.
    """
    return {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def lark_text(tokenizer: Any, text: str) -> str:
    """Return a text of a chat template in Lark: its markers as `<[id]>`, the rest in quotes."""
    ids = {name: number for number, name in marker_tokens(tokenizer).items()}
    names = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    parts = re.split(f"({names})", text) if names else [text]
    return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)


class _Tokens:
    """Hold the bytes of tokens and encode texts, as llguidance asks of a tokenizer; markers begin with byte 255.

    The library's own reader takes every added token of the form <...> for a marker, and finds markers in texts.
    """

    is_tokenizer_wrapper = True
    bos_token_id, special_token_ids = None, ()

    def __init__(self, tokenizer: Any, vocabulary: int, end_tokens: tuple[int, ...]) -> None:
        from llguidance.hf import from_tokenizer

        self._reader = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(end_tokens), slices=[])
        self.eos_token_id = end_tokens[0]
        texts = {*tokenizer.get_vocab().values()} - marker_tokens(tokenizer).keys() - {*end_tokens}
        read = self._reader.decode_bytes
        self.tokens = [(b"" if token in texts else b"\xff") + read([token]) for token in range(vocabulary)]

    def __call__(self, text: str) -> list[int]:
        """Return tokens that spell exactly `text`: the usual ones, or greedy ones where those would change it."""
        usual = list(self._reader.tokenize_str(text))
        spelled = b"".join(self.tokens[token] for token in usual) == text.encode()
        return usual if spelled else list(self._reader.greedy_tokenize(text))


def read_tokenizer(tokenizer: Any, vocabulary: int, end_tokens: tuple[int, ...]) -> LLTokenizer:
    """Read the bytes of a tokenizer's tokens; takes about two seconds for 128,000 tokens."""
    made = library().LLTokenizer
    try:
        return made(_Tokens(tokenizer, vocabulary, end_tokens), eos_token=list(end_tokens))
    except Exception as error:  # Rust raises many types.
        raise GrammarError(
            f"Grammars need a fast tokenizer of Hugging Face's that llguidance can read, and {type(tokenizer).__name__}"
            f" is none ({_first_line(error)}): load it with AutoTokenizer.from_pretrained(...)."
        ) from None


@lru_cache(maxsize=64)
def translate(kind: str, text: str, whitespace: str) -> str:
    """Translate a grammar into llguidance's own language, and check it apart from a tokenizer."""
    if len(text) > CHARACTERS:
        raise GrammarError(f"The grammar has {len(text)} characters, and at most {CHARACTERS} are taken: shorten it.")
    matcher = library().LLMatcher
    try:
        translated = _in_time(kind, text, lambda: _translated(kind, text, whitespace))
        fault = _in_time(kind, translated, lambda: matcher.validate_grammar(translated, limits=_limits()))
    except GrammarError:
        raise
    except Exception as error:
        raise GrammarError(f"The {NAMES[kind]} cannot be read ({_first_line(error)}): correct it.") from None
    if fault:
        raise GrammarError(f"The {NAMES[kind]} cannot be used ({_first_line(fault)}): correct or simplify it.")
    return translated


def _translated(kind: str, text: str, whitespace: str) -> str:
    matcher = library().LLMatcher
    if kind == "composed":
        return text
    if kind == "json_schema":
        escapes = {} if "\\u00" in text else {"json_allowed_escapes": ESCAPES}
        return str(matcher.grammar_from_json_schema(text, overrides=WHITESPACE[whitespace] | escapes))
    if kind == "regex":
        return str(matcher.grammar_from_regex(text))
    if kind == "choice":
        # A single lexeme: the parser follows at most 2,000 alternatives of a rule.
        options = " | ".join(json.dumps(option) for option in json.loads(text))
        return str(matcher.grammar_from_lark(f"start: OPTION\nOPTION: {options}"))
    # The library decides by the same pattern, but over the whole text, which takes hours on a megabyte of empty lines.
    if not any(re.match(r"\s*(%llguidance\b|start\s*:)", line) for line in text.split("\n")):
        from llguidance.gbnf_to_lark import gbnf_to_lark

        text = gbnf_to_lark(text)
    return str(matcher.grammar_from_lark(text))


def compose(text: str, parts: Mapping[str, str]) -> str:
    """Join a Lark grammar with the grammars that it refers to as @name, in llguidance's own language."""
    inner = [json.loads(part)["grammars"][0] if part[0] == "{" else {"lark_grammar": part} for part in parts.values()]
    named = [part | {"name": name} for name, part in zip(parts, inner, strict=True)]
    return json.dumps({"grammars": [{"lark_grammar": text}, *named]}, ensure_ascii=False)


def build(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Build a matcher at the beginning of a translated grammar, to be copied for each answer."""

    def work() -> LLMatcher:
        matcher = library().LLMatcher(tokenizer, text, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # Makes tables for the beginning of a text, which copies share.
        return matcher

    matcher = _in_time(kind, text, work)
    error = re.sub("; following special tokens.*", ": write it as text in quotes", matcher.get_error(), flags=re.DOTALL)
    if error.startswith("NoExtension"):
        raise GrammarError(f"The {NAMES[kind]} allows no text at all: correct it.")
    if matcher.is_error():
        raise GrammarError(f"The {NAMES[kind]} cannot be used ({_first_line(error)}): correct or simplify it.")
    return matcher


def check_pace(tokenizer: LLTokenizer, kind: str, text: str) -> None:
    """Refuse a grammar whose masks would delay all other answers; no limit of the library does."""

    def work() -> tuple[LLMatcher, list[float]]:
        matcher, taken = library().LLMatcher(tokenizer, text, log_level=0, limits=_limits()), []
        for _ in range(PROBED):
            began = time.thread_time()
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            taken.append(time.thread_time() - began)
            tokens = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if not len(tokens) or not matcher.try_consume_tokens([int(tokens[len(tokens) // 2])]):
                break
        return matcher, taken

    matcher, taken = _in_time(kind, text, work)
    if matcher.is_error() and matcher.get_error().startswith(("lexer", "Parser")):
        raise GrammarError(f"The {NAMES[kind]} cannot be followed ({_first_line(matcher.get_error())}): simplify it.")
    seconds = float(np.median(taken[1:] or 0.0))  # The first mask makes tables for the others.
    if seconds > MASK_SECONDS:
        raise GrammarError(
            f"The {NAMES[kind]} takes {1000 * seconds:.0f} ms for each token of an answer, and at most "
            f"{1000 * MASK_SECONDS:.0f} are given: shorten its longest texts."
        )


def _limits() -> Any:
    return library().LLParserLimits(max_lexer_states=LEXER_STATES, verbose_errors=False)


def _in_time(kind: str, text: str, work: Callable[[], Made]) -> Made:
    """Return the result of `work` within `SECONDS`, run on a stack that no grammar text can overflow.

    The library releases the interpreter's lock, but cannot be interrupted: beyond the time limit, its thread goes on.
    """
    if not _places.acquire(timeout=WAIT):
        raise GrammarBusyError
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except Exception as error:
            made.set_exception(error)
        finally:
            _places.release()

    with _starting:
        before = threading.stack_size(STACK + STACK_A_CHARACTER * len(text))
        threading.Thread(target=run, daemon=True, name="grammar").start()
        threading.stack_size(before)
    try:
        return made.result(SECONDS)
    except TimeoutError:
        raise GrammarError(f"The {NAMES[kind]} was not compiled within {SECONDS:g} seconds: make it smaller.") from None


class Matcher:
    """Follows one text token by token."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, end_tokens: tuple[int, ...]) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, end_tokens
        self._ended = False  # By an end token, which the library refuses where no text could follow.
        self._mask = np.zeros((vocabulary + 31) // 32, dtype=np.int32)

    def consume(self, token: int) -> bool:
        """Consume a token; return False, unchanged, if the grammar does not allow it here.

        Raises:
            GrammarError: the grammar exceeds its limits.
        """
        if self._ended or not 0 <= token < self._vocabulary:
            return False
        if token in self._ends:
            self._ended = bool(self._matcher.is_accepting())
            return self._ended
        if self._matcher.try_consume_tokens([token]) == 1:
            return True
        if self._matcher.is_error():
            raise self._failed()
        return False

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        if count and self._ended:
            self._ended, count = False, count - 1
        if count and not self._matcher.rollback(count):
            raise self._failed()

    def allowed(self) -> np.ndarray:
        """Return BoolArray [V]: the tokens that may follow, with end tokens if the text may end.

        Raises:
            GrammarError: the grammar exceeds its limits, or nothing can follow.
        """
        if self._ended:
            return np.zeros(self._vocabulary, dtype=np.bool_)
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            raise self._failed()
        words = np.unpackbits(self._mask.view(np.uint8), bitorder="little", count=self._vocabulary)
        return words.view(np.bool_)

    def forced(self) -> list[int]:
        """Return the tokens that the grammar forces next, as the tokenizer would write them; often none."""
        if self._ended:
            return []
        tokens = list(self._matcher.compute_ff_tokens())
        taken = self._matcher.try_consume_tokens(tokens)
        if self._matcher.is_stopped() and self._matcher.is_accepting():
            tokens.append(self._ends[0])
        self.rollback(taken)
        return tokens

    def _failed(self) -> GrammarError:
        return GrammarError(
            f"The grammar cannot be followed further ({_first_line(self._matcher.get_error())}): simplify it."
        )


def _first_line(error: object) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")

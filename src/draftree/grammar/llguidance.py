"""The grammar library behind `Grammar`: llguidance, an Earley parser over derivatives of regular expressions, in Rust.

Chosen over xgrammar by measurement (docs/structured_output.md): it compiles a schema in a tenth of the time, fills the
masks of a tree over 128,000 tokens in half of it, knows more of JSON schema, refuses what it does not know, tells which
tokens are forced, and needs neither triton nor a compiler.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from draftree.errors import install

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Made = TypeVar("Made")
_starting = threading.Lock()  # the size of new threads' stacks is one for the whole process
_left_behind: list[threading.Thread] = []  # that nobody waits for any more, and that cannot be ended
NAMES = {
    "json_schema": "JSON schema",
    "regex": "regular expression",
    "ebnf": "grammar",
    "choice": "choice",
    "composed": "grammar",
}
SECONDS = 10.0  # that compiling may take
MOST_LEFT_BEHIND = 2
MASK_SECONDS = 0.01  # of a processor for one mask at the median; the engine computes no other token meanwhile
PROBED = 6  # masks
SLOW_SECONDS, SLOW_MASKS = 0.1, 3  # of a processor for one mask of an answer; so many that take longer end it
CHARACTERS = 1 << 20  # of a grammar's text
STACK, STACK_A_CHARACTER = 16 << 20, 2 << 10  # bytes; the library descends as deep as texts go, at most 863 for each
GBNF_WORK = 300_000_000  # rules and comments times characters; some seconds
LEXER_STATES = 50_000  # of 1 to 2 kB each, so that a request stays below 100 MB
OPTIONAL = 1_000  # properties of one object: each is four ways to go on from any, and a mask takes up to 20 ms then
WAYS = 5_000  # that are followed at once
FIXED = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # as json.dumps writes
COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
WHITESPACE: dict[str, dict[str, Any]] = {"fixed": FIXED, "compact": COMPACT, "any": {"whitespace_flexible": True}}


class GrammarError(ValueError):
    """A grammar that cannot be used, or an answer that it leaves no way to go on; the message says what to do."""


class GrammarBusyError(GrammarError):
    """A grammar that cannot be compiled now, as others that took too long still are."""

    def __init__(self) -> None:
        super().__init__("Grammars that took too long are still being compiled: try this one again in some minutes.")


class GrammarSlowError(GrammarError):
    """A grammar whose masks have come to take too long in the middle of an answer, as those of ambiguous ones do."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"The grammar takes {1000 * seconds:.0f} ms for each token by now, and others wait for it: "
            "write it so that a text can be read in one way alone."
        )


def library() -> Any:
    """Return the llguidance module, or raise a GrammarError that says how to install it."""
    try:
        import llguidance
    except ImportError:
        raise GrammarError(f"Grammars need llguidance, which is not installed: {install('grammar')}.") from None
    return llguidance


def read_tokenizer(tokenizer: Any, vocabulary: int, end_tokens: tuple[int, ...]) -> LLTokenizer:
    """Read the bytes of a tokenizer's tokens; takes about a second for 128,000 tokens.

    Raises:
        GrammarError: a tokenizer that is not a fast one.
    """
    library()
    from llguidance.hf import from_tokenizer

    try:
        return from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=list(end_tokens))
    except Exception as error:  # of Rust, in many kinds
        raise GrammarError(
            f"Grammars need a fast tokenizer of Hugging Face's that llguidance can read, and {type(tokenizer).__name__}"
            f" is none ({_first_line(error)}): load it with AutoTokenizer.from_pretrained(...)."
        ) from None


def translate(kind: str, text: str, whitespace: str) -> str:
    """Translate a grammar into llguidance's own language.

    Raises:
        GrammarError: a text that is no grammar of its kind.
    """
    if len(text) > CHARACTERS:
        raise GrammarError(f"The grammar has {len(text)} characters, and at most {CHARACTERS} are taken: shorten it.")
    if kind == "composed":
        return text
    matcher = library().LLMatcher
    try:
        if kind == "json_schema":
            _refuse_many_optional(json.loads(text))
            return str(matcher.grammar_from_json_schema(text, overrides=WHITESPACE[whitespace]))
        if kind == "regex":
            return str(matcher.grammar_from_regex(text))
        if kind == "choice":
            options = " | ".join(json.dumps(option) for option in json.loads(text))
            # One lexeme: of alternatives of a rule, the parser follows no more than `WAYS` at once.
            return str(matcher.grammar_from_lark(f"start: OPTION\nOPTION: {options}"))
        lark = text if _is_lark(text) else _in_time(kind, text, lambda: _from_gbnf(text))
        return str(matcher.grammar_from_lark(lark))
    except GrammarError:
        raise
    except Exception as error:
        raise GrammarError(f"The {NAMES[kind]} cannot be read ({_first_line(error)}): correct it.") from None


def _refuse_many_optional(schema: Any) -> None:
    """Refuse objects that the parser would give up in the middle of an answer, as it follows all that may come next."""
    left = [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            properties, required = part.get("properties"), part.get("required")
            names = set(properties) if isinstance(properties, dict) else set()
            if len(names - set(required if isinstance(required, list) else ())) > OPTIONAL:
                raise GrammarError(
                    f"An object of the schema has {len(names)} properties, and at most {OPTIONAL} may be optional: "
                    "require more of them, or put them into objects of their own."
                )
            left += part.values()
        elif isinstance(part, list):
            left += part


def _is_lark(text: str) -> bool:
    """Lark or GBNF, as the library decides, but line by line: its pattern takes hours on a megabyte of empty lines."""
    return any(re.match(r"\s*(%llguidance\b|start\s*:)", line) for line in text.split("\n"))


def _from_gbnf(text: str) -> str:
    from llguidance.gbnf_to_lark import gbnf_to_lark

    parts = text.count("::=") + text.count("#")
    if parts * len(text) > GBNF_WORK:  # it looks at all rules again for each
        raise GrammarError(
            f"The GBNF has {parts} rules and comments in {len(text)} characters, which takes too long: write Lark."
        )
    return str(gbnf_to_lark(text))


def compose(text: str, parts: Mapping[str, str]) -> str:
    """Join a Lark grammar and the grammars that it refers to as @name, in llguidance's own language.

    Args:
        text: in Lark.
        parts: the others, translated.
    """
    inner = [json.loads(part)["grammars"][0] if part[0] == "{" else {"lark_grammar": part} for part in parts.values()]
    named = [part | {"name": name} for name, part in zip(parts, inner, strict=True)]
    return json.dumps({"grammars": [{"lark_grammar": text}, *named]}, ensure_ascii=False)


@lru_cache(maxsize=64)
def check(kind: str, text: str, whitespace: str) -> None:
    """Refuse what `build` would refuse for any tokenizer.

    Raises:
        GrammarError: what the library cannot express, or a grammar beyond the limits of time and memory.
    """
    translated, library_ = translate(kind, text, whitespace), library()
    error = _in_time(kind, translated, lambda: library_.LLMatcher.validate_grammar(translated, limits=_limits()))
    if error:
        raise GrammarError(f"The {NAMES[kind]} cannot be used ({_first_line(error)}): correct or simplify it.")


def build(tokenizer: LLTokenizer, kind: str, text: str) -> LLMatcher:
    """Build a matcher at the beginning of a translated grammar; others are copied from it.

    Raises:
        GrammarError: what the library cannot express, or a grammar beyond the limits of time and memory.
    """
    llguidance = library()

    def work() -> LLMatcher:
        matcher = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # its tables for the beginning of a text, which copies share
        return matcher

    matcher = _in_time(kind, text, work)
    error = matcher.get_error()
    if error.startswith("NoExtension"):
        raise GrammarError(f"The {NAMES[kind]} allows no text at all: correct it.")
    if matcher.is_error():
        raise GrammarError(f"The {NAMES[kind]} cannot be used ({_first_line(error)}): correct or simplify it.")
    return matcher


def check_pace(tokenizer: LLTokenizer, kind: str, text: str) -> None:
    """Refuse a grammar whose masks would hold up all other answers: no limit of the library counts the length of texts.

    Args:
        tokenizer, kind, text: as `build` has taken them.

    Raises:
        GrammarError: it would.
    """
    llguidance = library()

    def work() -> float:
        matcher, taken = llguidance.LLMatcher(tokenizer, text, log_level=0, limits=_limits()), []
        for _ in range(PROBED):
            began = time.thread_time()
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            taken.append(time.thread_time() - began)
            tokens = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if not len(tokens) or not matcher.try_consume_tokens([int(tokens[len(tokens) // 2])]):
                break
        error = matcher.get_error()
        if len(taken) == 1 and error.startswith("lexer"):  # no token at all: each answer would make tables for nothing
            raise GrammarError(f"The {NAMES[kind]} cannot be followed ({_first_line(error)}): simplify it.")
        return float(np.median(taken[1:] or 0.0))  # the first makes tables for all that follow

    seconds = _in_time(kind, text, work)
    if seconds > MASK_SECONDS:
        raise GrammarError(
            f"The {NAMES[kind]} takes {1000 * seconds:.0f} ms for each token of an answer, and at most "
            f"{1000 * MASK_SECONDS:.0f} are given: shorten its longest texts."
        )


def _limits() -> Any:
    return library().LLParserLimits(max_items_in_row=WAYS, max_lexer_states=LEXER_STATES, verbose_errors=False)


def _in_time(kind: str, text: str, work: Callable[[], Made]) -> Made:
    """Return the result of `work` within `SECONDS`, run on a stack that no grammar text can overflow.

    The library lets go of the interpreter's lock meanwhile. Nothing can end a thread of it that takes too long, minutes
    it may be, and none of its limits does: so while more than a few go on, nothing new is begun. They keep their
    priority: one that is starved keeps the process waiting wherever it holds a lock on the process's memory.

    Raises:
        GrammarBusyError: too many go on.
        GrammarError: it takes too long, or more memory than there is.
        Exception: of `work`.
    """
    made: list[Made] = []
    failed: list[Exception] = []

    def run() -> None:
        try:
            made.append(work())
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True, name="grammar")
    with _starting:
        _left_behind[:] = [other for other in _left_behind if other.is_alive()]
        if len(_left_behind) >= MOST_LEFT_BEHIND:
            raise GrammarBusyError
        before = threading.stack_size(STACK + STACK_A_CHARACTER * len(text))
        try:
            thread.start()
        except RuntimeError:
            raise GrammarError(f"The {NAMES[kind]} needs more memory than there is: make it smaller.") from None
        finally:
            threading.stack_size(before)
    thread.join(SECONDS)
    if failed:
        raise failed[0]
    if not made:
        with _starting:
            _left_behind.append(thread)
        raise GrammarError(f"The {NAMES[kind]} was not compiled within {SECONDS:g} seconds: make it smaller.")
    return made[0]


class Matcher:
    """Follows one text, token by token, and says what may come next.

    Args:
        matcher: at the beginning of a text, its own.
        vocabulary: V, tokens that the model has.
        end_tokens: that end the text.
    """

    def __init__(self, matcher: LLMatcher, vocabulary: int, end_tokens: tuple[int, ...]) -> None:
        self._matcher, self._vocabulary, self._ends = matcher, vocabulary, end_tokens
        self._first, self._slow = True, 0  # whether no mask was made yet; how many took too long
        self._ended = False  # by an end token, which the library does not take where no text could follow
        self._mask = np.zeros((vocabulary + 31) // 32, dtype=np.int32)

    def consume(self, token: int) -> bool:
        """Go on by a token; False, and nothing has changed, where the grammar does not allow it here.

        Raises:
            GrammarError: the grammar takes more time or memory than its limits.
        """
        if self._ended or not 0 <= token < self._vocabulary:  # Rust would count -1 as a large one
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
        """BoolArray [V]: the tokens that may come next; end tokens where the text may end.

        Raises:
            GrammarSlowError: its masks take too long.
            GrammarError: the grammar takes more time or memory than its limits, or nothing can follow.
        """
        if self._ended:
            return np.zeros(self._vocabulary, dtype=np.bool_)
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            raise self._failed()
        took = time.thread_time() - began
        if took > SLOW_SECONDS and not self._first:  # the first one makes tables
            self._slow += 1
            if self._slow >= SLOW_MASKS:
                raise GrammarSlowError(took)
        self._first = False
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

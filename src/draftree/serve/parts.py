"""What the worker is given and gives: one answer that is wanted, and what it got since the last look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftree.engine import Emitted, SamplingParams
from draftree.engine.request import Request, StepTree


@dataclass(slots=True)
class Delta:
    """What one answer got since its last delta.

    Attributes:
        index: which answer of its request.
        text: new text, without what may become a stop string.
        emitted: the new tokens.
        pieces: where the rules keep trees or scores, what each of them adds to the text, a stop string included.
        trees: draft trees of the steps that brought them, where the rules keep them.
        end_token: the text of the special token that ended the answer, where special tokens are in the text; else "".
        finish: "stop", "length", "error" or "cancelled" (nobody reads it any more) with the last delta, else None.
        error: what ended the answer, with the finish "error".
    """

    index: int
    text: str = ""
    emitted: list[Emitted] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    trees: list[StepTree] = field(default_factory=list)
    end_token: str = ""
    finish: str | None = None
    error: BaseException | None = None

    def add(self, other: Delta) -> None:
        """Take in the delta that follows."""
        self.text += other.text
        self.emitted += other.emitted
        self.pieces += other.pieces
        self.trees += other.trees
        self.end_token, self.finish, self.error = other.end_token, other.finish, other.error


@dataclass(slots=True)
class Part:
    """One answer that is wanted.

    Attributes:
        prompt: token ids.
        params: of the engine.
        stops: strings that end it.
        include_stop: whether the text keeps the string that ended it.
        skip_special_tokens: leave EOS and the like out of the text.
        goes_on: whether the text goes on with that of the prompt, as completions do.
        min_tokens: a stop string that is complete within so many tokens of the answer does not end it.
        request: the engine's, once it has been added.
        given: its tokens that have become deltas.
        offset: where its next token begins in its text, for `text_offset`.
        added, joined: when it was added, and when it got a slot, by the clock of `Worker`.
        first, last: when its first and latest token came.
        finish: of its last delta.
    """

    prompt: Sequence[int]
    params: SamplingParams
    stops: Sequence[str] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    goes_on: bool = False
    min_tokens: int = 0
    request: Request | None = None
    given: int = 0
    offset: int = 0
    added: float = 0.0
    joined: float | None = None
    first: float | None = None
    last: float = 0.0
    finish: str | None = None

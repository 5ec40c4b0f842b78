"""Stop strings: where a text that comes in pieces is over, and what of it must wait."""

from __future__ import annotations

from collections.abc import Sequence

MOST_CHARACTERS = 1000  # of a stop string; so many may wait while it may still come


class StopStrings:
    """Passes text on, up to the first stop string; holds back what may become one.

    Each character is looked at once, whatever the length of the strings.

    Args:
        stops: the strings, none of them empty.
        include: whether the one that was found is passed on as well.

    Attributes:
        found: the stop string that ended the text; None while there was none.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str, *, may_end: bool = True) -> str:
        """What can be passed on now.

        Args:
            piece: what the text goes on with.
            may_end: False where a stop string that is complete within this piece is text like any other.
        """
        if not self._matchers:
            return piece
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [
            (len(self._held) + end - len(matcher.string), -len(matcher.string), matcher.string)
            for matcher in self._matchers
            if (end := matcher.feed(piece)) is not None
        ]
        if places and may_end:
            at, _, self.found = min(places)
            self._held = ""
            return text[: at + len(self.found)] if self._include else text[:at]
        cut = len(text) - max(matcher.length for matcher in self._matchers)
        self._held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Looks for one string in a text that comes in pieces, by the algorithm of Knuth, Morris and Pratt.

    Args:
        string: not empty.

    Attributes:
        length: how many characters at the end of the text the string begins with, less than all of it.
    """

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0
        # The failure function, by number of characters less one; made as far as it has been needed, so that a long
        # string costs nothing before the text begins like it.
        self._failure = [0]

    def feed(self, piece: str) -> int | None:
        """Where in `piece` the string ends for the first time; None where it does not."""
        string, failure, length, first = self.string, self._failure, self.length, None
        for at, character in enumerate(piece, 1):
            while length and string[length] != character:
                length = failure[length - 1]
            length += string[length] == character
            if length > len(failure):
                failure.append(self._border(character))
            if length == len(string):
                first = at if first is None else first
                length = failure[length - 1]
        self.length = length
        return first

    def _border(self, character: str) -> int:
        """The next value of the failure function, of the beginning that ends with `character`."""
        border = self._failure[-1]
        while border and self.string[border] != character:
            border = self._failure[border - 1]
        return border + (self.string[border] == character)

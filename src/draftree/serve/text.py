"""Stop strings: where a text that comes in pieces is over, and what of it must wait."""

from __future__ import annotations

from collections.abc import Sequence

MOST_CHARACTERS = 1000  # of a stop string; so many may wait while it may still come


class StopStrings:
    """Passes text on, up to the first stop string; holds back what may become one.

    Args:
        stops: the strings, none of them empty.
        include: whether the one that was found is passed on as well.

    Attributes:
        found: the stop string that ended the text; None while there was none.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._begun = dict.fromkeys(stops, 0)  # by stop string, how much of it the text ends with, less than all of it
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str, *, may_end: bool = True) -> str:
        """What can be passed on now.

        Args:
            piece: what the text goes on with.
            may_end: False where a stop string that is complete within this piece is text like any other.
        """
        if not self._begun:
            return piece
        if self.found is not None:
            return ""
        text, places = self._held + piece, []
        for stop, begun in self._begun.items():
            at = text.find(stop, len(self._held) - begun)
            if at >= 0:
                places.append((at, -len(stop), stop))
            longest = min(begun + len(piece), len(stop) - 1)
            self._begun[stop] = next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
        if places and may_end:
            at, _, self.found = min(places)
            self._held = ""
            return text[: at + len(self.found)] if self._include else text[:at]
        cut = len(text) - max(self._begun.values())
        self._held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return held

"""Stop strings: where a text that comes in pieces is over, and what of it must wait."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on, up to the first stop string; holds back what may become one.

    Args:
        stops: the strings, none of them empty.
        include: whether the one that was found is passed on as well.

    Attributes:
        found: the stop string that ended the text; None while there was none.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, piece: str) -> str:
        """What can be passed on now."""
        if not self._stops:
            return piece
        if self.found is not None:
            return ""
        text = self._held + piece
        places = [(at, -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if places:
            at, _, self.found = min(places)
            self._held = ""
            return text[: at + len(self.found)] if self._include else text[:at]
        hold = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """What was held back; the text is over."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that a stop string begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)

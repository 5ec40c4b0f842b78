"""The parser of answers by a tokenizer's response template, for answers of any kind: also cut off or broken."""

from __future__ import annotations

from typing import Any

from transformers.utils.chat_parsing import ResponseParser


class Regions(ResponseParser):
    """Hugging Face's parser, but no text is an error: a region that cannot be read ends with the event "region_broken".

    That event and "region_close" have the text of the whole region, markers included, under "raw".
    """

    _begin = _prompt = 0

    def __init__(self, template: Any, prefix: str, tools: list[Any]) -> None:
        super().__init__(template, prefix=prefix, tools=tools or None)
        self._prompt = len(self._buffer)  # where the answer's own text begins

    def rest(self) -> list[dict[str, Any]]:
        """The last events; in contrast to `finalize`, fields that the template requires may be missing."""
        events: list[dict[str, Any]] = []
        self._process(events, eos=True)
        return events

    def _accumulate(self, events: list[dict[str, Any]], text: str) -> None:
        known, held = len(events), max(0, self._prompt - self._pos)  # of the prompt, as it might have begun a marker
        super()._accumulate(events, text)
        for event in events[known:]:
            if event["type"] == "region_chunk":
                event["text"] = event["text"][held:]

    def _open_explicit(self, events: list[dict[str, Any]], field: Any, m: Any) -> None:
        self._begin = m.start()
        super()._open_explicit(events, field, m)

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        name, known = self._current, len(events)
        implicit = name == self._implicit_name
        raw = self._body if implicit else self._buffer[max(self._begin, self._prompt) : self._pos]
        try:
            super()._close_current(events)
        except Exception:  # parsers and transforms of templates raise what they like
            events.append({"type": "region_broken", "field": name})
            self._reset_to_implicit()
        for event in events[known:]:
            event["raw"] = raw

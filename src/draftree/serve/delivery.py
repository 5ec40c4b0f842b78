"""The answers of one HTTP request on their way from the worker's thread to the event loop that asked for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from draftree.serve.parts import Delta, Part


class Answers:
    """The answers of one HTTP request, as they come; belongs to the event loop that made it.

    A reader that is slow finds later deltas joined to one, so that no more than the answers themselves is kept.
    With `whole`, each answer comes as one delta at its end, and the event loop is not woken by every step.
    """

    def __init__(self, parts: list[Part], timeout: float, end: Callable[[Answers], None], *, whole: bool) -> None:
        self.parts, self.whole = parts, whole
        self.deadline = time.monotonic() + timeout
        self.abandoned = False  # nobody reads them any more
        self.begun: bool | None = None  # once their time was over, whether any of them had been begun by then
        self._end = end
        self.loop = asyncio.get_running_loop()
        self._ready: dict[int, Delta] = {}
        self._news = asyncio.Event()
        self._error: BaseException | None = None

    async def deltas(self, pause: float | None = None) -> AsyncIterator[Delta | None]:
        """Deltas until all answers have finished; leaving the loop earlier ends them.

        Args:
            pause: seconds of silence after which None comes, again and again; None for no such sign.

        Raises:
            Exception: whatever ended one of the answers with an error.
        """
        left = len(self.parts)
        try:
            while left:
                try:
                    async with asyncio.timeout(pause):
                        await self._news.wait()
                except TimeoutError:
                    yield None
                    continue
                self._news.clear()
                if self._error is not None:
                    raise self._error
                ready, self._ready = self._ready, {}
                for delta in ready.values():
                    left -= delta.finish is not None
                    yield delta
        finally:
            if left:
                self.cancel()

    def cancel(self) -> None:
        """End what still runs; its slots are free after the step under way."""
        self._end(self)

    def deliver(self, delta: Delta) -> None:
        """Called in the event loop with what a step brought."""
        known = self._ready.get(delta.index)
        if known is None:
            self._ready[delta.index] = delta
        else:
            known.add(delta)
        self._error = self._error or delta.error
        self._news.set()


def hand_over(news: Sequence[tuple[Answers, Delta]]) -> None:
    """Called in the event loop with what a step brought."""
    for answers, delta in news:
        answers.deliver(delta)

"""The answers of one HTTP request on their way from the worker's thread to the event loop that asked for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

from draftree.serve.parts import Delta, Part


class Silence:
    """Calls back whenever nothing has been sent for a while; belongs to the running event loop.

    One timer serves for many tokens: a timeout around each wait for one would cost as much as the token's JSON.

    Args:
        seconds: after which, again and again, to call back.
        on_silence: what is called.
    """

    def __init__(self, seconds: float, on_silence: Callable[[], None]) -> None:
        self._seconds, self._on_silence = seconds, on_silence
        self._loop = asyncio.get_running_loop()
        self.broken()
        self._timer = self._loop.call_later(seconds, self._look)

    def broken(self) -> None:
        """Something has been sent."""
        self._since = self._loop.time()

    def end(self) -> None:
        """Call back no more."""
        self._timer.cancel()

    def _look(self) -> None:
        left = self._since + self._seconds - self._loop.time()
        if left <= 0:
            self._on_silence()
            self.broken()
            left = self._seconds
        self._timer = self._loop.call_later(left, self._look)


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
        silence = None if pause is None else Silence(pause, self._news.set)
        try:
            while left:
                await self._news.wait()
                self._news.clear()
                if self._error is not None:
                    raise self._error
                ready, self._ready = self._ready, {}
                if not ready:
                    yield None
                elif silence is not None:
                    silence.broken()
                for delta in ready.values():
                    left -= delta.finish is not None
                    yield delta
        finally:
            if silence is not None:
                silence.end()
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

"""Errors: as clients of the OpenAI API expect them, and those with which the worker refuses or ends answers."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """What is wrong with a request, for whoever sent it.

    Args:
        message: one sentence, what is wrong and what to do.
        param: the field that it is about.
        status: of HTTP.
        code: a short name that programs may look for.
        retry_after: seconds after which to try again.
    """

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code, self.retry_after = message, param, status, code, retry_after

    @property
    def kind(self) -> str:
        """The API's name for errors of this status."""
        names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return names.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """As JSON."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Of the response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class GoneError(ApiError):
    """The client has gone away; so nobody reads this but the log."""

    def __init__(self) -> None:
        super().__init__("The client has gone away.", status=499)


class QueuedError(ApiError):
    """The time of a request was over before it was begun."""

    def __init__(self) -> None:
        message = "The server was busy until the time of this request was over: send it again, or later."
        super().__init__(message, status=503, retry_after=1)


class LateError(ApiError):
    """The time of a request was over before its prompt was scored."""

    def __init__(self) -> None:
        message = (
            "The time was over before the prompt was scored: allow more by draftree.timeout, or shorten the prompt."
        )
        super().__init__(message, code="timeout")  # not 408, after which clients send it again


class StoppingError(ApiError):
    """The server is shutting down: nothing new is taken, and what has not ended in time is broken off."""

    def __init__(self) -> None:
        message = "The server is shutting down: send the request to another, or later."
        super().__init__(message, status=503, retry_after=1)


class FullError(ApiError):
    """The queue is full; `retry_after` is in how many seconds it may not be."""

    def __init__(self, retry_after: int) -> None:
        message = f"The server is busy: try again in {retry_after} seconds."
        super().__init__(message, status=429, code="queue_full", retry_after=retry_after)

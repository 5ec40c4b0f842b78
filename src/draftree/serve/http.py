"""Define the errors of requests, and log lines that never contain their text."""

from __future__ import annotations

import logging
import sys
import traceback
from contextvars import ContextVar
from pathlib import Path
from typing import Any


class ApiError(Exception):
    """Report a wrong request to its client, with the wrong field as `param` and a short name for programs as `code`.

    A client should try again after `retry_after` seconds.
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
        """Return the API's name for errors of this status."""
        names = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return names.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """Return the body of the response."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers of the response."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class GoneError(ApiError):
    """Report in the log that the client has disconnected."""

    def __init__(self) -> None:
        super().__init__("The client has disconnected.", status=499)


class QueuedError(ApiError):
    """Report a request that timed out in the queue."""

    def __init__(self) -> None:
        super().__init__("The request timed out in the queue: send it again later.", status=503, retry_after=1)


class LateError(ApiError):
    """Report a request that timed out before its prompt was scored; clients would repeat it after the status 408."""

    def __init__(self) -> None:
        super().__init__("Scoring the prompt timed out: raise draftree.timeout, or shorten it.", code="timeout")


class StoppingError(ApiError):
    """Report that the server is shutting down."""

    def __init__(self) -> None:
        message = "The server is shutting down: send the request to another server, or later."
        super().__init__(message, status=503, retry_after=1)


class FullError(ApiError):
    """Report a full queue; `retry_after` estimates the seconds until it takes requests."""

    def __init__(self, retry_after: int) -> None:
        message = f"The server is busy: try again in {retry_after} seconds."
        super().__init__(message, status=429, code="queue_full", retry_after=retry_after)


log = logging.getLogger("draftree.serve")
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")


def log_failure(error: BaseException) -> None:
    """Log the kind and the place of the error that ended this request; its message may hold the client's text."""
    places = traceback.extract_tb(error.__traceback__)[-3:]
    at = ", ".join(f"{Path(place.filename).name}:{place.lineno}" for place in reversed(places))
    log.error("%s failed with %s at %s", REQUEST_ID.get(), type(error).__name__, at)


def start_logging() -> None:
    """Log to standard error, in a process of the server's own."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(name)s %(message)s")

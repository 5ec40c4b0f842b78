"""Errors of requests, and log lines, which never contain text of requests."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
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


log = logging.getLogger("draftree.serve")
FORMATS = ("text", "json")
REQUEST = "request"  # attribute of a record that tells of a request: a dict of its fields
REQUEST_ID: ContextVar[str] = ContextVar("REQUEST_ID", default="")  # of the request that is being answered


class JsonLines(logging.Formatter):
    """A record as one line of JSON: time (UTC, ISO 8601), level, logger, and the request's fields or the message."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        fields = getattr(record, REQUEST, None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_failure(error: BaseException) -> None:
    """Log what ended the request that is being answered: the kind of error and where, as its message may have text."""
    places = traceback.extract_tb(error.__traceback__)[-3:]
    at = ", ".join(f"{Path(place.filename).name}:{place.lineno}" for place in reversed(places))
    fields = {"request_id": REQUEST_ID.get(), "error": type(error).__name__, "at": at}
    log.error("%s failed with %s at %s", *fields.values(), extra={REQUEST: fields})


def start_logging(format: str) -> None:
    """Log to standard error in one of `FORMATS`, in a process that is the server's own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])

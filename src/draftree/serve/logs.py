"""How the server logs: lines for people, or one JSON object a line for programs. No line has text of a request."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

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

"""How the server logs: lines for people, or one JSON object a line for programs. No line has text of a request."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FORMATS = ("text", "json")
REQUEST = "request"  # attribute of a record that tells of a request: a dict of its fields


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


def start_logging(format: str) -> None:
    """Log to standard error in one of `FORMATS`, in a process that is the server's own."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if format == "json" else logging.Formatter("%(asctime)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])

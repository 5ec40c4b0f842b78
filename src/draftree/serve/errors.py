"""Errors as clients of the OpenAI API expect them."""

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

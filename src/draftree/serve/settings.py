"""The settings of a server, and the errors that it answers with."""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import sys
import traceback
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from draftree.errors import check_least, did_you_mean
from draftree.serve.templates import AUTO, PARSERS


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


class StoppingError(ApiError):
    """Report that the server is shutting down."""

    def __init__(self) -> None:
        message = "The server is shutting down: send the request to another server, or later."
        super().__init__(message, status=503, retry_after=1)


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


LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
KEYS = "DRAFTREE_API_KEYS"  # Environment variable with more API keys, joined by commas.


def keys_of(given: Iterable[str]) -> tuple[str, ...]:
    """Return the given API keys and the keys of the environment."""
    found = os.environ.get(KEYS)
    keys = [key.strip() for key in (found or "").split(",") if key.strip()]
    if found is not None and not keys:
        raise ValueError(f"{KEYS} is set and holds no key: give it one, or unset it for a server that is open to all.")
    return (*given, *keys)


def host_of(header: str) -> str:
    """Return the host in a Host header, in small letters and without its port."""
    header = header.strip().lower()
    if header.startswith("["):  # This is an IPv6 address.
        return header[1:].partition("]")[0]
    return header if header.count(":") > 1 else header.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The settings of a server that are options of `draftree serve` and of replicas on Ray."""

    slots: Annotated[int, "Requests decoded together."] = 8
    queue: Annotated[int, "Requests that may wait; more get status 429."] = 256
    max_prompt_tokens: Annotated[int | None, "Longest prompt; by default the model's context."] = None
    max_output_tokens: Annotated[int | None, "Most tokens of an output; by default the model's context."] = None
    max_choices: Annotated[int, "Most outputs of one request (n, prompts)."] = 64
    max_body_bytes: Annotated[int, "Longest body of a request."] = 4 << 20
    timeout: Annotated[float, "Seconds after which an output ends, with finish_reason 'length'."] = 600.0
    share: Annotated[bool, "Let all keys share what drafters learn and what the cache keeps."] = False
    tool_parser: Annotated[str, "How the model writes tool calls, by vLLM's names; none for text alone."] = AUTO
    images: Annotated[Path | None, "Folder of images that requests may name as file://NAME."] = None


@dataclass(frozen=True, kw_only=True)
class ServerSettings(Limits):
    """Hold the settings of a server.

    Attributes:
        model_name: name of the model in requests and responses.
        root: hub name or folder of the model, which requests may name too; empty for `model_name`.
        api_keys: keys that admit a request, stripped of blanks; empty admits all requests.
        body_seconds: longest time to receive a body.
        allowed_hosts: hosts that a Host header may name; others get status 421. Empty allows all. Pages of other sites
            whose names resolve to this machine (DNS rebinding) send their own name.

    Raises:
        ValueError: a number is out of range, or a key is empty.
    """

    model_name: str = "draftree"
    root: str = ""
    api_keys: tuple[str, ...] = ()
    body_seconds: float = 30.0
    allowed_hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = ("slots", "max_choices", "max_body_bytes", "max_prompt_tokens", "max_output_tokens")
        check_least(1, math.inf, **{name: getattr(self, name) for name in counts})
        check_least(0, math.inf, queue=self.queue)
        if self.images is not None and not self.images.is_dir():
            raise ValueError(f"images is {str(self.images)!r}, which is no folder: give the folder of the images.")
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout:g}: give seconds over 0.")
        if self.tool_parser not in PARSERS:
            hint = did_you_mean(self.tool_parser, PARSERS)
            raise ValueError(f"There is no tool parser {self.tool_parser!r}.{hint} Give {', '.join(PARSERS)}.")
        object.__setattr__(self, "allowed_hosts", tuple(map(host_of, self.allowed_hosts)))
        object.__setattr__(self, "api_keys", tuple(key.strip() for key in self.api_keys))
        if not all(self.api_keys):
            raise ValueError("An API key is empty: leave it out, or give it at least one character.")

    def key_of(self, authorization: str | None) -> str | None:
        """Return a short name of the key in the header "Bearer KEY"; None for an unknown key.

        Digests are compared in constant time.
        """
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest, found = hashlib.sha256(given.strip().encode()).digest(), None
        for key in self.api_keys:
            own = hashlib.sha256(key.encode()).digest()
            if hmac.compare_digest(own, digest):
                found = own.hex()[:16]
        return found

    def check_key(self, authorization: str | None) -> str | None:
        """Return the short name of a request's key, see `key_of`; None if the server has no keys."""
        found = self.key_of(authorization)
        if self.api_keys and found is None:
            message = "The API key is missing or unknown: send 'Authorization: Bearer KEY'."
            raise ApiError(message, status=401, code="invalid_api_key")
        return found

    def check_host(self, header: str) -> None:
        """Raise an ApiError of status 421 if the Host header names another host."""
        if self.allowed_hosts and host_of(header) not in self.allowed_hosts:
            own = ", ".join(self.allowed_hosts)
            message = f"This server answers for {own} and not for {header[:100]!r}: use one of these, or start it "
            raise ApiError(f"{message}with --allowed-host.", status=421)

    def cache_salt(self, key: str | None, user: str | None) -> str | None:
        """Return the cache salt of a key and its user, who share drafts and cached prompts; None for all."""
        if self.share or (key is None and user is None):
            return None
        return f"{key or ''}/{'' if user is None else hashlib.sha256(user.encode()).hexdigest()[:16]}"

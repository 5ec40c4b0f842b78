"""How a server is set up: names, limits and who may use it."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable
from dataclasses import dataclass

from draftree.serve.http import ApiError

SHARING = ("key", "all")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
KEYS = "DRAFTREE_API_KEYS"  # the environment variable with more API keys, joined by commas


def keys_of(given: Iterable[str]) -> tuple[str, ...]:
    """Return the given API keys, of which `ServerSettings` refuses empty ones, and those of the environment.

    Raises:
        ValueError: the environment variable is set and holds no key, as where a secret was not filled in.
    """
    found = os.environ.get(KEYS)
    keys = [key.strip() for key in (found or "").split(",") if key.strip()]
    if found is not None and not keys:
        raise ValueError(f"{KEYS} is set and holds no key: give it one, or unset it for a server that is open to all.")
    return (*given, *keys)


def host_of(header: str) -> str:
    """Return the host in a Host header, in small letters and without its port."""
    header = header.strip().lower()
    if header.startswith("["):  # an IPv6 address
        return header[1:].partition("]")[0]
    return header if header.count(":") > 1 else header.partition(":")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of a server.

    Attributes:
        model_name: what clients call the model.
        root: the hub name or folder that it was loaded from, by which clients may ask for it too; empty for
            `model_name`.
        api_keys: who presents one of these, of printable ASCII, may use the server; none lets everybody. Blanks around
            a key do not count.
        slots: requests decoded together.
        queue: requests that may wait for a slot; more are answered with status 429.
        max_prompt_tokens: longest prompt; None for the model's context.
        max_output_tokens: most tokens of one answer; None for the model's context.
        most_choices: most answers of one request: `n`, `best_of`, and prompts in a list.
        body_bytes: longest body of a request.
        body_seconds: time that a client has to send one.
        allowed_hosts: hosts that a request may name in its Host header; others get status 421. Empty allows all. A page
            of another site that has its own name resolve to this machine (DNS rebinding) sends that name.
        timeout: seconds after which an answer ends as it is, with finish_reason "length".
        sharing: "key" lets keys (and the `user`s of one key) share neither what drafters learned nor what the cache
            keeps; "all" shares both among all.

    Raises:
        ValueError: a number out of range, an unknown way of sharing, or a key that nobody could present.
    """

    model_name: str = "draftree"
    root: str = ""
    api_keys: tuple[str, ...] = ()
    slots: int = 8
    queue: int = 256
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    most_choices: int = 64
    body_bytes: int = 4 << 20
    body_seconds: float = 30.0
    allowed_hosts: tuple[str, ...] = ()
    timeout: float = 600.0
    sharing: str = "key"

    def __post_init__(self) -> None:
        counts = ("slots", "most_choices", "body_bytes", "max_prompt_tokens", "max_output_tokens")
        for name, least in (*((count, 1) for count in counts), ("queue", 0)):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int) and value >= least):
                raise ValueError(f"{name} is {value}: give a whole number of at least {least}.")
        if not self.timeout > 0:
            raise ValueError(f"timeout is {self.timeout:g}: give seconds over 0.")
        if self.sharing not in SHARING:
            raise ValueError(f"sharing is {self.sharing!r}: give 'key' or 'all'.")
        object.__setattr__(self, "allowed_hosts", tuple(map(host_of, self.allowed_hosts)))
        object.__setattr__(self, "api_keys", tuple(key.strip() for key in self.api_keys))
        if not all(self.api_keys):
            raise ValueError("An API key is empty: leave it out, or give it at least one character.")
        if not all(key.isascii() and key.isprintable() for key in self.api_keys):
            raise ValueError(
                "An API key has characters that clients cannot send: give letters, digits and signs of ASCII."
            )

    def key_of(self, authorization: str | None) -> str | None:
        """A short name of the key that a request presents, the same for every request; None for no known key.

        Compares digests, each with all keys, so that time tells nothing of them.

        Args:
            authorization: the header, "Bearer KEY".
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

    def check_host(self, header: str) -> None:
        """Refuse a request whose Host header names another server.

        Raises:
            ApiError: it does, with status 421.
        """
        if self.allowed_hosts and host_of(header) not in self.allowed_hosts:
            raise ApiError(
                f"This server answers for {', '.join(self.allowed_hosts)} and not for {header[:100]!r}: use one of "
                "these, or start it with --allowed-host.",
                status=421,
            )

    def cache_salt(self, key: str | None, user: str | None) -> str | None:
        """Within which requests of a key and of a user of it share what is learned; None among all."""
        if self.sharing == "all" or (key is None and user is None):
            return None
        return f"{key or ''}/{'' if user is None else hashlib.sha256(user.encode()).hexdigest()[:16]}"

"""Hooks and replaced methods that act on one thread alone.

They sit on the modules of a model that other threads may be calling meanwhile, Hugging Face's `generate` among them. To
those the modules are as they were.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def lock_of(model: nn.Module) -> threading.RLock:
    """The lock of all hooked passes through a model: one has its hooks there at a time."""
    with _making:
        return _locks.setdefault(model, threading.RLock())


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Means nothing to a hook."""


class _OnThread:
    """See `on_this_thread`. A copy, in that of a model which a thread makes in the middle of a pass, is `otherwise`."""

    def __init__(self, act: Callable[..., Any], otherwise: Callable[..., Any]) -> None:
        self._owner, self._act, self._otherwise = threading.get_ident(), act, otherwise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._act if threading.get_ident() == self._owner else self._otherwise)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._otherwise, memo)


def on_this_thread(act: Callable[..., Any], otherwise: Callable[..., Any] = _nothing) -> Callable[..., Any]:
    """`act` for calls on the present thread; others get `otherwise`, by default None, which means nothing to a hook."""
    return _OnThread(act, otherwise)


@contextmanager
def replaced(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Inside this context, calls of `module.name` on this thread are calls of `method`."""
    held = module.__dict__.get(name)  # of a wrapper, such as accelerate's
    module.__dict__[name] = on_this_thread(method, getattr(module, name))
    try:
        yield
    finally:
        if held is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = held

"""The base of drafters with a small model of their own.

The two models have one vocabulary, and both are decoder-only or both have an encoder: then the small one reads the same
source with an encoder of its own.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from draftree.checkpoints import pretrained
from draftree.drafting.base import ByRequest, Drafter, RequestState
from draftree.drafting.small_model import SmallModel
from draftree.published import refuse_published
from draftree.runner import Target, open_runner
from draftree.runner.weights.packed import parameter_count
from draftree.tree import TokenTree


class SecondModel(Drafter):
    """Base of the drafters that have a small model of their own; one may serve many calls, engines and threads."""

    padding: ClassVar[float] = 0.0  # share of the larger vocabulary by which the two may differ in size

    def __init__(self, model: Any, runner: str = "auto") -> None:
        self.model = model  # runners hold it weakly
        self._choice = runner
        self._live: ByRequest[Tensor | None] = ByRequest()  # source of each running request
        self._open()

    def _open(self) -> None:
        self._small = SmallModel(open_runner(self.model, self._choice))
        self._met: Callable[[], Any] = lambda: None  # the large model seen last
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the model and the options; a copy opens a runner of its own."""
        return {name: value for name, value in vars(self).items() if name not in ("_small", "_met", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    @classmethod
    def from_pretrained(cls, name: str | os.PathLike[str], tokenizer: Any = None, **options: Any) -> Self:
        """Load the small model from a folder or hub repository.

        Args:
            name: of Hugging Face's `from_pretrained`.
            tokenizer: the large model's; the small one's is compared with it if the repository has one.
            options: of the constructor; `dtype` and `device_map` go to Hugging Face.

        Raises:
            ValueError: the folder lacks weights or holds a published drafter, or the small model has another tokenizer.
        """
        from transformers import AutoTokenizer

        refuse_published(os.fspath(name))
        loading = {key: options.pop(key) for key in ("dtype", "device_map") if key in options}
        model = pretrained(name, **loading).eval()
        if tokenizer is not None:
            try:
                own = AutoTokenizer.from_pretrained(name)
            except (OSError, ValueError):
                own = None  # a model alone: only the sizes of the vocabularies can be compared
            if own is not None and own.get_vocab() != tokenizer.get_vocab():
                raise ValueError(
                    f"The small model {str(name)!r} has another tokenizer than the large one, so its draft tokens "
                    "would be other words: choose a small model of the same family."
                )
        return cls(model, **options)

    def bind(self, target: Target, *, eos_token_ids: Sequence[int] = ()) -> None:
        """See `Drafter.bind`."""
        with self._lock:
            runner = open_runner(self.model, self._choice)
            check_pair(runner.target, target, self.padding)
            if self._met() is not target.model:  # once for each model, as `generate` makes an engine for each call
                self._met = weakref.ref(target.model)
                warn_of_size(runner.target, target, stacklevel=5)
            if runner is not self._small.runner:  # its weights were changed, moved or cast
                self._small = SmallModel(runner)
                for request, source in self._live.items():
                    self._small.begin(request, source)

    def begin(self, request: RequestState) -> None:
        """See `Drafter.begin`."""
        with self._lock:
            self._live[request.id] = request.source
            self._small.begin(request.id, request.source)

    def end(self, request: RequestState) -> None:
        with self._lock:
            self._live.pop(request.id, None)
            self._small.end(request.id)

    def draft(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        runner = self._small.runner
        # A hooked runner must not run in the target's inference mode: stock modules may keep its tensors.
        with self._lock, runner.lock, torch.no_grad(), torch.inference_mode(runner.inference):
            return self._grow(requests, budgets)

    @abstractmethod
    def _grow(self, requests: Sequence[RequestState], budgets: Sequence[int]) -> TokenTree:
        """Return a tree for each request, with at most `budgets[b]` draft tokens."""

    def _reach(self, request: RequestState, depth: int) -> int:
        """Return the depth of a request's tree: `depth`, or less at the end of the answer or of a context."""
        limit = self._small.runner.target.max_positions or math.inf
        return max(int(min(depth, request.remaining - 1, limit - len(request.tokens) + 1)), 0)


def check_pair(small: Target, large: Target, padding: float = 0.0) -> None:
    """Check that two models have one vocabulary, and that both or neither read a source.

    Args:
        padding: share of the larger vocabulary by which their sizes may differ.
    """
    if large.encoder_decoder and not small.encoder_decoder:
        raise ValueError(
            f"The large model is an encoder-decoder ('{large.model_type}') and the small one is not, so it does not "
            "know what to write about: choose a small encoder-decoder, or use Lookahead, or no drafter."
        )
    if small.encoder_decoder and not large.encoder_decoder:
        raise ValueError(
            f"The small model is an encoder-decoder ('{small.model_type}') and the large one has no source for it to "
            "read: give a causal language model."
        )
    sizes = small.vocab_size, large.vocab_size
    if max(sizes) - min(sizes) > padding * max(sizes):
        raise ValueError(
            f"The small model has a vocabulary of {small.vocab_size} and the large one of {large.vocab_size}: "
            "choose a small model with the same tokenizer."
        )


def warn_of_size(small: Target, large: Target, stacklevel: int = 3) -> None:
    """Warn of a small model that is no smaller than the large one; `stacklevel` as of `warnings.warn`."""
    if parameter_count(small.model) >= parameter_count(large.model):
        warnings.warn(
            "The small model is no smaller than the large one, so drafting with it saves no time.",
            stacklevel=stacklevel,
        )

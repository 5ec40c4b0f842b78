"""draftree as a generation method of the Hub: `generate(..., custom_generate=REPOSITORY, trust_remote_code=True)`.

Several tokens per forward pass, with the text of plain decoding. Every model keeps one trie drafter of its own between
calls, which learns from what it sees.
"""

from __future__ import annotations

import copy
from typing import Any
from weakref import WeakKeyDictionary

_drafters: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def generate(
    model: Any, inputs: Any = None, drafter: Any = None, streamer: Any = None, tokenizer: Any = None, **options: Any
) -> Any:
    """`model.generate` with draftree's loop.

    Args:
        model: a Hugging Face model.
        inputs: as `generate` takes them.
        drafter: a drafter object such as `draftree.Medusa(...)`, or the folder or Hub name of a trained one; None takes
            the trie that the model keeps.
        streamer, tokenizer: as `generate` takes them.
        options: of `generate`.
    """
    import draftree

    if isinstance(drafter, str):
        drafter = draftree.load_drafter(drafter, model)
    if drafter is None:
        if model not in _drafters:
            _drafters[model] = draftree.Lookahead()
        drafter = _drafters[model]
    config = options.get("generation_config")
    if getattr(config, "stop_strings", None) is not None:  # Hugging Face would want the tokenizer, which the loop has
        options = {"stop_strings": config.stop_strings} | options | {"generation_config": copy.copy(config)}
        options["generation_config"].stop_strings = None
    loop = draftree.custom_generate(drafter, streamer=streamer, tokenizer=tokenizer)
    return model.generate(inputs, custom_generate=loop, **options)

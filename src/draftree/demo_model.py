"""The embedded model: a 4M-parameter llama that ships with the package.

It lets the demo, the tests and the quick benchmark run on a real language model with no network and no
download. It is fluent in the domains it was trained on and wrong in its facts; its data, recipe and licences
are described in the README next to the weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def demo_model() -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Load the embedded model and its tokenizer.

    Returns
    -------
    model
        A `LlamaForCausalLM` in fp32 on the CPU, in evaluation mode: 8 layers, hidden size 192, vocabulary
        4096, context 2048. Every call returns a model of its own.
    tokenizer
        Its byte-level BPE tokenizer, chat template included.

    Example
    -------
    >>> model, tokenizer = demo_model()
    >>> model.config.vocab_size
    4096
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # local_files_only keeps transformers from asking the hub about files (adapters, templates) that are not there.
    with embedded("chat_4m") as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer


@contextmanager
def embedded(name: str) -> Iterator[Path]:
    """Yield the folder of a model of the package; progress bars are off meanwhile."""
    # as_file unpacks the folder where the package is imported from an archive.
    with without_bars(), as_file(files("draftree") / "data" / name) as folder:
        yield folder


@contextmanager
def without_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers, which are noise for small files."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()  # put back, as the setting is global
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()

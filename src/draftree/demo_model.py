"""The embedded model: a llama of 4M parameters in the package, for demos, tests and quick benchmarks without a network.

It is fluent in the domains of its training, and wrong in its facts. The README beside the weights describes its data,
recipe and licences.
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

    Returns:
        (model, tokenizer): a new `LlamaForCausalLM` in float32 on the CPU, in evaluation mode (8 layers, hidden size
            192, vocabulary 4096, context 2048), and its byte-level BPE tokenizer with a chat template.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # With local_files_only, transformers does not ask the hub for missing files (adapters, templates).
    with embedded("chat_4m") as folder:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return model.eval(), tokenizer


@contextmanager
def embedded(name: str) -> Iterator[Path]:
    """Yield the folder of a model of the package; progress bars are off meanwhile."""
    # If the package is imported from an archive, as_file unpacks the folder.
    with without_bars(), as_file(files("draftree") / "data" / name) as folder:
        yield folder


@contextmanager
def without_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers, which are noise for small files."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()  # The setting is global.
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()

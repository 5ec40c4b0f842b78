"""Settings for every test: no network, two threads, and one embedded model for the whole run."""

import os

# Before transformers is imported anywhere, as the hub client reads it once at import.
os.environ["HF_HUB_OFFLINE"] = "1"

from typing import NamedTuple

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import draftree

# The results of fp32 sums depend on the number of threads; two is what small CI machines have.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))


class Demo(NamedTuple):
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase


@pytest.fixture(scope="session")
def demo() -> Demo:
    """The embedded model and tokenizer, shared by all tests: leave both as they are."""
    return Demo(*draftree.demo_model())

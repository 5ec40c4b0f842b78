"""draftree lets any Hugging Face model emit several tokens per forward pass without changing what it says.

This is the public face. What it names must import quickly: torch and transformers are imported where they are
used, so that a command which only prints its help does not wait for them.
"""

# `demo_model` is also the name of its module: imported here, once, so that the function is what stays bound.
from draftree.demo_model import demo_model

__version__ = "0.1.0.dev0"

__all__ = ["demo_model"]

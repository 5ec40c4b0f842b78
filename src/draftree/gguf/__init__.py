"""GGUF files: what is in them, and models whose weights stay in their blocks."""

from draftree.gguf.model import load_gguf as load_gguf

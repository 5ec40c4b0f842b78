"""Experiments under the names of the papers' tables and figures: a file a paper, and in a .toml the paper's numbers."""

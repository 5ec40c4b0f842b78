"""Experiments under the names of the papers' tables and figures, a file a paper, with the paper's own numbers."""

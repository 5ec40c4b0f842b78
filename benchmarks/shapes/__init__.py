"""Experiments on the size of draft trees: pruning, static and dynamic trees, merging, batches."""

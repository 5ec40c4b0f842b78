"""Which drafter, with which trie and trees, is fastest for a model, a text and a machine: `draftree tune`.

`record` runs the model once and keeps its answers; `replay` decodes those records again without the model; `space` is
what is looked through; `search` lets the best candidates run for real; `file` holds the choice; `check` compares replay
with real runs.
"""

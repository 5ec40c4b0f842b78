"""Which drafter, with which trie and trees, is fastest for a model, a text and a machine: `draftree tune`.

`prepare` divides the prompts; `record` runs the model once and keeps its answers; `replay` decodes those records again
without the model; `space` is what is searched; `live` runs candidates for real; `search` does all of it in the
time there is; `report` shows the choice, and `file` holds it; `check` compares replay with real runs.
"""

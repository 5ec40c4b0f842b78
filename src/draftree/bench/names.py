"""The names of the methods of `draftree bench`, the same on the command line and in result files, and their labels.

Loads nothing, so that the command line's help can list them.
"""

from __future__ import annotations

from pathlib import Path

from draftree.drafter_names import names_in
from draftree.errors import did_you_mean

REFERENCE, COMPILED, PROMPT_LOOKUP, ASSISTED = "hf-generate", "hf-compiled", "hf-prompt-lookup", "hf-assisted"
HOOKED, PLAIN, EAGER, GRAPHS = "draftree-hooked", "draftree", "draftree-eager", "draftree-cuda-graphs"
RUNNERS = {HOOKED: "hooked", PLAIN: "auto", EAGER: "eager", GRAPHS: "cuda_graphs"}  # plain decoding on each
COLD, WARM, REFUSED, LIMITED = "lookahead-cold", "lookahead-warm", "lookahead-rejected", "lookahead-16"
WITH_WARM_TRIE = (WARM, REFUSED, LIMITED)
NODES = 16  # most rows of the trees whose overhead is shown: the root, and draft tokens
SMALL = "draft-model"
LABELS = {
    REFERENCE: "HF generate",
    COMPILED: "HF static + compile",
    PROMPT_LOOKUP: "HF prompt lookup, 10",
    ASSISTED: "HF assisted",
    HOOKED: "plain, hooked runner",
    PLAIN: "plain, fastest runner",
    "prompt-lookup": "PromptLookup",
    SMALL: "DraftModel",
    "medusa": "Medusa",
    "hidden-transfer": "HiddenTransfer",
    "bita": "BiTA",
    COLD: "Lookahead, cold trie",
    WARM: "Lookahead, warm trie",
    REFUSED: "Lookahead, all refused",
    LIMITED: f"Lookahead, warm trie, up to {NODES - 1} draft tokens",
    EAGER: "plain, eager runner",
    GRAPHS: "plain, CUDA graphs",
}
HUGGING_FACE = tuple(name for name in LABELS if name.startswith("hf-"))
MERGED = f"{WARM}+hidden-transfer"
METHODS = (*(name for name in LABELS if name not in (LIMITED, EAGER, GRAPHS)), MERGED)  # those that all can run
NO_DRAFTERS = (*HUGGING_FACE, *RUNNERS, REFUSED, LIMITED)  # names that cannot be merged


def label_of(name: str) -> str:
    """What tables call the method `name`."""
    return " + ".join(LABELS.get(part, Path(part).name) for part in names_in(name))


def check_name(name: str) -> None:
    """Raise a ValueError for what names no method, and for a merge with something that is no drafter."""
    if Path(name).is_dir():
        return
    for part in name.split("+"):
        if not part:
            raise ValueError(f"{name!r} joins a name and nothing: give one on both sides of every +.")
        if part not in LABELS and not Path(part).is_dir():
            raise ValueError(
                f"There is no method {part!r}: choose {', '.join(LABELS)}, drafters joined by +, or the folder of a "
                f"trained drafter.{did_you_mean(part, LABELS)}"
            )
        if "+" in name and part in NO_DRAFTERS:
            raise ValueError(f"{part!r} is no drafter that can be merged: leave it out of {name!r}.")

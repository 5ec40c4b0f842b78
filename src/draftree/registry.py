"""The registry of drafters: the names that commands, folders, benchmarks and servers use, and their classes.

A new drafter is one entry here. The file imports no other room, so that the command line's help answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One drafter, or the early head of pruning.

    Attributes:
        module, class_name: where the class is.
        trained: whether it needs training for its model; the package has one for the embedded model.
        in_model: whether it is trained inside the model, and saved as a folder with `draftree_config.json`.
        drafts: False for early heads, which prune.
    """

    module: str
    class_name: str
    trained: bool = False
    in_model: bool = False
    drafts: bool = True

    def load(self) -> Any:
        """Return the class."""
        return getattr(import_module(self.module), self.class_name)


SMALL = "draft-model"  # The drafter with a second model, which is saved as a Hugging Face folder.
REGISTRY = {
    "lookahead": Entry("draftree.drafting.lookahead", "Lookahead"),
    "prompt-lookup": Entry("draftree.drafting.prompt_lookup", "PromptLookup"),
    "grammar": Entry("draftree.drafting.prompt_lookup", "GrammarDrafter"),
    "medusa": Entry("draftree.drafting.medusa", "Medusa", trained=True, in_model=True),
    "bita": Entry("draftree.drafting.bita", "BiTA", trained=True, in_model=True),
    "hidden-transfer": Entry("draftree.drafting.hidden_transfer", "HiddenTransfer", trained=True, in_model=True),
    SMALL: Entry("draftree.drafting.draft_model", "DraftModel", trained=True),
    "early-head": Entry("draftree.pruning.early", "EarlyHead", trained=True, in_model=True, drafts=False),
}
UNTRAINED = tuple(name for name, entry in REGISTRY.items() if not entry.trained)
TRAINED = tuple(name for name, entry in REGISTRY.items() if entry.trained and entry.drafts)
IN_MODEL = tuple(name for name, entry in REGISTRY.items() if entry.in_model)  # Methods that `save_pretrained` writes.

MTP = "mtp"  # The drafter that lies in the target's own checkpoint.
SHIPPED = "eagle-3"  # The EAGLE-3 head for SmolLM2-135M-Instruct that the package has.
DRAFTERS = ("none", *UNTRAINED, *TRAINED, MTP, SHIPPED)
CHOICE = (
    f"{', '.join(DRAFTERS)}, several joined by +, the folder or hub name of a drafter or small model, or a .json "
    "file that draftree tune wrote"
)


def names_in(name: str) -> list[str]:
    """Return the drafters that a name joins by +; a folder's name may contain one."""
    return [name] if Path(name).is_dir() else name.split("+")

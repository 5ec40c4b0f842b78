"""What a name stands for, on the command line and in a deployment: a drafter, a small model, an early head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from draftree.drafter_names import TRAINED, UNTRAINED, make_parts, names_in
from draftree.errors import did_you_mean

SMALL_ONES = ("demo", "small")  # names of the embedded model's small one in --bild
TUNED = ".json"  # ends the name of a file that draftree tune wrote
DRAFTERS = ("none", *UNTRAINED, *TRAINED)
CHOICE = (
    f"{', '.join(DRAFTERS)}, several joined by +, the folder of a drafter or small model, or a .json file that "
    "draftree tune wrote"
)


def check_drafter(name: str, trie: Path | None = None) -> None:
    """Refuse what `make_drafter` cannot make, before a model is loaded.

    Raises:
        ValueError: no such drafter, or an option that does not belong to it.
    """
    parts = names_in(name)
    if len(parts) > 1:
        for part in parts:
            if not part:
                raise ValueError(f"{name!r} joins a name and nothing: give one on both sides of every +.")
            check_drafter(part)
            if part == "none":
                raise ValueError(f"{name!r} merges with no drafter: leave 'none' out.")
            if part.endswith(TUNED):
                raise ValueError(f"{name!r} merges a tuned choice, which has its own trees: give it alone.")
        if trie is not None and "lookahead" not in parts:
            raise ValueError(f"--trie belongs to the lookahead drafter, which is not in {name!r}: leave it out.")
        return
    if name.endswith(TUNED):
        if not Path(name).is_file():
            raise ValueError(f"There is no tuned choice {name!r}: give a file that draftree tune wrote.")
    elif name not in DRAFTERS and not (name and Path(name).is_dir()):
        raise ValueError(f"There is no drafter {name!r}: choose {CHOICE}.{did_you_mean(name, DRAFTERS)}")
    if trie is not None and name != "lookahead":
        raise ValueError(f"--trie belongs to the lookahead drafter, not to {name!r}: leave one of them out.")


def make_drafter(name: str, tokenizer: Any, model: Any, *, trie: Path | None = None) -> Any:
    """The drafter called `name` on the command line: one of `DRAFTERS`, or a folder that training wrote.

    A folder without `draftree_config.json` is taken for a small model of Hugging Face's; names joined by + are merged;
    a .json file is what `draftree tune` chose, its trees included, and stands alone.

    Args:
        name: those of `TRAINED` are the embedded model's.
        tokenizer: the model's.
        model: the target.
        trie: a saved trie for Lookahead.

    Raises:
        ValueError: no such drafter, one trained for another model, or an option that does not belong to it.
    """
    from draftree.drafting import Lookahead
    from draftree.drafting.folder import demo_drafter, trained_drafter

    def trained(part: str) -> Any:
        if not part.endswith(TUNED):
            return trained_drafter(part, model, tokenizer)
        from draftree.tuning.file import load_tuned

        return load_tuned(part, model, tokenizer)

    check_drafter(name, trie)
    own: dict[str, Callable[[], Any]] = {method: partial(demo_drafter, method, model) for method in TRAINED}
    own["none"] = lambda: None
    if trie is not None and trie.exists():
        own["lookahead"] = lambda: Lookahead.load(trie, tokenizer)
    return make_parts(name, own, trained)


def make_bild(
    name: str,
    tokenizer: Any,
    model: Any,
    fallback_threshold: float | None,
    rollback_threshold: float | None,
    *,
    lossless: bool,
) -> Any:
    """BiLD of `model` and the small model called `name` on the command line.

    Args:
        name: a folder, or "demo" or "small" for the embedded model's own.
        tokenizer, model: the large model's.
        fallback_threshold, rollback_threshold: of `BiLD`; None for its default.
        lossless: of `BiLD`.

    Raises:
        ValueError: no such model, one that does not fit, or a threshold out of range.
    """
    from draftree.checkpoints import known_folder
    from draftree.drafting import BiLD
    from draftree.drafting.bild import check_options
    from draftree.drafting.folder import demo_drafter
    from draftree.runner import inspect_model

    given = {"fallback_threshold": fallback_threshold, "rollback_threshold": rollback_threshold}
    thresholds: dict[str, Any] = {option: value for option, value in given.items() if value is not None}
    check_options(**thresholds)
    if Path(name).is_dir():
        dtype = inspect_model(model).dtype
        return BiLD.from_pretrained(known_folder(name), tokenizer, dtype=dtype, lossless=lossless, **thresholds)
    if name not in SMALL_ONES:
        raise ValueError(f"There is no small model {name!r}: give its folder, or 'demo' for the embedded model's.")
    return BiLD(demo_drafter("draft-model", model).model, lossless=lossless, **thresholds)


def make_pruner(name: str | None, model: Any) -> Any:
    """Early pruning by the head in folder `name`, or the embedded model's for "demo"; None for None.

    Raises:
        ValueError: no such folder, or a head of another model.
    """
    from draftree.pruning import EarlyHead, EarlyPruning, demo_early_head

    if name is None:
        return None
    head = demo_early_head(model) if name == "demo" else EarlyHead.from_pretrained(Path(name), model)
    return EarlyPruning(head)

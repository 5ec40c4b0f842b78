"""Make drafters, BiLD's small model and early heads by the names of commands and deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftree.errors import did_you_mean
from draftree.published import RUN, kind_of, refuse_published
from draftree.registry import CHOICE, DRAFTERS, names_in

TUNED = ".json"  # Ending of files that draftree tune wrote.


def check_drafter(name: str, trie: Path | None = None) -> None:
    """Refuse a name that `make_drafter` does not know, before a model is loaded.

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
    elif name not in DRAFTERS:
        if not name or not ("/" in name or Path(name).is_dir()):
            raise ValueError(f"There is no drafter {name!r}: choose {CHOICE}.{did_you_mean(name, DRAFTERS)}")
        from draftree.drafting.folder import fetched

        folder = fetched(name)
        if kind_of(folder) not in RUN:
            refuse_published(folder)
    if trie is not None and name != "lookahead":
        raise ValueError(f"--trie belongs to the lookahead drafter, not to {name!r}: leave one of them out.")


def make_drafter(name: str, tokenizer: Any, model: Any, *, trie: Path | None = None) -> Any:
    """Return the drafter that a command names.

    - A name of `DRAFTERS`; several names joined by + are merged.
    - A folder that training wrote, or a published drafter's; a small Hugging Face model's; or their names on the hub.
    - A .json file of `draftree tune`, which sets the trees too and is not merged.

    Args:
        name: see above; names of `TRAINED` are drafters of the embedded model.
        tokenizer: the model's.
        model: the target.
        trie: a saved trie for Lookahead.

    Raises:
        ValueError: no such drafter, one trained for another model, or an option that does not belong to it.
    """
    from draftree.drafting import Lookahead, Merge
    from draftree.drafting.folder import named_drafter
    from draftree.tuned import load_tuned

    check_drafter(name, trie)
    if name == "none":
        return None
    if name.endswith(TUNED):
        return load_tuned(name, model, tokenizer)
    made = [
        Lookahead.load(trie, tokenizer)
        if part == "lookahead" and trie is not None and trie.exists()
        else named_drafter(part, model, tokenizer)
        for part in names_in(name)
    ]
    return made[0] if len(made) == 1 else Merge(made)


def as_drafter(given: Any, model: Any, tokenizer: Any = None) -> Any:
    """Return a drafter as given, or that of a name as `make_drafter` takes them.

    Raises:
        ValueError: as `make_drafter`.
    """
    return make_drafter(given, tokenizer, model) if isinstance(given, str) else given


def make_bild(
    name: str,
    tokenizer: Any,
    model: Any,
    fallback_threshold: float | None,
    rollback_threshold: float | None,
    *,
    lossless: bool,
) -> Any:
    """Return BiLD with the small model that a command names.

    Args:
        name: a folder, or "demo" for the embedded model's own.
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
    if name != "demo":
        raise ValueError(f"There is no small model {name!r}: give its folder, or 'demo' for the embedded model's.")
    return BiLD(demo_drafter("draft-model", model).model, lossless=lossless, **thresholds)


def make_pruner(name: str | None, model: Any) -> Any:
    """Return early pruning by the head in folder `name`, or the embedded model's for "demo"; None for None.

    Raises:
        ValueError: no such folder, or a head of another model.
    """
    from draftree.pruning import EarlyHead, EarlyPruning, demo_early_head

    if name is None:
        return None
    head = demo_early_head(model) if name == "demo" else EarlyHead.from_pretrained(Path(name), model)
    return EarlyPruning(head)

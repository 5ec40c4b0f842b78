"""What tuning has chosen, as a file: which drafter with which options and trees, for which model, and why.

`draftree_tune.json` is plain JSON; the trie that the choice starts from lies next to it. `load_tuned` makes the drafter
of it, the size of its trees included, so that one argument brings all of it to `generate`, the engine and the command
line.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from draftree.drafting import Drafter, Lookahead, Merge, PromptLookup
from draftree.drafting.folder import demo_drafter, model_hash, trained_drafter
from draftree.errors import LARGEST, brief
from draftree.files import is_whole, read_json, replacing, write_json
from draftree.registry import TRAINED
from draftree.runner import inspect_model
from draftree.runner.step_cost import chip_name
from draftree.shaping import DynamicTree, Fixed, Shape

FORMAT = 1
KINDS = ("lookahead", "prompt-lookup", "trained", "draft-model", "merge")
NAMED = ("trained", "draft-model")
LABELS = {"lookahead": "Lookahead", "prompt-lookup": "PromptLookup", "draft-model": "DraftModel"}


@dataclass(frozen=True, slots=True)
class Spec:
    """A drafter in plain values."""

    kind: str  # one of `KINDS`
    options: dict[str, Any] = field(default_factory=dict)  # of its constructor
    name: str | None = None  # of a trained drafter or small model: one of `TRAINED`, the embedded model's, or a folder
    warm: bool = False  # whether its trie starts from answers given while tuning
    parts: tuple[Spec, ...] = ()  # of a merge

    @property
    def label(self) -> str:
        """What tables call it."""
        if self.kind == "merge":
            return " + ".join(part.label for part in self.parts)
        if self.kind == "lookahead":
            return f"Lookahead, {'warm' if self.warm else 'cold'}"
        return LABELS.get(self.kind, "") or Path(str(self.name)).name

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; what is at its default is left out."""
        parts = [part.as_dict() for part in self.parts]
        entries = {"kind": self.kind, "options": self.options, "name": self.name, "warm": self.warm, "parts": parts}
        return {name: value for name, value in entries.items() if value}

    def renamed(self, change: Callable[[str], str]) -> Spec:
        """The same with other names, of its parts too."""
        name = None if self.name is None else change(self.name)
        return replace(self, name=name, parts=tuple(part.renamed(change) for part in self.parts))

    @classmethod
    def from_dict(cls, entries: dict[str, Any]) -> Spec:
        """The spec that `as_dict` wrote; ValueError where it is none."""
        if not isinstance(entries, dict) or entries.get("kind") not in KINDS:
            raise ValueError("no drafter of a known kind")
        kind, name, warm = entries["kind"], entries.get("name"), entries.get("warm", False)
        options, parts = entries.get("options", {}), entries.get("parts", [])
        named = isinstance(name, str) and 0 < len(name) < 1000 and "\0" not in name
        if named != (kind in NAMED) or not isinstance(options, dict) or not isinstance(warm, bool):
            raise ValueError(f"a {kind} that is not described as one")
        if bool(parts) != (kind == "merge") or any(part.get("kind") == "merge" for part in parts):
            raise ValueError("only a merge has parts, and none of them is a merge")
        return cls(kind, dict(options), name, warm, tuple(map(cls.from_dict, parts)))


def make(spec: Spec, model: Any, tokenizer: Any, trie: Callable[[Spec], Lookahead]) -> Drafter:
    """The drafter of a spec for `model`, whose tokenizer is only needed where a small model has to have the same.

    `trie` makes a Lookahead, which has seen answers where the spec is warm.
    """
    if spec.kind == "lookahead":
        return trie(spec)
    if spec.kind == "prompt-lookup":
        return PromptLookup(**spec.options)
    if spec.kind == "merge":
        return Merge([make(part, model, tokenizer, trie) for part in spec.parts])
    name = str(spec.name)
    made: Drafter = demo_drafter(name, model) if name in TRAINED else trained_drafter(name, model, tokenizer)
    return made


def shape_of(node_budget: int | None) -> Shape:
    """Trees of so many draft tokens in every step; trees sized by cost for None."""
    return DynamicTree() if node_budget is None else Fixed(node_budget)


def machine_of(model: Any) -> dict[str, Any]:
    """What of a machine a choice depends on."""
    return {
        "device": chip_name(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def write_tuned(
    path: Path,
    model: Any,
    spec: Spec | None,
    node_budget: int | None,
    why: list[str],
    more: dict[str, Any],
    trie: Lookahead | None,
    tokenizer: Any,
) -> list[Path]:
    """Write the choice to `path` (.json), with `more` entries, and its trie next to it; returns the paths written.

    `spec` is None for plain decoding, `node_budget` None for trees sized by cost; a warm spec starts from `trie`.
    """
    written = [path]
    trie_path = path.with_suffix(".trie")
    entries: dict[str, Any] = {
        "format": FORMAT,
        "model": {"hash": model_hash(inspect_model(model).model), "type": inspect_model(model).model_type},
        "machine": machine_of(model),
        "drafter": None if spec is None else spec.renamed(lambda name: _from(path.parent, name)).as_dict(),
        "shape": {"kind": "dynamic"} if node_budget is None else {"kind": "fixed", "node_budget": node_budget},
        "why": why,
    }
    if trie is not None:
        entries["trie"] = trie_path.name
        written.append(trie_path)
    with replacing(path) as temporary:  # the choice takes its place after its trie
        write_json(temporary, entries | more)
        if trie is not None:
            trie.save(trie_path, tokenizer)
    return written


def load_tuned(path: str | Path, model: Any, tokenizer: Any = None) -> Drafter | None:
    """The drafter that `draftree tune` chose for `model`, with its trees and its trie.

    Args:
        path: `draftree_tune.json`; its trie lies next to it.
        model: the Hugging Face model that was tuned for.
        tokenizer: the model's; needed where the choice has a trie.

    Returns:
        A drafter to pass as `drafter=`; None where plain decoding was fastest. It knows the size of its trees
        (`Drafter.node_budget`), so that no other argument is needed.

    Raises:
        ValueError: no such file or no choice in it, another model, or a trie without a tokenizer; one sentence.

    Warns:
        UserWarning: the choice was made on another device, type or number of threads, where something else may be best.
    """
    path = Path(path)
    tuned = _read(path)
    if tuned["model"]["hash"] != model_hash(inspect_model(model).model):
        raise ValueError(
            f"{path} was tuned for another model (a {brief(tuned['model']['type'])} with other weights or dtype): run "
            "draftree tune with this one."
        )
    for name, value in machine_of(model).items():
        before = tuned["machine"].get(name, value)
        if before != value:
            warnings.warn(
                f"{path} was tuned with {name} {brief(before)}, and this is {value}: something else may "
                "be faster here; draftree tune finds out.",
                stacklevel=2,
            )
    if tuned["drafter"] is None:
        return None

    def trie(spec: Spec) -> Lookahead:
        if not spec.warm:
            return Lookahead(**spec.options)
        if tokenizer is None:
            raise ValueError(f"{path} comes with a trie, which is checked by its tokenizer: pass tokenizer=.")
        trie_path = path.with_name(str(tuned.get("trie")))
        if not trie_path.is_file():
            raise ValueError(
                f"{path} starts from the trie {trie_path.name!r}, which is not next to it: copy both files."
            )
        return Lookahead.load(trie_path, tokenizer)

    spec = tuned["drafter"].renamed(lambda name: _at(path, name))
    try:
        drafter = make(spec, model, tokenizer, trie)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{path} cannot be used: {brief(error)}.") from None
    drafter.node_budget = tuned["node_budget"]
    return drafter


def _from(folder: Path, name: str) -> str:
    """A drafter's folder as seen from the choice's own, never a name of `TRAINED`, which stays."""
    if name in TRAINED:
        return name
    relative = os.path.relpath(name, folder)
    return os.path.join(".", relative) if relative in TRAINED else relative


def _at(path: Path, name: str) -> str:
    """What `_from` has written, as `make` takes it: a drafter's whole path, or a name of `TRAINED`."""
    folder = path.parent.absolute() / name
    if name not in TRAINED and not os.path.isdir(folder):
        raise ValueError(
            f"{path} names the drafter {brief(repr(name))}, which is not there: put it back, or run draftree tune."
        )
    return name if name in TRAINED else str(folder)


def _read(path: Path) -> dict[str, Any]:
    """The checked entries of a file; the `drafter` as a `Spec`."""
    if not path.is_file():
        raise ValueError(f"There is no tuned choice {str(path)!r}: give a file that draftree tune wrote.")
    try:
        entries: dict[str, Any] = read_json(path)
        found = entries["format"]
        if found == FORMAT:
            return _checked(entries)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} holds no choice of draftree tune: give a file that it wrote.") from None
    raise ValueError(f"{path} is of format {brief(repr(found))}, and this draftree reads {FORMAT}: run draftree tune.")


def _checked(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries, with the drafter as a `Spec`; any error where they are not what `write_tuned` writes."""
    model, drafter, shape, trie = entries["model"], entries["drafter"], entries["shape"], entries.get("trie")
    budget = shape["node_budget"] if shape["kind"] == "fixed" else None
    if not (budget is None or is_whole(budget, 0, LARGEST)) or shape["kind"] not in ("fixed", "dynamic"):
        raise ValueError("shape")
    if not isinstance(model["hash"], str) or not isinstance(model["type"], str):
        raise ValueError("model")
    if trie is not None and (Path(trie).name != trie or len(trie) > 255 or "\0" in trie):
        raise ValueError("trie")
    read = {"drafter": None if drafter is None else Spec.from_dict(drafter), "machine": dict(entries["machine"])}
    return entries | read | {"node_budget": budget}

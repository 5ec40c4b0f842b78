"""What an experiment is given: a model, drafters that fit it, prompts, and its options.

Everything is made when it is first needed, so that an experiment which needs no model loads none. Options that
experiments share, where they have them: `per_set` (prompts of every set), `max_new_tokens`, `nodes` (draft tokens of a
step), `warm_per_set` (other prompts of every set whose answers the trie has seen), `drafters`, `sets` (prompts of these
alone, where there are any).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import draftree
from benchmarks.drafters.early_exit import SelfSpeculative
from benchmarks.drafters.jacobi import Jacobi
from benchmarks.harness.inputs import Settings, Subject, Texts, encode_all
from benchmarks.harness.parts import make_parts
from draftree import registry
from draftree.bench.measure import Task
from draftree.bench.methods import Draftree
from draftree.checkpoints import Placement
from draftree.demo_model import without_bars
from draftree.drafting import Drafter
from draftree.drafting.folder import Trained, demo_drafter
from draftree.drafting.published.eagle import Eagle3
from draftree.models import encode_prompt
from draftree.prompts import Prompt, Watcher, embedded_prompts
from draftree.published import kind_of
from draftree.runner import inspect_model

TRIE, COLD = "lookahead", "lookahead-cold"  # warmed by the answers to other prompts, or empty
TRAINED = (*registry.TRAINED, "early-head")
BASELINES = ("jacobi", "self-speculative")  # of the papers, in `benchmarks.drafters`
KNOWN = (*registry.UNTRAINED, COLD, *BASELINES, *TRAINED, registry.MTP, registry.SHIPPED)


@dataclass
class Setup:
    """All that an experiment is given."""

    options: Mapping[str, Any]  # of the experiment, by name
    name: str | None = None  # of the model, a folder or hub name; None for the embedded one
    params: str | None = None  # inflate it to about so many parameters, such as "60M"; None for the model itself
    # To measure on, and others for tries and searches.
    prompts: Sequence[Prompt] = field(default_factory=embedded_prompts)
    watcher: Watcher = field(default_factory=Watcher)  # shows progress
    out: Path | None = None  # folder for what an experiment keeps; None for none
    placement: Placement | None = None  # device and type of the model; None for the defaults

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

    @cached_property
    def subject(self) -> Subject:
        """Return the model as it is named."""
        return Subject.load(self.name, self.placement)

    @cached_property
    def inflated(self) -> Subject:
        """Return the same inflated, where it is to be; raise a ValueError if it cannot be."""
        return self.subject.inflated(self.params)

    @property
    def small(self) -> Any:
        """Return the model before it was inflated; or the model itself."""
        return self.subject.trained_for

    @property
    def tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        return self.subject.tokenizer

    @property
    def model(self) -> Any:
        """Return the model that is measured."""
        return self.inflated.model

    def save(self, model: Any, folder: Path) -> None:
        """Write a model and the tokenizer to a folder, as Hugging Face does."""
        with without_bars():
            model.save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

    def encode(self, text: str) -> list[int]:
        """Return token ids of a prompt, through the chat template where there is one."""
        return encode_prompt(self.tokenizer, text)

    @cached_property
    def target(self) -> Any:
        """Return the facts of the model."""
        return inspect_model(self.model)

    @cached_property
    def encoded(self) -> Texts:
        """Return the prompts as token ids, of turns the first; raise a ValueError for what cannot be measured."""
        chosen = [p for p in self.prompts if p.set in self.options.get("sets", ())] or self.prompts
        warm = self.options.get("warm_per_set", 8)
        settings = Settings(self["per_set"], self["max_new_tokens"], warm_per_set=warm)
        return encode_all(self.subject, [replace(prompt, later=()) for prompt in chosen], settings)

    @property
    def tasks(self) -> list[Task]:
        """Return the measured prompts."""
        return self.encoded.tasks

    @property
    def lessons(self) -> list[list[int]]:
        """Return token ids of other prompts, for what must not be learned or chosen on the measured ones."""
        return self.encoded.lessons

    @property
    def searched_on(self) -> list[list[int]]:
        """Return the lessons, for a search that cannot do without: a ValueError if there are none."""
        if not self.lessons:
            raise ValueError("There are no prompts but the measured ones to search a tree on: give more prompts.")
        return self.lessons

    @property
    def sets(self) -> list[str]:
        """Return the names of the measured sets."""
        return self.encoded.sets

    # ---------------------------------------------------------------- drafters

    @cached_property
    def texts(self) -> list[list[int]]:
        """Return the model's answers to the lessons, for a trie to have seen."""
        self.watcher.stage("answers for the trie", len(self.lessons))
        teacher, texts = Draftree("", self.small, self["max_new_tokens"], draftree.Lookahead), []
        for prompt in self.lessons:
            texts.append(teacher.answer(prompt).ids)
            self.watcher.step()
        return texts

    def trie(self, texts: Sequence[Sequence[int]] | None = None, **options: Any) -> draftree.Lookahead:
        """Return a trie of these options that has seen `texts`; the lessons' answers where none are given."""
        drafter = draftree.Lookahead(**options)
        drafter.warm(self.texts if texts is None else texts)
        return drafter

    def trained(self, name: str) -> Any:
        """Return the trained drafter or early head of a name or folder, for this model.

        One that is not there, or of another model, is a ValueError.
        """
        if name == SelfSpeculative.method:
            return SelfSpeculative(self.model)
        if name in (registry.MTP, registry.SHIPPED) or (Path(name).is_dir() and kind_of(name) is not None):
            held = draftree.load_drafter(name, self.small)
        elif Path(name).is_dir():
            held = Trained.from_pretrained(name, self.small)
        else:  # the package's own are of its weights as they are stored, in float32
            stored = self.small if self.name or self.small.dtype == torch.float32 else draftree.demo_model()[0]
            try:
                held = draftree.demo_early_head(stored) if name == "early-head" else demo_drafter(name, stored)
            except ValueError as error:
                if self.name is None:
                    raise
                how = "--early-head FOLDER" if name == "early-head" else f"--drafter {name}=FOLDER"
                raise ValueError(f"The package's {name} is not for this model: name one that is by {how}.") from error
        return self.inflated.fitted(held) if isinstance(held, Trained | Eagle3) else held

    def drafter(self, name: str) -> Drafter:
        """Return a drafter of that name as it is before the first prompt; several, joined by +, are merged."""
        made: Drafter = make_parts(name, {TRIE: self.trie, COLD: draftree.Lookahead, "jacobi": Jacobi}, self.trained)
        return made

    @cached_property
    def named(self) -> dict[str, str]:
        """Return the option `drafters` by the names of tables, from NAME, FOLDER or NAME=FOLDER.

        Raises:
            ValueError: none, an empty name, or two of one name.
        """
        found: dict[str, str] = {}
        for entry in self["drafters"]:
            name, sign, folder = entry.partition("=")
            name, folder = (name, folder) if sign else (Path(entry).name, entry)
            if not name or not folder:
                raise ValueError(f"A drafter is given as {entry!r}: give NAME, FOLDER or NAME=FOLDER.")
            if name in found:
                raise ValueError(f"Two drafters are called {name!r}: give each a name of its own, as NAME=FOLDER.")
            for part in registry.names_in(folder):
                if part not in KNOWN and not Path(part).is_dir():
                    known = ", ".join(KNOWN)
                    raise ValueError(f"There is no drafter {part!r}: choose {known}, or the folder of a trained one.")
            found[name] = folder
        if not found:
            raise ValueError("There is no drafter to look at: add --drafter NAME=FOLDER, once for each.")
        return found

"""The methods of `draftree bench` by name: Hugging Face's ways of decoding, ours, and merged drafters.

`names` has their names. What a method needs and does not get here, such as a small model for a model that has none,
stands in place of its figures.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from draftree.bench import names
from draftree.bench.inputs import Settings, Subject
from draftree.bench.methods import CompiledHuggingFace, Draftree, HuggingFace, Method, teach
from draftree.drafter_names import TRAINED, make_parts, names_in
from draftree.drafting import Drafter, DraftModel, Lookahead
from draftree.drafting.folder import demo_drafter, load_drafter
from draftree.engine.limits import eos_token_ids
from draftree.progress import Watcher
from draftree.shaping import DynamicTree, Shape

EMBEDDED_ALONE = "the package has one for the embedded model alone"


class LeftOutError(ValueError):
    """A method that cannot be measured here; the message says why."""


@dataclass(frozen=True, slots=True)
class WarmTrie:
    """Lookahead as it is after it has answered other prompts: every round starts from the same state.

    A round's copy goes on learning, as in production; without a copy the second round would draft from its own answers
    to the very same prompts.
    """

    # What the trie has seen: token ids of prompts, and of their answers.
    answers: Sequence[tuple[Sequence[int], Sequence[int]]] = field(repr=False)
    calibrated: Shape  # the shape, as these answers have calibrated it
    ends: tuple[int, ...] = ()  # the model's EOS tokens

    @classmethod
    def learn(cls, model: Any, lessons: Sequence[Sequence[int]], new: int, watcher: Watcher) -> WarmTrie:
        """Answer `lessons` (token ids of prompts) with up to `new` tokens each."""
        watcher.stage("warming the trie", len(lessons))
        teacher = Draftree("", model, new, Lookahead, DynamicTree)
        answers = []
        for ids in lessons:
            answers.append((ids, teacher.answer(ids).ids))
            watcher.step()
        assert teacher.shape is not None
        return cls(answers, teacher.shape, eos_token_ids(model))

    def drafter(self) -> Lookahead:
        """A drafter with a trie of its own that has seen the answers."""
        made = Lookahead(eos_token_ids=self.ends)
        for ids, answer in self.answers:
            teach(made, ids, answer)
        return made

    def shape(self) -> Shape:
        """A copy of the calibrated shape."""
        return copy.deepcopy(self.calibrated)


@dataclass(frozen=True, slots=True)
class Kit:
    """What methods are made of."""

    subject: Subject
    settings: Settings
    warm: WarmTrie | None = None  # a warmed trie; None where there are no prompts to warm it with
    # A small Hugging Face model of the same vocabulary; None for the embedded model's own, if it is that.
    assistant: Any = None

    @property
    def model(self) -> Any:
        """The model that is measured."""
        return self.subject.model

    def methods(self, chosen: Sequence[str]) -> tuple[list[Method], dict[str, str]]:
        """The methods of these names that can be made, and by name why another cannot."""
        made, left_out = [], {}
        for name in chosen:
            try:
                made.append(self.method(name))
            except LeftOutError as why:
                left_out[name] = str(why)
        return made, left_out

    def method(self, name: str) -> Method:
        """The method called `name`; several names joined by + are drafters merged, a folder is a trained drafter.

        Raises:
            LeftOutError: it cannot be measured with this model or these options.
        """
        if name in names.HUGGING_FACE:
            return self._hugging_face(name)
        if name in names.RUNNERS:
            plain = self._draftree(name, runner=names.RUNNERS[name])
            plain.optional = name == names.PLAIN  # not every model qualifies
            return plain
        if name == names.LIMITED:
            return self._draftree(name, self.maker(names.WARM), lambda: DynamicTree(names.NODES - 1))
        if name in (names.WARM, names.REFUSED):
            make = self.maker(names.WARM)
            assert self.warm is not None
            return self._draftree(name, make, self.warm.shape, reject_drafts=name == names.REFUSED)
        drafted = self._draftree(name, self.maker(name))
        drafted.optional = names.SMALL in names_in(name)  # whose vocabulary may be another
        return drafted

    def maker(self, name: str) -> Callable[[], Drafter]:
        """What makes the drafter called `name`, anew for each round; a LeftOutError where it cannot be made here."""
        own: dict[str, Callable[[], Drafter]] = {names.COLD: Lookahead}
        for part in names_in(name):
            if part == names.WARM:
                if self.warm is None:
                    raise LeftOutError("no prompts to warm the trie with")
                own[part] = self.warm.drafter
            elif part == names.SMALL:
                own[part] = partial(DraftModel, self.draft_model())
            elif part in TRAINED:
                self._trained(part)  # tried before anything runs
            elif Path(part).is_dir():  # whatever it is called
                own[part] = partial(self._trained, part)
        return partial(make_parts, name, own, self._trained)

    def draft_model(self) -> Any:
        """The small model that assists, given or the embedded model's own; a LeftOutError where there is none."""
        if self.assistant is not None:
            return self.assistant
        try:
            return demo_drafter("draft-model", self.subject.trained_for).model
        except ValueError:
            raise LeftOutError(f"{EMBEDDED_ALONE}: name one with --assistant") from None

    def _trained(self, name: str) -> Drafter:
        """The drafter of a folder, or a trained one of the package, inflated where the model was."""
        if name not in TRAINED:
            folder: Drafter = load_drafter(Path(name), self.model)
            return folder
        try:
            held = demo_drafter(name, self.subject.trained_for)
        except ValueError:
            raise LeftOutError(EMBEDDED_ALONE) from None
        return self.subject.fitted(held)

    def _hugging_face(self, name: str) -> Method:
        given = (name, self.model, self.settings.max_new_tokens, self.settings.sampling)
        if name == names.COMPILED:
            if not self.settings.compiled:
                raise LeftOutError("--no-compile")
            return CompiledHuggingFace(*given)
        if name == names.PROMPT_LOOKUP:
            return HuggingFace(*given, prompt_lookup_num_tokens=10)
        if name == names.ASSISTED:
            return HuggingFace(*given, assistant_model=self.draft_model())
        return HuggingFace(*given)

    def _draftree(self, name: str, *making: Callable[[], Any], **options: Any) -> Draftree:
        settings = self.settings
        return Draftree(name, self.model, settings.max_new_tokens, *making, sampling=settings.sampling, **options)


def make_kit(
    subject: Subject, lessons: Sequence[Sequence[int]], settings: Settings, watcher: Watcher, assistant: Any = None
) -> Kit:
    """A kit whose trie has answered `lessons`, with the small model where there is one: both give the same answers."""
    warm = WarmTrie.learn(subject.trained_for, lessons, settings.max_new_tokens, watcher) if lessons else None
    return Kit(subject, settings, warm, assistant)

"""The methods of `draftree bench` by name: Hugging Face's ways of decoding, ours, and merged drafters.

A name stands for a method in result files, on the command line and in tables (with its label). What a method needs and
does not get here, such as a small model for a model that has none, stands in place of its figures.
"""

from __future__ import annotations

import copy
import difflib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.bench.inflate import inflate_drafter
from draftree.bench.methods import CompiledHuggingFace, DraftingHuggingFace, Draftree, HuggingFace, Method, Sampling
from draftree.drafting import Drafter, DraftModel, Jacobi, Lookahead, Merge, PromptLookup
from draftree.drafting.folder import demo_drafter, load_drafter
from draftree.runner import open_runner
from draftree.shaping import DynamicTree, Shape

REFERENCE, COMPILED, PROMPT_LOOKUP, ASSISTED = "hf_generate", "hf_compiled", "hf_prompt_lookup", "hf_assisted"
HOOKED, PLAIN = "draftree_hooked", "draftree_loop"
TENSORS, CAPTURED = "draftree_tensors", "draftree_captured"  # other ways of the latter
WAYS = {TENSORS: "eager", CAPTURED: "cuda_graphs"}  # as `Runner.form` says
COLD, WARM, REFUSED = "lookahead_cold", "lookahead_warm", "lookahead_rejected"
NODES = 16  # most rows of the trees whose overhead is shown: the root, and draft tokens
LIMITED = "lookahead_16"
SMALL, SELF = "draft_model", "self_speculative"
LABELS = {
    REFERENCE: "HF generate",
    COMPILED: "HF static + compile",
    PROMPT_LOOKUP: "HF prompt lookup, 10",
    ASSISTED: "HF assisted",
    HOOKED: "plain, hooked runner",
    PLAIN: "plain, eager runner",
    "prompt_lookup": "PromptLookup",
    "jacobi": "Jacobi",
    SMALL: "DraftModel",
    SELF: "SelfSpeculative",
    "medusa": "Medusa",
    "hidden_transfer": "HiddenTransfer",
    "bita": "BiTA",
    COLD: "Lookahead, cold trie",
    WARM: "Lookahead, warm trie",
    REFUSED: "Lookahead, all refused",
}
HUGGING_FACE = tuple(name for name in LABELS if name.startswith("hf_"))
NO_DRAFTS = (*HUGGING_FACE, HOOKED, PLAIN, REFUSED)  # names that cannot be merged
MORE_LABELS = {
    LIMITED: f"Lookahead, warm trie, up to {NODES - 1} draft tokens",
    TENSORS: "plain, tensors",
    CAPTURED: "plain, captured",
}  # of `bench speed` and `bench gpu`
TRAINED = ("medusa", "hidden_transfer", "bita")
NO_LESSONS = "no prompts to warm the trie with"
EMBEDDED_ALONE = "the package has one for the embedded model alone"


class LeftOutError(ValueError):
    """A method that cannot be measured here; the message says why."""


class WarmTrie:
    """A Lookahead that has answered other prompts, kept so that every round starts from the same state.

    A round's copy goes on learning, as in production; without a copy the second round would draft from its own answers
    to the very same prompts.
    """

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._drafter, self._shape = Lookahead(), DynamicTree()
        self._teacher = Draftree("", "", model, max_new_tokens, lambda: self._drafter, lambda: self._shape)
        self._folder = tempfile.TemporaryDirectory(prefix="draftree-bench-")
        self._file = Path(self._folder.name) / "warm.trie"
        self.answered = 0

    def learn(self, ids: Sequence[int]) -> None:
        """Answer one more prompt."""
        self._teacher.answer(ids)
        self.answered += 1

    def keep(self) -> None:
        """Save the trie: `drafter` loads copies of it."""
        self._drafter.save(self._file, self._tokenizer)

    def drafter(self) -> Lookahead:
        """A copy of the trie."""
        return Lookahead.load(self._file, self._tokenizer)

    def shape(self) -> Shape:
        """A copy of the shape as the prompts have calibrated it."""
        return copy.deepcopy(self._shape)


@dataclass(frozen=True, slots=True)
class Kit:
    """What methods are made of.

    Attributes:
        model: a decoder-only model.
        max_new_tokens: most tokens of an answer.
        sampling: how tokens are sampled; None decodes greedily.
        warm: a warmed trie; None where there are no prompts to warm it with.
        assistant: a small Hugging Face model of the same vocabulary; None for the embedded model's own, if it is that.
        compiled: whether to measure torch.compile.
        small, size: what `model` was inflated from, for which the package's drafters were trained, and the name of the
            size it was inflated to; None and "" where it was not.
    """

    model: Any
    max_new_tokens: int
    sampling: Sampling | None = None
    warm: WarmTrie | None = None
    assistant: Any = None
    compiled: bool = True
    small: Any = None
    size: str = ""

    def methods(self, names: Sequence[str]) -> tuple[list[Method], dict[str, str]]:
        """The methods that can be made, and by name why another cannot."""
        made, left_out = [], {}
        for name in names:
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
        if name in HUGGING_FACE:
            return self._hugging_face(name)
        if name in (PLAIN, HOOKED):
            plain = self._draftree(name, runner="auto" if name == PLAIN else "hooked")
            plain.optional = name == PLAIN  # not every model qualifies
            return plain
        if name in (TENSORS, CAPTURED):
            return self._draftree(name, runner=runner_in(self.model, name))
        if name == LIMITED:
            return self._draftree(name, self.maker(WARM), lambda: DynamicTree(NODES - 1))
        if name in (WARM, REFUSED):
            make = self.maker(WARM)
            assert self.warm is not None
            return self._draftree(name, make, self.warm.shape, reject_drafts=name == REFUSED)
        makers = [self.maker(part) for part in parts_of(name)]
        drafted = self._draftree(name, makers[0] if len(makers) == 1 else lambda: Merge([make() for make in makers]))
        drafted.optional = SMALL in parts_of(name)  # whose vocabulary may be another
        return drafted

    def maker(self, name: str) -> Callable[[], Drafter]:
        """What makes the drafter called `name`, anew for each round.

        Raises:
            LeftOutError: it cannot be made here.
        """
        if name == WARM:
            if self.warm is None:
                raise LeftOutError(NO_LESSONS)
            return self.warm.drafter
        if name == SMALL:
            small = self.draft_model()
            return lambda: DraftModel(small)
        if name in (*TRAINED, SELF):
            method = name.replace("_", "-")
            try:
                self._packaged(method)
            except ValueError:
                raise LeftOutError(EMBEDDED_ALONE) from None
            return lambda: self._packaged(method)
        outside: dict[str, Callable[[], Drafter]] = {"prompt_lookup": PromptLookup, "jacobi": Jacobi, COLD: Lookahead}
        return outside[name] if name in outside else lambda: load_drafter(Path(name), self.model)

    def draft_model(self) -> Any:
        """The small model that assists: the one given, or the embedded model's.

        Raises:
            LeftOutError: there is none.
        """
        if self.assistant is not None:
            return self.assistant
        try:
            return demo_drafter("draft-model", self.small or self.model).model
        except ValueError:
            raise LeftOutError(f"{EMBEDDED_ALONE}: name one with --assistant") from None

    def _packaged(self, method: str) -> Drafter:
        held = demo_drafter(method, self.small or self.model)
        drafter: Drafter = held if self.small is None else inflate_drafter(held, self.model)
        return drafter

    def _hugging_face(self, name: str) -> Method:
        given = (name, label_of(name), self.model, self.max_new_tokens, self.sampling)
        if name == COMPILED:
            if not self.compiled:
                raise LeftOutError("--no-compile")
            return CompiledHuggingFace(*given)
        if name == PROMPT_LOOKUP:
            return DraftingHuggingFace(*given, prompt_lookup_num_tokens=10)
        if name == ASSISTED:
            return DraftingHuggingFace(*given, assistant_model=self.draft_model())
        return HuggingFace(*given)

    def _draftree(self, name: str, *making: Callable[[], Any], **options: Any) -> Draftree:
        given = (name, label_of(name), self.model, self.max_new_tokens)
        return Draftree(*given, *making, sampling=self.sampling, **options)


def runner_in(model: Any, name: str) -> Any:
    """What runs the model's passes in the way that `name` stands for: TENSORS or CAPTURED."""
    return open_runner(model, WAYS[name])


def parts_of(name: str) -> list[str]:
    """The drafters that a name stands for."""
    return [name] if Path(name).is_dir() else name.split("+")


def label_of(name: str) -> str:
    """What tables call the method `name`."""
    known = LABELS | MORE_LABELS
    return " + ".join(known.get(part, Path(part).name) for part in parts_of(name))


def checked_name(name: str) -> str:
    """The name of a method as result files spell it; the command line's dashes are taken for underscores.

    Raises:
        ValueError: no such method, or a merge with something that is no drafter.
    """
    if Path(name).is_dir():
        return name
    found = []
    for part in name.split("+"):
        known = part if Path(part).is_dir() else part.replace("-", "_")
        if known not in LABELS and not Path(part).is_dir():
            near = difflib.get_close_matches(known, LABELS, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"There is no method {part!r}: choose {', '.join(LABELS)}, drafters joined by +, or the folder of a "
                f"trained drafter.{hint}"
            )
        if "+" in name and known in NO_DRAFTS:
            raise ValueError(f"{part!r} is no drafter that can be merged: leave it out of {name!r}.")
        found.append(known)
    return "+".join(found)
